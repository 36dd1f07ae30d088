// Bytes are a type: a count of bytes cannot be mistaken for a count of elements.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace h3 {

class ByteCount {
 public:
  constexpr ByteCount() = default;
  constexpr explicit ByteCount(int64_t bytes) : bytes_(bytes) {}
  constexpr int64_t value() const { return bytes_; }
  constexpr auto operator<=>(const ByteCount&) const = default;
  constexpr ByteCount& operator+=(ByteCount o) { bytes_ += o.bytes_; return *this; }
  constexpr ByteCount& operator-=(ByteCount o) { bytes_ -= o.bytes_; return *this; }
  friend constexpr ByteCount operator+(ByteCount a, ByteCount b) { return ByteCount(a.bytes_ + b.bytes_); }
  friend constexpr ByteCount operator-(ByteCount a, ByteCount b) { return ByteCount(a.bytes_ - b.bytes_); }

 private:
  int64_t bytes_ = 0;
};

constexpr ByteCount MiB(int64_t n) { return ByteCount(n << 20); }
constexpr ByteCount GiB(int64_t n) { return ByteCount(n << 30); }

// "38220.0 MiB", "512 B".
inline std::string Human(ByteCount bytes) {
  const double b = static_cast<double>(bytes.value());
  if (b < 1024) return absl::StrFormat("%d B", bytes.value());
  if (b < 1024.0 * 1024) return absl::StrFormat("%.1f KiB", b / 1024);
  if (b < 100 * 1024.0 * 1024 * 1024) return absl::StrFormat("%.1f MiB", b / (1 << 20));
  return absl::StrFormat("%.1f GiB", b / (1 << 30));
}

// "80GiB", "512MiB", "1000000": INVALID_ARGUMENT for anything else.
absl::StatusOr<ByteCount> ParseBytes(absl::string_view text);

}  // namespace h3
