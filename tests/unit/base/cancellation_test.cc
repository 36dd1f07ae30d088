#include "server/base/cancellation.h"

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/error.h"

namespace h3 {
namespace {

TEST(CancellationTest, IsOffUntilACopyCancels) {
  CancellationToken token;
  EXPECT_FALSE(token.IsCancelled());
  EXPECT_TRUE(token.Check("here").ok());
  CancellationToken copy = token;
  copy.Cancel(Refuse(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the client", {{"id", "7"}}));
  EXPECT_TRUE(token.IsCancelled());
  const absl::Status status = token.Check("before block 7");
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(status.message(), "cancelled by the client (before block 7)");
  EXPECT_EQ(ReasonOf(status), reason::kCancelled);
  EXPECT_EQ(DetailsOf(status).at("id"), "7");
}

TEST(CancellationTest, TheFirstReasonStays) {
  CancellationToken token;
  token.Cancel(absl::CancelledError("first"));
  token.Cancel(absl::DeadlineExceededError("second"));
  EXPECT_EQ(token.Check("x").code(), absl::StatusCode::kCancelled);
}

TEST(CancellationTest, TokensOfTheirOwnAreIndependent) {
  CancellationToken a, b;
  a.Cancel(absl::CancelledError(""));
  EXPECT_FALSE(b.IsCancelled());
}

TEST(CancellationTest, OneOfManyThreadsWinsAndAllReadersAgree) {
  CancellationToken token;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([token, i]() mutable { token.Cancel(absl::CancelledError(absl::StrCat(i))); });
    threads.emplace_back([token] {
      while (token.Check("x").ok()) std::this_thread::yield();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(token.Check("x"), token.Check("x"));
}

}  // namespace
}  // namespace h3
