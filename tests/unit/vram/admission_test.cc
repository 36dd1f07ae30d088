#include "server/vram/admission.h"

#include <gtest/gtest.h>

#include <utility>

#include "server/base/error.h"

namespace h3 {
namespace {

// A device of 1000 bytes, 20 of them never promised, 500 of the base.
class AdmissionTest : public ::testing::Test {
 protected:
  static Occupancy Holding(int64_t own = 0, int64_t others = 0, int64_t reusable = 0) {
    return {.fixed = ByteCount(500), .own = ByteCount(own), .others = ByteCount(others), .reusable = ByteCount(reusable)};
  }
  Admission admission{ByteCount(1000), ByteCount(20)};
};

TEST_F(AdmissionTest, WhatCanNeverFitIsRefusedWithTheNumbers) {
  EXPECT_TRUE(admission.Check("the request", {.held = ByteCount(400), .transient = ByteCount(80)}, Holding()).ok());
  const absl::Status status = admission.Check("the request", {.held = ByteCount(400), .transient = ByteCount(81)}, Holding());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), reason::kVramExceeded);
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.at("needed_bytes"), "481");
  EXPECT_EQ(details.at("missing_bytes"), "1");
  EXPECT_EQ(details.at("base_bytes"), "500");
  EXPECT_EQ(details.count("retry_seconds"), 0u);
}

TEST_F(AdmissionTest, WhatFitsLaterSaysWhen) {
  auto first = admission.Reserve("the session", {.held = ByteCount(300)}, Holding());
  ASSERT_TRUE(first.ok());
  const absl::Status status = admission.Reserve("the request", {.held = ByteCount(200)}, Holding()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).at("retry_seconds"), "1");
  EXPECT_EQ(DetailsOf(status).at("missing_bytes"), "20");
  EXPECT_FALSE(admission.Check("the request", {.held = ByteCount(200)}, Holding(0, /*others=*/300)).ok());
  *first = Reservation();
  EXPECT_EQ(admission.reserved(), ByteCount(0));
  EXPECT_TRUE(admission.Reserve("the request", {.held = ByteCount(200)}, Holding()).ok());
}

TEST_F(AdmissionTest, APromiseMovesAndItsEndGivesTheMemoryBack) {
  {
    Reservation kept;
    {
      auto made = admission.Reserve("the request", {.held = ByteCount(100), .transient = ByteCount(50)}, Holding());
      kept = *std::move(made);
    }
    EXPECT_EQ(admission.reserved(), ByteCount(150));
    EXPECT_EQ(admission.held(), ByteCount(100));
    kept.Settle(ByteCount(30));
    EXPECT_EQ(admission.held(), ByteCount(70));
  }
  EXPECT_EQ(admission.reserved(), ByteCount(0));
}

TEST_F(AdmissionTest, OneRequestAtATimeTakesWhatIsTransient) {
  const auto first = admission.Reserve("a", {.held = ByteCount(10), .transient = ByteCount(300)}, Holding());
  const auto second = admission.Reserve("b", {.held = ByteCount(10), .transient = ByteCount(400)}, Holding());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(admission.reserved(), ByteCount(420));
}

TEST_F(AdmissionTest, WhatIsReusableCountsAsRoomAndNotAsSpare) {
  const Occupancy holding = Holding(0, /*others=*/100, /*reusable=*/200);
  EXPECT_EQ(admission.Headroom(holding), ByteCount(380));
  EXPECT_EQ(admission.Spare(holding), ByteCount(180));
  EXPECT_TRUE(admission.Check("the request", {.held = ByteCount(380)}, holding).ok());
  EXPECT_FALSE(admission.Check("the request", {.held = ByteCount(381)}, holding).ok());
  EXPECT_EQ(admission.Headroom(Holding(0, 900)), ByteCount(0));
}

}  // namespace
}  // namespace h3
