// H3_CHECK: our own bugs end the process, with the place and the condition. Never used on somebody else's input.
#pragma once

namespace h3 {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);
}  // namespace h3

#define H3_CHECK(condition) (static_cast<bool>(condition) ? void() : ::h3::CheckFailed(__FILE__, __LINE__, #condition))
