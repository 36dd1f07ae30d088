// How h3ctl ends: exit codes and error texts, a contract with scripts.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace h3::ctl {

// Wrong usage: a command line that does not parse, or that contradicts itself. INVALID_ARGUMENT with the reason USAGE, which
// no server sends.
absl::Status UsageError(absl::string_view message);

// 0 done; 2 wrong usage; 3 refused: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, PERMISSION_DENIED, UNAUTHENTICATED;
// 4 not now: RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, ABORTED; 1 anything else.
int ExitCode(const absl::Status& status);

// {"code": "INVALID_ARGUMENT", "reason": "BAD_STRENGTH", "message": "...", "details": {...}}
std::string ErrorJson(const absl::Status& status);

// "INVALID_ARGUMENT / BAD_STRENGTH: ...": one line.
std::string ErrorLine(const absl::Status& status);

// The same refusal with `prefix` before its message: "request.safetensors: layout: ...".
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

}  // namespace h3::ctl
