// Text from strangers' files, made fit for protobuf strings, trailers and logs.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace h3 {

// True for valid UTF-8.
bool IsText(absl::string_view text);

// At most `most` bytes of valid UTF-8 on one line, cut between characters. A byte that fits nowhere becomes "?", a control character
// a space.
std::string CleanText(absl::string_view text, size_t most);

}  // namespace h3
