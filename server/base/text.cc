#include "server/base/text.h"

#include <algorithm>

namespace h3 {
namespace {

// Length of the UTF-8 sequence that `text` starts with; 0 where it starts with none.
size_t SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = byte(0) < 0x80   ? 1
                        : byte(0) < 0xc2 ? 0
                        : byte(0) < 0xe0 ? 2
                        : byte(0) < 0xf0 ? 3
                        : byte(0) < 0xf5 ? 4
                                         : 0;
  if (length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what lies beyond U+10FFFF.
  if (length == 3 && ((byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xed && byte(1) >= 0xa0))) return 0;
  if (length == 4 && ((byte(0) == 0xf0 && byte(1) < 0x90) || (byte(0) == 0xf4 && byte(1) >= 0x90))) return 0;
  return length;
}

}  // namespace

bool IsText(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string CleanText(absl::string_view text, size_t most) {
  std::string clean;
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    if (clean.size() + std::max<size_t>(length, 1) > most) break;
    if (length == 0) {
      clean += '?';
    } else if (length == 1 && (static_cast<unsigned char>(text[0]) < 0x20 || text[0] == 0x7f)) {
      clean += ' ';
    } else {
      clean.append(text.data(), length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return clean;
}

}  // namespace h3
