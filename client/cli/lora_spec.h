// What a user types after --lora: one adapter of a stack.
#pragma once

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

}  // namespace h3::ctl
