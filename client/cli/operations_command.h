// `h3ctl model | status | memory`.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/cli/context.h"
#include "h3/v1/operations.pb.h"

namespace h3::ctl {

absl::Status RunModel(Context& context);
absl::Status RunStatus(Context& context);
// `watch`: again every second until Ctrl-C, which is a success: a live view on a terminal, else one JSON object a line.
absl::Status RunMemory(bool watch, Context& context);

// The ledger of one device: its owners, which sum to `used`, the rest of the device, its adapters, and what merged copies of
// the pinned adapters would hold in addition.
std::string MemoryText(const v1::DeviceMemory& device);

}  // namespace h3::ctl
