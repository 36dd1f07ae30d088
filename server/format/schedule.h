// Sigma schedules, in float32 and equal to the published ones bit for bit (golden/expected/sigmas.safetensors).
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"

namespace h3 {

inline constexpr double kDefaultVideoShift = 12.0;
inline constexpr double kDefaultAudioShift = 3.0;

// s b / (1 + (s - 1) b).
double ShiftSigma(double base, double shift);
// The base sigma that ShiftSigma takes to `sigma`.
double UnshiftSigma(double sigma, double shift);

enum class ScheduleKind { kOfficial, kNormal };

struct ScheduleSpec {
  ScheduleKind kind = ScheduleKind::kOfficial;
  int64_t evaluations = 0;
  double video_shift = kDefaultVideoShift;
  double audio_shift = kDefaultAudioShift;
  std::vector<float> video_sigmas;  // Explicit, after the shift; replaces kind and evaluations.
  std::vector<float> audio_sigmas;  // Explicit; only with video_sigmas.
};

// n + 1 sigmas each, from the first to 0.
struct Schedule {
  std::vector<float> video;
  std::vector<float> audio;
  int64_t evaluations() const { return static_cast<int64_t>(video.size()) - 1; }
};

// INVALID_ARGUMENT / BAD_REQUEST: no evaluations or more than 1000, shifts that are not positive and finite, explicit sigmas that
// are not strictly decreasing within [0, 1] to 0, lists of different lengths.
absl::StatusOr<Schedule> MakeSchedule(const ScheduleSpec& spec);

}  // namespace h3
