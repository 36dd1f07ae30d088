// Tensors as chunks of at most 1 MiB, in both directions: announced first, then sent in order without a gap.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "h3/v1/types.pb.h"

namespace h3 {

inline constexpr int64_t kChunkBytes = int64_t{1} << 20;

// Bytes of one element; 0 for an unknown type.
int64_t ElementBytes(v1::DType dtype);

using TensorSpecs = google::protobuf::RepeatedPtrField<v1::TensorSpec>;

// INVALID_ARGUMENT / BAD_TENSOR: more than 256 tensors, an unknown type, a negative size, more than 8 dimensions, bytes that
// are not shape x element, a name twice or longer than 256 bytes, more than `max_bytes` in all (trying again would not help).
absl::Status CheckTensorSpecs(const TensorSpecs& specs, int64_t max_bytes);

// Puts chunks together. Thread-compatible.
class TensorAssembler {
 public:
  // `specs` must have passed CheckTensorSpecs. Memory grows with what arrives, not with what is announced.
  explicit TensorAssembler(const TensorSpecs& specs);

  // INVALID_ARGUMENT / BAD_TENSOR: a chunk out of order, larger than kChunkBytes, or past the end of its tensor.
  absl::Status Add(const v1::TensorChunk& chunk);
  // Every announced byte has come.
  bool complete() const { return next_ == specs_.size(); }
  // INVALID_ARGUMENT / BAD_TENSOR naming the first tensor of which bytes are missing; OK when complete.
  absl::Status CheckComplete() const;

  const std::vector<v1::TensorSpec>& specs() const { return specs_; }
  // The bytes of each tensor, in announced order. Once, when complete.
  std::vector<std::string> Take() { return std::move(data_); }

 private:
  void SkipEmpty();

  const std::vector<v1::TensorSpec> specs_;
  std::vector<std::string> data_;
  size_t next_ = 0;  // The tensor that is being received.
};

// Cuts announced tensors into chunks. Borrows the bytes. Thread-compatible.
class ChunkReader {
 public:
  // `data`: the bytes of each announced tensor.
  explicit ChunkReader(std::vector<absl::string_view> data) : data_(std::move(data)) {}

  // Fills in the next chunk; false when there is none.
  bool Next(v1::TensorChunk& chunk);

 private:
  const std::vector<absl::string_view> data_;
  size_t tensor_ = 0;
  size_t offset_ = 0;
};

}  // namespace h3
