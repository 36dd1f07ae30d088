// `h3ctl plan`: what a request would take on a device, and what a merging runtime would hold in addition. From headers alone.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace h3::ctl {

struct PlanFlags {
  std::string model;
  std::vector<std::string> lora;  // SPECs whose NAME is a file of this machine.
  std::string video = "1280x704x124";
  int64_t text_tokens = 512;
  int64_t evaluations = 8;
  std::string dtype = "auto";
  std::string adaln_residency = "device";
  std::string workspace = "256MiB";
  std::string device_memory;  // Empty: not said.
  double resident = 1;        // Part of the weights that a merging runtime keeps on the device.
};

// Blocks on the disk. INVALID_ARGUMENT / USAGE: a flag that does not parse; else as OpenCheckpoint, and refusals of an adapter as a
// server's.
absl::Status RunPlan(const PlanFlags& flags, bool json, std::ostream& out);

}  // namespace h3::ctl
