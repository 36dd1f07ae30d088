// Reads safetensors headers, strictly: nothing is allocated on the word of the file, and what is not exactly right is refused.
// Format: 8 bytes little-endian header length, JSON header, data. See https://github.com/huggingface/safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/confined_file.h"
#include "server/format/dtype.h"

namespace h3 {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // From the start of the file.
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // By name.
  std::map<std::string, std::string> metadata;
  int64_t file_bytes = 0;

  // Null when there is none. The pointer lives as long as the header.
  const TensorInfo* Find(absl::string_view name) const;
};

// The largest JSON header that is read: 100 MB, as the reference library.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

// `begin`: the file from its first byte, at least through the end of the JSON header (more is ignored); `file_bytes`: its size.
// INVALID_ARGUMENT / MALFORMED_FILE: anything but a well-formed header whose tensors tile the rest of the file exactly,
// without gap, overlap or trailing bytes; duplicate names; unknown dtypes; a shape that does not give its byte count.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view begin, int64_t file_bytes);

// Opens, reads the header and closes. Blocks on the disk. NOT_FOUND: no such file (or not a regular one).
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path);
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const FileDescriptor& file);

}  // namespace h3
