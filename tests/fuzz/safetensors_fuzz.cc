// ParseSafetensorsHeader on any bytes: a file, or the text of a header alone. Whatever is accepted tiles the file exactly.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "server/base/check.h"
#include "server/format/dtype.h"
#include "server/format/safetensors.h"
#include "tests/fuzz/header_text.h"

namespace h3 {
namespace {

// Wider than any product that the parser may have accepted, so that an overflow there shows here.
__int128 ShapeBytes(const TensorInfo& tensor) {
  __int128 bytes = DTypeBytes(tensor.dtype);
  for (const int64_t size : tensor.shape) {
    H3_CHECK(size >= 0);
    bytes *= size;
    H3_CHECK(bytes <= INT64_MAX);
  }
  return bytes;
}

void CheckHeader(const SafetensorsHeader& header, int64_t data_begin, int64_t file_bytes) {
  H3_CHECK(header.file_bytes == file_bytes);
  const std::vector<TensorInfo>& tensors = header.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& tensor = tensors[i];
    H3_CHECK(tensor.offset >= data_begin && tensor.offset <= file_bytes);
    H3_CHECK(tensor.bytes >= 0 && tensor.bytes <= file_bytes - tensor.offset);
    H3_CHECK(ShapeBytes(tensor) == tensor.bytes);
    H3_CHECK(i == 0 || tensors[i - 1].name < tensor.name);
    H3_CHECK(header.Find(tensor.name) == &tensor);
  }
  std::vector<const TensorInfo*> by_place;
  for (const TensorInfo& tensor : tensors) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::tuple(a->offset, a->bytes) < std::tuple(b->offset, b->bytes);
  });
  int64_t next = data_begin;
  for (const TensorInfo* tensor : by_place) {
    H3_CHECK(tensor->offset == next);
    next += tensor->bytes;
  }
  H3_CHECK(next == file_bytes);
}

void Parse(absl::string_view begin, int64_t file_bytes) {
  const auto header = ParseSafetensorsHeader(begin, file_bytes);
  if (!header.ok()) return;
  uint64_t length = 0;
  std::memcpy(&length, begin.data(), sizeof(length));
  CheckHeader(*header, static_cast<int64_t>(sizeof(length) + length), file_bytes);
}

}  // namespace
}  // namespace h3

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  h3::Parse(input, static_cast<int64_t>(size));
  if (!h3::fuzz::BeginsAsFile(input)) {
    if (const auto file = h3::fuzz::FileOfHeader(input); file.has_value()) h3::Parse(file->begin, file->file_bytes);
  }
  return 0;
}
