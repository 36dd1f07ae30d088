#include "proto/support/status.h"

#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace h3 {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

google::rpc::Status Rich(const grpc::Status& status) {
  google::rpc::Status rich;
  EXPECT_TRUE(rich.ParseFromString(status.error_details()));
  return rich;
}

// The first detail of this type, or one without content.
template <typename T>
T DetailOf(const grpc::Status& status) {
  T message;
  const google::rpc::Status rich = Rich(status);
  for (const google::protobuf::Any& detail : rich.details()) {
    if (detail.UnpackTo(&message)) break;
  }
  return message;
}

TEST(StatusTest, EveryCodeComesBackAsItWas) {
  std::set<std::string> names;
  for (int value = 1; value <= 16; ++value) {
    const auto code = static_cast<absl::StatusCode>(value);
    const grpc::Status sent = ToGrpc(Refuse(code, reason::kBadRequest, "what is wrong", {{"key", "value"}}));
    EXPECT_EQ(static_cast<int>(sent.error_code()), value);
    EXPECT_EQ(Rich(sent).code(), value);
    const absl::Status got = FromGrpc(sent);
    EXPECT_EQ(got.code(), code);
    EXPECT_EQ(got.message(), "what is wrong");
    EXPECT_EQ(ReasonOf(got), "BAD_REQUEST");
    EXPECT_THAT(DetailsOf(got), ElementsAre(Pair("key", "value")));
    names.insert(std::string(CodeName(code)));
  }
  EXPECT_EQ(names.size(), 16u);
  EXPECT_EQ(CodeName(absl::StatusCode::kInvalidArgument), "INVALID_ARGUMENT");
}

TEST(StatusTest, OkIsOkBothWays) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).error_details().empty());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(StatusTest, AStatusWithoutReasonKeepsCodeAndText) {
  const absl::Status got = FromGrpc(ToGrpc(absl::InternalError("broken")));
  EXPECT_EQ(got, absl::InternalError("broken"));
}

TEST(StatusTest, TheReasonTravelsAsErrorInfoOfOurDomain) {
  const auto info = DetailOf<google::rpc::ErrorInfo>(ToGrpc(RefuseArgument(reason::kBadLayout, "x", {{"rows", "7"}})));
  EXPECT_EQ(info.reason(), "BAD_LAYOUT");
  EXPECT_EQ(info.domain(), "h3.v1");
  EXPECT_EQ(info.metadata().at("rows"), "7");
}

TEST(StatusTest, RetrySecondsAreRetryInfoToo) {
  const auto with = [](const char* seconds) {
    return ToGrpc(Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "full", {{"retry_seconds", seconds}}));
  };
  EXPECT_EQ(DetailOf<google::rpc::RetryInfo>(with("12")).retry_delay().seconds(), 12);
  EXPECT_EQ(DetailOf<google::rpc::RetryInfo>(with("0.5")).retry_delay().nanos(), 500'000'000);
  for (const char* bad : {"soon", "-1", "nan", "inf", "1e30", ""}) {
    EXPECT_FALSE(DetailOf<google::rpc::RetryInfo>(with(bad)).has_retry_delay()) << bad;
  }
}

TEST(StatusTest, AFieldIsABadRequestToo) {
  const auto request =
      DetailOf<google::rpc::BadRequest>(ToGrpc(RefuseArgument(reason::kBadStrength, "not finite", {{"field", "stack[2]"}})));
  ASSERT_EQ(request.field_violations_size(), 1);
  EXPECT_EQ(request.field_violations(0).field(), "stack[2]");
  EXPECT_EQ(request.field_violations(0).description(), "not finite");
}

TEST(StatusTest, TextIsCappedBetweenCharacters) {
  const grpc::Status ascii = ToGrpc(absl::InternalError(std::string(5000, 'x')));
  EXPECT_EQ(ascii.error_message().size(), 1024u);
  std::string umlauts = "x";
  for (int i = 0; i < 1000; ++i) umlauts += "\xc3\xbc";
  EXPECT_EQ(ToGrpc(absl::InternalError(umlauts)).error_message().size(), 1023u);
}

TEST(StatusTest, DetailsAreCappedOneByOneAndTogether) {
  const auto one = DetailsOf(FromGrpc(ToGrpc(RefuseArgument(reason::kBadTensor, "x", {{"key", std::string(5000, 'v')}}))));
  EXPECT_EQ(one.at("key").size(), 512u);
  ErrorDetails many;
  for (int i = 0; i < 100; ++i) many[absl::StrCat("key", i)] = std::string(300, 'v');
  const grpc::Status sent = ToGrpc(RefuseArgument(reason::kBadTensor, std::string(5000, 'x'), many));
  size_t bytes = 0;
  for (const auto& [key, value] : DetailsOf(FromGrpc(sent))) bytes += key.size() + value.size();
  EXPECT_GT(bytes, 1000u);
  EXPECT_LE(bytes, 1536u);
  EXPECT_LT(sent.error_details().size() * 4 / 3 + 3 * sent.error_message().size(), 8192u);  // Base64, and percent-encoding.
}

TEST(StatusTest, WhatIsNoTextBecomesText) {
  const std::string bad("a\xff\xc3[\xed\xa0\x80\n\0z", 10);
  const grpc::Status sent = ToGrpc(RefuseArgument(reason::kBadTensor, bad, {{"tensor", bad}, {"field", bad}}));
  EXPECT_EQ(sent.error_message(), "a??[???  z");
  EXPECT_EQ(DetailsOf(FromGrpc(sent)).at("tensor"), "a??[???  z");
}

TEST(StatusTest, StrangeTrailersLeaveCodeAndText) {
  for (const std::string& trailers :
       {std::string("\xff\xff garbage"), std::string(), google::rpc::Status().SerializeAsString()}) {
    const absl::Status got = FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone", trailers));
    EXPECT_EQ(got.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(got.message(), "gone");
    EXPECT_EQ(ReasonOf(got), "");
  }
  EXPECT_EQ(FromGrpc(grpc::Status(static_cast<grpc::StatusCode>(77), "x")).code(), absl::StatusCode::kUnknown);
}

}  // namespace
}  // namespace h3
