// Tensors of a request: looked up by name, checked against what the layout and the model make them be, and brought to the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/format/request.h"

namespace h3 {

// Borrows the tensors. On the device thread.
class RequestTensors {
 public:
  RequestTensors(const std::vector<HostTensor>& tensors, c10::Device device) : tensors_(tensors), device_(device) {}

  // INVALID_ARGUMENT / BAD_TENSOR: missing, another shape, another type than float32, float16, bfloat16 or float64, or a byte count
  // that contradicts the shape; NOT_FINITE. `dtype`: what it becomes.
  absl::StatusOr<at::Tensor> Float(const std::string& name, const std::vector<int64_t>& shape, c10::ScalarType dtype);
  // int64 values.
  absl::StatusOr<std::vector<int64_t>> Integers(const std::string& name, int64_t count);
  bool Has(const std::string& name) const;
  // BAD_TENSOR: tensors that nobody asked for, or the same name twice. After the last look-up.
  absl::Status CheckAllUsed() const;

 private:
  absl::StatusOr<const HostTensor*> Find(const std::string& name, const std::vector<int64_t>& shape);

  const std::vector<HostTensor>& tensors_;
  const c10::Device device_;
  std::set<std::string> used_;
};

// INVALID_ARGUMENT / NOT_FINITE: finite factors can still overflow; what comes of that is no answer.
absl::Status CheckResult(const at::Tensor& video, const at::Tensor& audio);

// A float32 tensor of the device as bytes in host memory.
HostTensor ToHost(std::string name, const at::Tensor& tensor);

}  // namespace h3
