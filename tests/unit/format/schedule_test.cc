#include "server/format/schedule.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/golden.h"

namespace h3 {
namespace {

using testing::GoldenPath;
using testing::ReadTensors;
using testing::Values;

std::vector<double> AsDoubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

void ExpectEqualsGolden(ScheduleKind kind, const std::string& name, int64_t evaluations) {
  const auto golden = ReadTensors(GoldenPath("expected/sigmas.safetensors"));
  const auto schedule = MakeSchedule({.kind = kind, .evaluations = evaluations});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(AsDoubles(schedule->video), Values(golden.at(absl::StrCat(name, "_", evaluations, "_shift_12"))));
  EXPECT_EQ(AsDoubles(schedule->audio), Values(golden.at(absl::StrCat(name, "_", evaluations, "_shift_3"))));
  EXPECT_EQ(schedule->evaluations(), evaluations);
}

TEST(ScheduleTest, OfficialGridsEqualThePublishedOnesBitForBit) {
  for (const int64_t n : {2, 4, 8, 20, 50}) ExpectEqualsGolden(ScheduleKind::kOfficial, "evaluations", n);
}

TEST(ScheduleTest, NormalGridsEqualThePublishedOnesBitForBit) {
  for (const int64_t n : {4, 8, 20}) ExpectEqualsGolden(ScheduleKind::kNormal, "normal", n);
}

// Found by fuzzing: in float32 a tiny shift loses the first sigma, down to infinity.
TEST(ScheduleTest, RefusesShiftsThatFloat32CannotTell) {
  for (const double shift : {0.0, 1e-60, 1e-8, 1e-7, 1e-3, -1.0, 1001.0, std::nan("")}) {
    EXPECT_EQ(ReasonOf(MakeSchedule({.evaluations = 4, .video_shift = shift}).status()), reason::kBadRequest) << shift;
    EXPECT_EQ(ReasonOf(MakeSchedule({.evaluations = 4, .audio_shift = shift}).status()), reason::kBadRequest) << shift;
  }
  EXPECT_NEAR(MakeSchedule({.evaluations = 4, .video_shift = 0.01})->video.front(), 1, 1e-5);
}

TEST(ScheduleTest, EveryGridFallsFromOneToZero) {
  for (const ScheduleKind kind : {ScheduleKind::kOfficial, ScheduleKind::kNormal}) {
    for (const int64_t n : {1, 3, 999, 1000}) {
      const auto schedule = MakeSchedule({.kind = kind, .evaluations = n});
      ASSERT_TRUE(schedule.ok()) << schedule.status();
      EXPECT_EQ(schedule->video.front(), 1.0f);
      EXPECT_EQ(schedule->video.back(), 0.0f);
      for (size_t i = 1; i < schedule->audio.size(); ++i) EXPECT_LT(schedule->audio[i], schedule->audio[i - 1]);
    }
  }
}

TEST(ScheduleTest, UnshiftUndoesShift) {
  for (const double base : {0.0, 0.1, 0.62, 1.0}) EXPECT_NEAR(UnshiftSigma(ShiftSigma(base, 12), 12), base, 1e-12);
}

TEST(ScheduleTest, ExplicitVideoSigmasGiveTheAudioOnesOfTheSameBase) {
  const auto grid = MakeSchedule({.evaluations = 4});
  ASSERT_TRUE(grid.ok());
  const auto schedule = MakeSchedule({.video_sigmas = grid->video});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->video, grid->video);
  ASSERT_EQ(schedule->audio.size(), grid->audio.size());
  for (size_t i = 0; i < grid->audio.size(); ++i) EXPECT_NEAR(schedule->audio[i], grid->audio[i], 1e-6);
}

TEST(ScheduleTest, ExplicitSigmasOfBothStreamsAreTakenAsTheyAre) {
  const auto schedule = MakeSchedule({.video_sigmas = {0.9f, 0.5f, 0}, .audio_sigmas = {0.8f, 0.25f, 0}});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->video, (std::vector<float>{0.9f, 0.5f, 0}));
  EXPECT_EQ(schedule->audio, (std::vector<float>{0.8f, 0.25f, 0}));
}

TEST(ScheduleTest, RefusesWhatIsNoSchedule) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<float> long_list;
  for (int i = 1001; i >= 0; --i) long_list.push_back(static_cast<float>(i) / 1001.0f);
  const std::vector<ScheduleSpec> cases = {
      {},
      {.evaluations = -1},
      {.evaluations = 1001},
      {.evaluations = std::numeric_limits<int64_t>::max()},
      {.evaluations = 4, .video_shift = 0},
      {.evaluations = 4, .video_shift = -1},
      {.evaluations = 4, .video_shift = kInfinity},
      {.evaluations = 4, .audio_shift = std::nan("")},
      {.video_sigmas = {0}},
      {.video_sigmas = {1, 0.5f}},
      {.video_sigmas = {1, 0.5f, 0.5f, 0}},
      {.video_sigmas = {0.5f, 1, 0}},
      {.video_sigmas = {1.5f, 0}},
      {.video_sigmas = {1, -0.5f}},
      {.video_sigmas = {1, kNan, 0}},
      {.video_sigmas = {1, 0}, .audio_sigmas = {1, 0.5f, 0}},
      {.video_sigmas = {1, 0.5f, 0}, .audio_sigmas = {1, 1, 0}},
      {.evaluations = 2, .audio_sigmas = {1, 0.5f, 0}},
      {.video_sigmas = long_list},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto schedule = MakeSchedule(cases[i]);
    EXPECT_EQ(schedule.status().code(), absl::StatusCode::kInvalidArgument) << "case " << i;
    EXPECT_EQ(ReasonOf(schedule.status()), reason::kBadRequest) << "case " << i;
  }
}

}  // namespace
}  // namespace h3
