# Small targets through one function each. Sources are listed, never globbed; a dependency is public (DEPS) only if a header
# names it; consumers always use the h3:: alias.

add_library(h3_warnings INTERFACE)
target_compile_options(h3_warnings INTERFACE -Wall -Wextra -Wno-missing-field-initializers
  $<$<BOOL:${H3_WERROR}>:-Werror> $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)

if(H3_SANITIZE)
  add_compile_options(-fsanitize=${H3_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${H3_SANITIZE})
endif()

# ccache, where it is installed, with paths relative to the checkout so that build folders and clones share entries.
find_program(H3_CCACHE ccache)
if(H3_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=time_macros,include_file_mtime,include_file_ctime ${H3_CCACHE})
endif()

# h3_cc_library(NAME n HDRS ... SRCS ... DEPS ... PRIVATE_DEPS ...): library h3_n, alias h3::n. Without SRCS it is header-only.
function(h3_cc_library)
  cmake_parse_arguments(L "" "NAME" "HDRS;SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(L_SRCS)
    add_library(h3_${L_NAME} STATIC ${L_SRCS} ${L_HDRS})
    target_include_directories(h3_${L_NAME} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(h3_${L_NAME} PUBLIC ${L_DEPS} PRIVATE h3_warnings ${L_PRIVATE_DEPS})
  else()
    add_library(h3_${L_NAME} INTERFACE)
    target_include_directories(h3_${L_NAME} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(h3_${L_NAME} INTERFACE ${L_DEPS})
  endif()
  add_library(h3::${L_NAME} ALIAS h3_${L_NAME})
endfunction()

# h3_cc_binary(NAME h3-thing SRCS ... DEPS ...): the program bin/h3-thing.
function(h3_cc_binary)
  cmake_parse_arguments(L "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${L_NAME} ${L_SRCS})
  target_include_directories(${L_NAME} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${L_NAME} PRIVATE h3_warnings ${L_DEPS})
  set_target_properties(${L_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endfunction()

# Everything that a preset with the thread sanitizer can run: tests labelled tsan.
add_custom_target(h3_tsan_tests)

# h3_cc_test(NAME n SRCS ... DEPS ... LABELS ...): one GoogleTest binary, one ctest entry (a binary that links LibTorch takes
# half a second to start).
function(h3_cc_test)
  cmake_parse_arguments(L "" "NAME" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${L_NAME} ${L_SRCS})
  target_include_directories(${L_NAME} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${L_NAME} PRIVATE h3_warnings ${L_DEPS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${L_NAME} COMMAND ${L_NAME} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${L_NAME} PROPERTIES LABELS "unit;${L_LABELS}" TIMEOUT 300
    # The models of the tests are tiny: threads would only wait for each other, for ever on a busy machine.
    ENVIRONMENT "OMP_NUM_THREADS=1")
  if(H3_SANITIZE STREQUAL "thread")
    target_sources(${L_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/tests/testing/tsan_mutex.cc)
  endif()
  if("tsan" IN_LIST L_LABELS)
    add_dependencies(h3_tsan_tests ${L_NAME})
  endif()
endfunction()
