# Order matters: LibTorch's own CMake config would define an empty protobuf::libprotobuf, and its include folder holds an old
# google/protobuf. We take neither: LibTorch comes in as plain imported libraries (no CUDA toolkit needed to build, the device
# is chosen at run time), and its headers are searched last.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(nlohmann_json 3.9 REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(RE2 REQUIRED IMPORTED_TARGET re2)
find_package(CLI11 CONFIG REQUIRED)
find_package(SQLite3 REQUIRED)
find_package(spdlog CONFIG REQUIRED)
if(H3_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()

# google/rpc/*.proto, from the PyPI wheel googleapis-common-protos (scripts/setup.sh puts it there).
set(H3_GOOGLEAPIS_DIR ${PROJECT_SOURCE_DIR}/.deps/googleapis CACHE PATH "Folder that holds google/rpc/status.proto")
if(NOT EXISTS ${H3_GOOGLEAPIS_DIR}/google/rpc/status.proto)
  message(FATAL_ERROR "google/rpc/status.proto not found in ${H3_GOOGLEAPIS_DIR}. Run scripts/setup.sh, or set H3_GOOGLEAPIS_DIR.")
endif()

if(H3_WITH_TORCH)
  # A user's own LibTorch: -DCMAKE_PREFIX_PATH=/path/to/libtorch or -DTorch_DIR=.../share/cmake/Torch.
  if(Torch_DIR)
    get_filename_component(H3_TORCH_HINT "${Torch_DIR}/../../.." ABSOLUTE)
  endif()
  find_path(H3_TORCH_INCLUDE ATen/core/Tensor.h
    HINTS ${H3_TORCH_HINT} ${CMAKE_PREFIX_PATH} ${PROJECT_SOURCE_DIR}/.deps/libtorch PATH_SUFFIXES include NO_DEFAULT_PATH)
  if(NOT H3_TORCH_INCLUDE)
    message(FATAL_ERROR "LibTorch not found. Run scripts/setup.sh, or pass -DCMAKE_PREFIX_PATH=/path/to/libtorch.")
  endif()
  get_filename_component(H3_TORCH_ROOT ${H3_TORCH_INCLUDE} DIRECTORY)
  add_library(h3_torch INTERFACE)
  add_library(h3::torch ALIAS h3_torch)
  # -idirafter: behind Debian's own google/protobuf, so that a file which sees both takes Debian's; also silences warnings.
  target_compile_options(h3_torch INTERFACE "SHELL:-idirafter ${H3_TORCH_INCLUDE}")
  target_compile_definitions(h3_torch INTERFACE AT_PER_OPERATOR_HEADERS)
  target_link_directories(h3_torch INTERFACE ${H3_TORCH_ROOT}/lib)
  target_link_libraries(h3_torch INTERFACE torch torch_cpu c10)
  if(EXISTS ${H3_TORCH_ROOT}/lib/libtorch_cuda.so)
    target_link_libraries(h3_torch INTERFACE -Wl,--no-as-needed torch_cuda c10_cuda -Wl,--as-needed)
  endif()
  target_link_options(h3_torch INTERFACE -Wl,-rpath,${H3_TORCH_ROOT}/lib)
endif()
