// `h3ctl evaluate`: one model evaluation of a request file's rows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/context.h"
#include "client/cli/request_file.h"
#include "h3/v1/generation.pb.h"

namespace h3::ctl {

struct EvaluateFlags {
  std::string request;
  std::vector<std::string> lora;  // SPECs, in stack order.
  std::string preset;             // Instead of them.
  std::string output;
  std::optional<double> sigma;             // Video, after the shift.
  std::optional<double> video_t, audio_t;  // Both or none.
  std::optional<double> video_shift, audio_shift;
};

// The point: the timesteps, else the sigma, else the file's base_sigma. USAGE: none of them, or more than one flag.
absl::StatusOr<v1::Evaluation> MakeEvaluation(const EvaluateFlags& flags, const RequestFile& request);

// Writes `video` and `audio` velocity rows, condition rows first, and says what was evaluated on context.out.
absl::Status RunEvaluate(const EvaluateFlags& flags, Context& context);

}  // namespace h3::ctl
