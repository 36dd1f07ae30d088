#include "server/scheduler/backoff.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace h3 {
namespace {

TEST(RestartBackoffTest, DoublesFromAFifthOfASecondToHalfAMinute) {
  RestartBackoff backoff;
  absl::Duration expected = absl::Milliseconds(200);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(backoff.NextDelay(absl::ZeroDuration()), expected) << "restart " << i;
    expected = std::min(expected * 2, absl::Seconds(30));
  }
  EXPECT_EQ(expected, absl::Seconds(30));
}

TEST(RestartBackoffTest, AWorkerThatServedForAMinuteStartsOver) {
  RestartBackoff backoff;
  for (int i = 0; i < 5; ++i) backoff.NextDelay(absl::Seconds(59));
  EXPECT_GT(backoff.NextDelay(absl::Seconds(59)), absl::Seconds(1));
  EXPECT_EQ(backoff.NextDelay(absl::Minutes(1)), absl::Milliseconds(200));
  EXPECT_EQ(backoff.NextDelay(absl::ZeroDuration()), absl::Milliseconds(400));
}

}  // namespace
}  // namespace h3
