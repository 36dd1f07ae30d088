#include "client/cli/exit_code.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/base/error.h"

namespace h3::ctl {
namespace {

TEST(ExitCodeTest, EveryCodeHasItsPlaceInTheContract) {
  using Code = absl::StatusCode;
  const auto exit_code = [](Code code) { return ExitCode(absl::Status(code, "x")); };
  EXPECT_EQ(ExitCode(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCode(UsageError("x")), 2);
  for (const Code code :
       {Code::kInvalidArgument, Code::kNotFound, Code::kFailedPrecondition, Code::kPermissionDenied, Code::kUnauthenticated}) {
    EXPECT_EQ(exit_code(code), 3) << code;
  }
  for (const Code code :
       {Code::kResourceExhausted, Code::kUnavailable, Code::kDeadlineExceeded, Code::kCancelled, Code::kAborted}) {
    EXPECT_EQ(exit_code(code), 4) << code;
  }
  for (const Code code :
       {Code::kUnknown, Code::kInternal, Code::kUnimplemented, Code::kAlreadyExists, Code::kOutOfRange, Code::kDataLoss}) {
    EXPECT_EQ(exit_code(code), 1) << code;
  }
}

TEST(ExitCodeTest, TheJsonErrorHoldsCodeReasonMessageAndDetails) {
  const auto json = nlohmann::json::parse(
      ErrorJson(RefuseArgument(reason::kUnsupportedDora, "dora \xff here", {{"tensor", "blocks.0"}, {"count", "3"}})));
  EXPECT_EQ(json["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(json["reason"], "UNSUPPORTED_DORA");
  EXPECT_EQ(json["details"], nlohmann::json({{"tensor", "blocks.0"}, {"count", "3"}}));
  EXPECT_TRUE(json["message"].is_string());
  EXPECT_EQ(json.size(), 4u);
}

TEST(ExitCodeTest, TheReadableErrorIsOneLineWithTheReason) {
  EXPECT_EQ(ErrorLine(RefuseArgument(reason::kBadTensor, "two\nlines")), "INVALID_ARGUMENT / BAD_TENSOR: two lines");
  EXPECT_EQ(ErrorLine(absl::InternalError("no reason")), "INTERNAL: no reason");
}

TEST(ExitCodeTest, AnnotateKeepsReasonAndDetails) {
  const absl::Status status = Annotate(RefuseArgument(reason::kBadTensor, "bad", {{"tensor", "text"}}), "in.safetensors");
  EXPECT_EQ(status.message(), "in.safetensors: bad");
  EXPECT_EQ(ReasonOf(status), "BAD_TENSOR");
  EXPECT_EQ(DetailsOf(status).at("tensor"), "text");
}

}  // namespace
}  // namespace h3::ctl
