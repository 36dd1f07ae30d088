// Builds small safetensors files, sound ones and others.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "server/format/dtype.h"
#include "server/format/request.h"

namespace h3::testing {

// 8 bytes of length, the header, the data: nothing is checked.
inline std::string RawSafetensors(const std::string& header, const std::string& data = "") {
  const uint64_t length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file + header + data;
}

// A well-formed file of these tensors, in their order.
inline std::string BuildSafetensors(const std::vector<HostTensor>& tensors,
                                    const std::map<std::string, std::string>& metadata = {}) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::string data;
  for (const HostTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", std::string(DTypeName(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
    data += tensor.data;
  }
  return RawSafetensors(header.dump(), data);
}

// A tensor of zeros.
inline HostTensor Zeros(std::string name, std::vector<int64_t> shape, DType dtype = DType::kF32) {
  int64_t bytes = DTypeBytes(dtype);
  for (const int64_t size : shape) bytes *= size;
  return {std::move(name), dtype, std::move(shape), std::string(static_cast<size_t>(bytes), '\0')};
}

// A float32 scalar.
inline HostTensor Scalar(std::string name, float value) {
  HostTensor tensor = Zeros(std::move(name), {});
  std::memcpy(tensor.data.data(), &value, sizeof(value));
  return tensor;
}

}  // namespace h3::testing
