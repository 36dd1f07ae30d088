// What a user types after --lora: one adapter of a stack.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "h3/v1/types.pb.h"

namespace h3::ctl {

inline constexpr absl::string_view kLoraSpecGrammar =
    "NAME=STRENGTH[,video=F][,text=F][,audio=F][,per-evaluation=F:F:...][,auto-strength=FLOOR:CEILING][,alpha=A]"
    "[,leave-out=adaln][,apply=bypass|materialized]";

// NAME is whatever stands before the last `=` in front of the first option, so it may hold `=` and `,` itself. Numbers are
// checked for being numbers only; which values are allowed is the server's word (BAD_STRENGTH, BAD_SCALE).
// INVALID_ARGUMENT / USAGE: anything that is not of this grammar; the message names the part.
absl::StatusOr<v1::StackEntry> ParseLoraSpec(absl::string_view spec);

// The inverse: a SPEC that parses to the same entry, down to the last digit. What a SPEC cannot say (digest, settings) is left
// out; bounds of auto-strength that were left to the server are written as its defaults. A name that no SPEC can hold
// ("a=1,b") comes out as it is.
std::string FormatLoraSpec(const v1::StackEntry& entry);

}  // namespace h3::ctl
