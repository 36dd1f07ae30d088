#include "server/worker/request_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/tensor/device.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::Status BadTensor(const std::string& name, absl::string_view what, ErrorDetails details = {}) {
  details["tensor"] = name;
  return RefuseArgument(reason::kBadTensor, absl::StrCat("tensor ", name, ": ", what), std::move(details));
}

}  // namespace

absl::StatusOr<const HostTensor*> RequestTensors::Find(const std::string& name, const std::vector<int64_t>& shape) {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](const HostTensor& t) { return t.name == name; });
  if (found == tensors_.end()) return BadTensor(name, absl::StrCat("missing; ", ShapeText(shape), " is needed"));
  used_.insert(name);
  if (found->shape != shape) {
    return BadTensor(name, absl::StrCat("has shape ", ShapeText(found->shape), ", the layout and the model make it ", ShapeText(shape)),
                     {{"shape", ShapeText(found->shape)}, {"expected", ShapeText(shape)}});
  }
  int64_t bytes = DTypeBytes(found->dtype);
  for (const int64_t size : shape) bytes *= size;
  if (static_cast<int64_t>(found->data.size()) != bytes) {
    return BadTensor(name, absl::StrCat("has ", found->data.size(), " bytes, its shape makes them ", bytes));
  }
  return &*found;
}

absl::StatusOr<at::Tensor> RequestTensors::Float(const std::string& name, const std::vector<int64_t>& shape, c10::ScalarType dtype) {
  H3_ASSIGN_OR_RETURN(const HostTensor* tensor, Find(name, shape));
  const auto type = ToScalarType(tensor->dtype);
  if (!type.has_value() || !IsFloat(tensor->dtype)) {
    return BadTensor(name, absl::StrCat("has type ", DTypeName(tensor->dtype), "; F32, BF16, F16 or F64 is needed"));
  }
  at::Tensor out = at::empty(shape, at::TensorOptions().device(device_).dtype(dtype));
  out.copy_(at::from_blob(const_cast<char*>(tensor->data.data()), shape, at::TensorOptions().dtype(*type)));
  if (!out.isfinite().all().item<bool>()) {
    return RefuseArgument(reason::kNotFinite, absl::StrCat("tensor ", name, " holds NaN or infinity"), {{"tensor", name}});
  }
  return out;
}

absl::StatusOr<std::vector<int64_t>> RequestTensors::Integers(const std::string& name, int64_t count) {
  H3_ASSIGN_OR_RETURN(const HostTensor* tensor, Find(name, {count}));
  if (tensor->dtype != DType::kI64) return BadTensor(name, absl::StrCat("has type ", DTypeName(tensor->dtype), "; I64 is needed"));
  std::vector<int64_t> values(static_cast<size_t>(count));
  std::memcpy(values.data(), tensor->data.data(), tensor->data.size());
  return values;
}

bool RequestTensors::Has(const std::string& name) const {
  return std::any_of(tensors_.begin(), tensors_.end(), [&](const HostTensor& t) { return t.name == name; });
}

absl::Status RequestTensors::CheckAllUsed() const {
  std::set<std::string> seen;
  for (const HostTensor& tensor : tensors_) {
    if (!used_.contains(tensor.name)) return BadTensor(tensor.name, "this request has no use for it");
    if (!seen.insert(tensor.name).second) return BadTensor(tensor.name, "given twice");
  }
  return absl::OkStatus();
}

absl::Status CheckResult(const at::Tensor& video, const at::Tensor& audio) {
  const OwnerScope owner(Owner::kWorkspace);
  for (const auto& [name, tensor] : {std::pair("video", video), std::pair("audio", audio)}) {
    if (tensor.isfinite().all().item<bool>()) continue;
    return RefuseArgument(reason::kNotFinite,
                          absl::StrCat("the result's ", name, " rows hold NaN or infinity: values overflowed on the way; lower the "
                                       "strengths, or look at the adapters with `h3ctl adapters check`"),
                          {{"tensor", name}});
  }
  return absl::OkStatus();
}

HostTensor ToHost(std::string name, const at::Tensor& tensor) {
  const OwnerScope owner(Owner::kStaging);
  const at::Tensor host = tensor.to(at::kCPU, at::kFloat).contiguous();
  HostTensor out{.name = std::move(name), .dtype = DType::kF32, .shape = host.sizes().vec()};
  out.data.assign(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
  return out;
}

}  // namespace h3
