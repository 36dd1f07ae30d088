#include "server/format/schedule.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

constexpr int64_t kMaxEvaluations = 1000;

// Below, float32 loses the first sigma: at 1e-7 it would be 0.84 in the place of 1.
constexpr double kMinShift = 0.01, kMaxShift = 1000;

absl::Status BadSchedule(absl::string_view what) { return RefuseArgument(reason::kBadRequest, absl::StrCat("sampling: ", what)); }

// torch.linspace in float32: from both ends towards the middle, each value rounded once (its kernels use fused multiply-add).
std::vector<float> Linspace(float start, float end, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  if (count == 1) return {start};
  const float step = (end - start) / static_cast<float>(count - 1);
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] =
        i < count / 2 ? std::fma(step, static_cast<float>(i), start) : std::fma(-step, static_cast<float>(count - 1 - i), end);
  }
  return values;
}

// s b / (1 + (s - 1) b) in float32, in the order in which torch evaluates it; repeated values collapse to one.
std::vector<float> Shifted(const std::vector<float>& base, double shift) {
  const float s = static_cast<float>(shift), s1 = static_cast<float>(shift - 1.0);
  std::vector<float> sigmas;
  for (const float b : base) {
    const float sigma = s * b / (1.0f + s1 * b);
    if (sigmas.empty() || sigma != sigmas.back()) sigmas.push_back(sigma);
  }
  return sigmas;
}

absl::Status CheckSigmas(const std::vector<float>& sigmas, absl::string_view name) {
  if (sigmas.size() < 2) return BadSchedule(absl::StrCat(name, " needs at least two values, the last 0"));
  for (size_t i = 0; i < sigmas.size(); ++i) {
    if (!(sigmas[i] >= 0 && sigmas[i] <= 1)) return BadSchedule(absl::StrCat(name, "[", i, "] = ", sigmas[i], " is outside 0 .. 1"));
    if (i > 0 && !(sigmas[i] < sigmas[i - 1])) {
      return BadSchedule(absl::StrCat(name, " must decrease strictly; [", i - 1, "] = ", sigmas[i - 1], ", [", i, "] = ", sigmas[i]));
    }
  }
  if (sigmas.back() != 0) return BadSchedule(absl::StrCat(name, " must end in 0, not ", sigmas.back()));
  return absl::OkStatus();
}

}  // namespace

double ShiftSigma(double base, double shift) { return shift * base / (1 + (shift - 1) * base); }

double UnshiftSigma(double sigma, double shift) { return sigma / (shift - (shift - 1) * sigma); }

absl::StatusOr<Schedule> MakeSchedule(const ScheduleSpec& spec) {
  for (const double shift : {spec.video_shift, spec.audio_shift}) {
    if (!(shift >= kMinShift && shift <= kMaxShift)) {
      return BadSchedule(absl::StrCat("shift ", shift, " is outside ", kMinShift, " .. ", kMaxShift));
    }
  }
  Schedule schedule;
  if (!spec.video_sigmas.empty()) {
    H3_RETURN_IF_ERROR(CheckSigmas(spec.video_sigmas, "video sigmas"));
    schedule.video = spec.video_sigmas;
    schedule.audio = spec.audio_sigmas;
    if (schedule.audio.empty()) {
      for (const float sigma : schedule.video) {
        schedule.audio.push_back(static_cast<float>(ShiftSigma(UnshiftSigma(sigma, spec.video_shift), spec.audio_shift)));
      }
    }
    H3_RETURN_IF_ERROR(CheckSigmas(schedule.audio, "audio sigmas"));
  } else {
    if (!spec.audio_sigmas.empty()) return BadSchedule("audio sigmas need video sigmas beside them");
    if (spec.evaluations < 1 || spec.evaluations > kMaxEvaluations) {
      return BadSchedule(absl::StrCat(spec.evaluations, " evaluations; 1 to ", kMaxEvaluations, " are possible"));
    }
    std::vector<float> base;
    if (spec.kind == ScheduleKind::kOfficial) {
      base = Linspace(1, 0, spec.evaluations + 1);
    } else {
      // The last point of the grid before 0 is that of t = 0.001 under the video's shift. The published grid is spaced in
      // thousandths, which shows in the last bit.
      base = Linspace(1000, static_cast<float>(1000 * ShiftSigma(0.001, spec.video_shift)), spec.evaluations);
      for (float& b : base) b /= 1000.0f;
      base.push_back(0);
    }
    schedule.video = Shifted(base, spec.video_shift);
    schedule.audio = Shifted(base, spec.audio_shift);
  }
  if (schedule.video.size() != schedule.audio.size()) {
    return BadSchedule(absl::StrCat(schedule.video.size(), " video sigmas but ", schedule.audio.size(),
                                    " audio sigmas; one evaluation serves both streams"));
  }
  if (schedule.evaluations() > kMaxEvaluations) {
    return BadSchedule(absl::StrCat(schedule.evaluations(), " evaluations; at most ", kMaxEvaluations, " are possible"));
  }
  return schedule;
}

}  // namespace h3
