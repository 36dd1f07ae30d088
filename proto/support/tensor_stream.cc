#include "proto/support/tensor_stream.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace h3 {
namespace {

constexpr int kMaxTensors = 256;
constexpr int kMaxDimensions = 8;
constexpr size_t kMaxNameBytes = 256;

absl::Status BadTensor(absl::string_view name, absl::string_view what) {
  return RefuseArgument(reason::kBadTensor, absl::StrCat("tensor ", name, ": ", what), {{"tensor", std::string(name)}});
}

}  // namespace

int64_t ElementBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F64:
    case v1::DTYPE_I64:
      return 8;
    case v1::DTYPE_F32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    default:
      return 0;
  }
}

absl::Status CheckTensorSpecs(const TensorSpecs& specs, int64_t max_bytes) {
  if (specs.size() > kMaxTensors) {
    return RefuseArgument(reason::kBadTensor,
                          absl::StrCat(specs.size(), " tensors are announced; at most ", kMaxTensors, " are taken"));
  }
  std::set<absl::string_view> names;
  int64_t total = 0;
  for (const v1::TensorSpec& spec : specs) {
    if (spec.name().empty() || spec.name().size() > kMaxNameBytes) {
      return RefuseArgument(reason::kBadTensor, absl::StrCat("a tensor's name has ", spec.name().size(), " bytes; 1 to ",
                                                             kMaxNameBytes, " are allowed"));
    }
    if (!names.insert(spec.name()).second) return BadTensor(spec.name(), "announced twice");
    int64_t bytes = ElementBytes(spec.dtype());
    if (bytes == 0) return BadTensor(spec.name(), "has no known dtype");
    if (spec.shape_size() > kMaxDimensions)
      return BadTensor(spec.name(), absl::StrCat("has ", spec.shape_size(), " dimensions"));
    for (const int64_t size : spec.shape()) {
      if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
        return BadTensor(spec.name(), absl::StrCat("has an impossible size ", size));
    }
    if (static_cast<uint64_t>(bytes) != spec.bytes()) {
      return BadTensor(spec.name(), absl::StrCat("announces ", spec.bytes(), " bytes, its shape and dtype make ", bytes));
    }
    if (__builtin_add_overflow(total, bytes, &total) || total > max_bytes) {
      return Refuse(absl::StatusCode::kInvalidArgument, reason::kBadTensor,
                    absl::StrCat("the request announces more than ", max_bytes, " bytes of tensors (up to ", spec.name(), ")"),
                    {{"tensor", spec.name()}, {"limit_bytes", absl::StrCat(max_bytes)}});
    }
  }
  return absl::OkStatus();
}

TensorAssembler::TensorAssembler(const TensorSpecs& specs) : specs_(specs.begin(), specs.end()), data_(specs_.size()) {
  SkipEmpty();
}

void TensorAssembler::SkipEmpty() {
  while (next_ < specs_.size() && data_[next_].size() == specs_[next_].bytes()) ++next_;
}

absl::Status TensorAssembler::Add(const v1::TensorChunk& chunk) {
  if (complete()) return RefuseArgument(reason::kBadTensor, "a chunk after the last announced byte");
  const v1::TensorSpec& spec = specs_[next_];
  std::string& data = data_[next_];
  if (chunk.tensor() != next_ || chunk.offset() != data.size()) {
    return BadTensor(spec.name(), absl::StrCat("a chunk of tensor ", chunk.tensor(), " at ", chunk.offset(), " where tensor ",
                                               next_, " at ", data.size(), " is next"));
  }
  if (chunk.data().empty() || chunk.data().size() > static_cast<size_t>(kChunkBytes)) {
    return BadTensor(spec.name(),
                     absl::StrCat("a chunk of ", chunk.data().size(), " bytes; 1 to ", kChunkBytes, " are allowed"));
  }
  if (chunk.data().size() > spec.bytes() - data.size()) return BadTensor(spec.name(), "a chunk past its end");
  data.append(chunk.data());
  SkipEmpty();
  return absl::OkStatus();
}

absl::Status TensorAssembler::CheckComplete() const {
  if (complete()) return absl::OkStatus();
  return BadTensor(specs_[next_].name(),
                   absl::StrCat("only ", data_[next_].size(), " of ", specs_[next_].bytes(), " bytes came"));
}

bool ChunkReader::Next(v1::TensorChunk& chunk) {
  while (tensor_ < data_.size() && offset_ == data_[tensor_].size()) {
    ++tensor_;
    offset_ = 0;
  }
  if (tensor_ == data_.size()) return false;
  const size_t count = std::min<size_t>(static_cast<size_t>(kChunkBytes), data_[tensor_].size() - offset_);
  chunk.set_tensor(static_cast<uint32_t>(tensor_));
  chunk.set_offset(offset_);
  chunk.set_data(data_[tensor_].data() + offset_, count);
  offset_ += count;
  return true;
}

}  // namespace h3
