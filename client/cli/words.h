// How h3ctl words things for people: enums, bytes, tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/generated_enum_reflection.h"

namespace h3::ctl {

// PARTITION_REF2VA -> "ref2va"; ..._UNSPECIFIED and numbers that are not known -> "unknown".
std::string Word(const google::protobuf::EnumDescriptor& type, int value);
template <typename Enum>
std::string Word(Enum value) {
  return Word(*google::protobuf::GetEnumDescriptor<Enum>(), value);
}

// 40076574720 -> "40,076,574,720".
std::string Grouped(uint64_t number);

// The first 12 characters of a digest: enough to tell two apart.
std::string ShortDigest(absl::string_view digest);

// As one word of a shell command line: in quotes where it needs them.
std::string ShellWord(absl::string_view text);

// 95 -> "1:35", 3725 -> "1:02:05".
std::string Duration(double seconds);

// "[=========>          ]", 32 characters wide; full where `total` is 0.
std::string Bar(uint64_t done, uint64_t total);

// "-" for what is empty.
std::string OrDash(std::string text);

// Rows of a table in aligned columns, two spaces apart, without trailing spaces. A column in `right` (by index) is aligned to
// the right. Widths count code points. Short rows are allowed.
std::string Table(const std::vector<std::vector<std::string>>& rows, const std::vector<size_t>& right = {});

}  // namespace h3::ctl
