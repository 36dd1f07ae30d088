#include "server/base/error.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace h3 {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(ErrorTest, ARefusalCarriesCodeReasonMessageAndDetails) {
  const absl::Status status =
      Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "the queue is full", {{"queued", "8"}});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "the queue is full");
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
  EXPECT_THAT(DetailsOf(status), ElementsAre(Pair("queued", "8")));
}

TEST(ErrorTest, TheCommonestCodeIsInvalidArgument) {
  EXPECT_EQ(RefuseArgument(reason::kBadLayout, "x").code(), absl::StatusCode::kInvalidArgument);
}

TEST(ErrorTest, OtherStatusesHaveNeitherReasonNorDetails) {
  for (const absl::Status& status : {absl::OkStatus(), absl::InternalError("x")}) {
    EXPECT_EQ(ReasonOf(status), "");
    EXPECT_THAT(DetailsOf(status), IsEmpty());
  }
}

TEST(ErrorTest, ADetailIsAddedOrReplaced) {
  absl::Status status = WithDetail(RefuseArgument(reason::kBadTensor, "x", {{"a", "1"}}), "b", "2");
  EXPECT_THAT(DetailsOf(status), ElementsAre(Pair("a", "1"), Pair("b", "2")));
  EXPECT_THAT(DetailsOf(WithDetail(status, "a", "3")), ElementsAre(Pair("a", "3"), Pair("b", "2")));
  EXPECT_EQ(ReasonOf(status), "BAD_TENSOR");
  EXPECT_TRUE(WithDetail(absl::OkStatus(), "a", "1").ok());
}

TEST(ErrorTest, DetailsKeepAnyBytes) {
  const std::string bytes("a\0\xff\n", 4);
  EXPECT_EQ(DetailsOf(RefuseArgument(reason::kBadTensor, "x", {{"key", bytes}})).at("key"), bytes);
}

}  // namespace
}  // namespace h3
