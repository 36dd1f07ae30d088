// `h3ctl generate`: a sampling run from a request file into an output file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/context.h"
#include "client/cli/request_file.h"
#include "h3/v1/generation.pb.h"

namespace h3::ctl {

struct GenerateFlags {
  std::string request;
  std::vector<std::string> lora;  // SPECs, in stack order.
  std::string preset;             // Instead of them.
  std::string output;
  std::optional<uint32_t> evaluations;
  std::optional<uint64_t> seed;  // Absent, and no noise from the request: drawn here and shown.
  bool noise_from_request = false;
  std::string schedule;  // "", "official", "normal".
  std::optional<double> video_shift, audio_shift;
  std::vector<float> sigmas, audio_sigmas;
  std::string priority;  // "", "low", "normal", "high".
  std::optional<double> deadline_seconds;
  std::string request_id;
};

// The header without its tensors. Shifts that no flag gives come from the file, else from the server. The seed must be decided.
// USAGE: a SPEC that does not parse, or neither evaluations nor sigmas.
absl::StatusOr<v1::GenerateHeader> MakeGenerateHeader(const GenerateFlags& flags, const RequestFile& request);

// Progress on context.out: as a bar on a terminal, else as JSON events. The output is checked first and written last.
absl::Status RunGenerate(GenerateFlags flags, Context& context);

}  // namespace h3::ctl
