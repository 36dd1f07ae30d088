// Typed refusals. A refusal is an absl::Status that carries a machine-readable reason (UPPER_SNAKE, a contract with users: see
// the README) and the numbers behind it as key -> value pairs. proto/support turns it into google.rpc.ErrorInfo and back.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace h3 {

namespace reason {
inline constexpr absl::string_view kAdapterChanged = "ADAPTER_CHANGED";
inline constexpr absl::string_view kAdalnNeedsGrid = "ADALN_NEEDS_GRID";
inline constexpr absl::string_view kAmbiguousNames = "AMBIGUOUS_NAMES";
inline constexpr absl::string_view kBadLayout = "BAD_LAYOUT";
inline constexpr absl::string_view kBadRequest = "BAD_REQUEST";
inline constexpr absl::string_view kBadScale = "BAD_SCALE";
inline constexpr absl::string_view kBadStrength = "BAD_STRENGTH";
inline constexpr absl::string_view kBadTensor = "BAD_TENSOR";
inline constexpr absl::string_view kBaseMismatch = "BASE_MISMATCH";
inline constexpr absl::string_view kCancelled = "CANCELLED";
inline constexpr absl::string_view kDeadlineTooShort = "DEADLINE_TOO_SHORT";
inline constexpr absl::string_view kDiskFull = "DISK_FULL";
inline constexpr absl::string_view kDraining = "DRAINING";
inline constexpr absl::string_view kInUse = "IN_USE";
inline constexpr absl::string_view kIncompleteCurve = "INCOMPLETE_CURVE";
inline constexpr absl::string_view kMalformedFile = "MALFORMED_FILE";
inline constexpr absl::string_view kMissingPair = "MISSING_PAIR";
inline constexpr absl::string_view kNameTaken = "NAME_TAKEN";
inline constexpr absl::string_view kNoAdapterTensors = "NO_ADAPTER_TENSORS";
inline constexpr absl::string_view kNotFinite = "NOT_FINITE";
inline constexpr absl::string_view kPresetChanged = "PRESET_CHANGED";
inline constexpr absl::string_view kQueueFull = "QUEUE_FULL";
inline constexpr absl::string_view kRankMismatch = "RANK_MISMATCH";
inline constexpr absl::string_view kRequestKillsWorkers = "REQUEST_KILLS_WORKERS";
inline constexpr absl::string_view kShapeMismatch = "SHAPE_MISMATCH";
inline constexpr absl::string_view kUnknownAdapter = "UNKNOWN_ADAPTER";
inline constexpr absl::string_view kUnknownModule = "UNKNOWN_MODULE";
inline constexpr absl::string_view kUnknownPreset = "UNKNOWN_PRESET";
inline constexpr absl::string_view kUnsupportedAdapterType = "UNSUPPORTED_ADAPTER_TYPE";
inline constexpr absl::string_view kUnsupportedBase = "UNSUPPORTED_BASE";
inline constexpr absl::string_view kUnsupportedDora = "UNSUPPORTED_DORA";
inline constexpr absl::string_view kVramExceeded = "VRAM_EXCEEDED";
inline constexpr absl::string_view kWorkerLost = "WORKER_LOST";
}  // namespace reason

using ErrorDetails = std::map<std::string, std::string>;

// A Status of `code` with `reason` and `details`. The message says what is wrong, where, and what to do next, in one line.
absl::Status Refuse(absl::StatusCode code, absl::string_view reason, absl::string_view message, ErrorDetails details = {});

// Shorthand for the commonest code.
absl::Status RefuseArgument(absl::string_view reason, absl::string_view message, ErrorDetails details = {});

// "" when the status carries none.
std::string ReasonOf(const absl::Status& status);
ErrorDetails DetailsOf(const absl::Status& status);

// The same refusal with one more detail.
absl::Status WithDetail(absl::Status status, absl::string_view key, absl::string_view value);

}  // namespace h3
