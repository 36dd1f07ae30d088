// `h3ctl inspect`: what a checkpoint or an adapter is, from its headers alone. Needs no server.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace h3::ctl {

struct InspectFlags {
  std::string path;   // Checkpoint (file or directory) or adapter (file or PEFT directory).
  std::string model;  // A checkpoint that the adapter is measured against; empty: the released H3.
};

// Blocks on the disk. Refuses an adapter for the reasons a server would (INVALID_ARGUMENT with UNKNOWN_MODULE, SHAPE_MISMATCH,
// ...).
absl::Status RunInspect(const InspectFlags& flags, bool json, std::ostream& out);

}  // namespace h3::ctl
