// A safetensors header written as text: an input that a fuzzer can change anywhere, without a length in front of it and data
// behind it that must change with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace h3::fuzz {

// The largest file of ext4. No data is ever built, so that sizes may be what a sparse file can make them.
inline constexpr int64_t kMaxFileBytes = int64_t{1} << 44;

// The beginning of a file, and the size of the whole.
struct HeaderFile {
  std::string begin;
  int64_t file_bytes = 0;
};

// Bytes of a file: its length field fits and a JSON object follows. What it says may still be wrong.
inline bool BeginsAsFile(absl::string_view input) {
  uint64_t length = 0;
  if (input.size() <= sizeof(length) || input[sizeof(length)] != '{') return false;
  std::memcpy(&length, input.data(), sizeof(length));
  return length <= input.size() - sizeof(length);
}

// The file that `json` is the header of: as long as its largest data_offsets say. nullopt: longer than kMaxFileBytes.
inline std::optional<HeaderFile> FileOfHeader(absl::string_view json) {
  int64_t data = 0;
  const auto header = nlohmann::json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (header.is_object()) {
    for (const auto& tensor : header) {
      if (!tensor.is_object()) continue;
      const auto offsets = tensor.find("data_offsets");
      if (offsets == tensor.end() || !offsets->is_array() || offsets->size() != 2) continue;
      const auto& end = offsets->back();
      if (!end.is_number_unsigned()) continue;
      if (end.get<uint64_t>() > static_cast<uint64_t>(kMaxFileBytes)) return std::nullopt;
      data = std::max(data, end.get<int64_t>());
    }
  }
  const uint64_t length = json.size();
  HeaderFile file{.begin = std::string(sizeof(length), '\0'),
                  .file_bytes = static_cast<int64_t>(sizeof(length) + length) + data};
  std::memcpy(file.begin.data(), &length, sizeof(length));
  file.begin.append(json.data(), json.size());
  return file;
}

}  // namespace h3::fuzz
