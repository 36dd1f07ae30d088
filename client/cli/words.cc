#include "client/cli/words.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace h3::ctl {
namespace {

constexpr size_t kBarWidth = 30;

// "WorkerState" -> "WORKER_STATE_", "Fc1Order" -> "FC1_ORDER_", "DType" -> "DTYPE_": the prefix that the style guide of
// protobuf gives the values.
std::string Prefix(absl::string_view type) {
  std::string prefix;
  for (size_t i = 0; i < type.size(); ++i) {
    const bool begins_word = absl::ascii_isupper(type[i]);
    if (i > 0 && begins_word && (absl::ascii_islower(type[i - 1]) || absl::ascii_isdigit(type[i - 1]))) prefix.push_back('_');
    prefix.push_back(absl::ascii_toupper(type[i]));
  }
  return prefix + "_";
}

size_t Width(absl::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

std::string Word(const google::protobuf::EnumDescriptor& type, int value) {
  const google::protobuf::EnumValueDescriptor* const known = type.FindValueByNumber(value);
  if (known == nullptr || value == 0) return "unknown";
  absl::string_view name = known->name();
  absl::ConsumePrefix(&name, Prefix(type.name()));
  return absl::AsciiStrToLower(name);
}

std::string Grouped(uint64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped.push_back(',');
    grouped.push_back(digits[i]);
  }
  return grouped;
}

std::string ShortDigest(absl::string_view digest) { return std::string(digest.substr(0, 12)); }

std::string ShellWord(absl::string_view text) {
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("-_./:=,+@%", static_cast<char>(c));
  });
  return plain ? std::string(text) : absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

std::string Duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto whole = static_cast<int64_t>(std::llround(std::min(seconds, 1e9)));
  if (whole >= 3600) return absl::StrFormat("%d:%02d:%02d", whole / 3600, whole / 60 % 60, whole % 60);
  return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
}

std::string Bar(uint64_t done, uint64_t total) {
  const size_t filled = total == 0 ? kBarWidth : kBarWidth * std::min(done, total) / total;
  std::string bar(filled, '=');
  if (filled < kBarWidth) bar.push_back('>');
  bar.resize(kBarWidth, ' ');
  return absl::StrCat("[", bar, "]");
}

std::string OrDash(std::string text) { return text.empty() ? "-" : std::move(text); }

std::string Table(const std::vector<std::vector<std::string>>& rows, const std::vector<size_t>& right) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], Width(row[c]));
  }
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - Width(row[c]), ' ');
      const bool to_the_right = std::find(right.begin(), right.end(), c) != right.end();
      absl::StrAppend(&line, c == 0 ? "" : "  ", to_the_right ? padding : "", row[c], to_the_right ? "" : padding);
    }
    absl::StrAppend(&table, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return table;
}

}  // namespace h3::ctl
