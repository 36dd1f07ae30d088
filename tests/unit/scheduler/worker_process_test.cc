#include "server/scheduler/worker_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace h3 {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kPatience = absl::Seconds(20);

// What a supervisor has told.
class Events {
 public:
  struct Loss {
    std::string how;
    int restarts = 0;
    absl::Duration delay;
  };

  // A shell that runs `script`.
  WorkerProcessOptions Shell(const std::string& script) { return Program("/bin/sh", {"-c", script}); }
  WorkerProcessOptions Program(const std::string& binary, std::vector<std::string> arguments) {
    return {.binary = binary,
            .arguments = std::move(arguments),
            .on_ready =
                [this](const std::string& ready) {
                  absl::MutexLock lock(&mu_);
                  ready_.push_back(ready);
                },
            .on_lost =
                [this](const std::string& how, int restarts, absl::Duration delay) {
                  absl::MutexLock lock(&mu_);
                  losses_.push_back({how, restarts, delay});
                }};
  }

  std::vector<std::string> WaitForReady(size_t count) { return WaitFor(ready_, count); }
  std::vector<Loss> WaitForLosses(size_t count) { return WaitFor(losses_, count); }
  std::vector<Loss> losses() {
    absl::MutexLock lock(&mu_);
    return losses_;
  }

 private:
  template <typename T>
  std::vector<T> WaitFor(std::vector<T>& list, size_t count) {
    const auto enough = [&] { return list.size() >= count; };
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), kPatience));
    return list;
  }

  absl::Mutex mu_;
  std::vector<std::string> ready_ ABSL_GUARDED_BY(mu_);
  std::vector<Loss> losses_ ABSL_GUARDED_BY(mu_);
};

TEST(WorkerProcessTest, TellsWhatTheReadyLineSaysAndIgnoresOtherOutput) {
  Events events;
  WorkerProcess process(events.Shell("echo noise; echo 'ready grpc=unix:a metrics=b'; exec cat"));
  EXPECT_EQ(events.WaitForReady(1).front(), "grpc=unix:a metrics=b");
  EXPECT_TRUE(events.losses().empty());
}

TEST(WorkerProcessTest, StartsAgainWhatEndsLaterEachTime) {
  Events events;
  WorkerProcess process(events.Shell("echo ready once; exit 3"));
  const auto losses = events.WaitForLosses(2);
  EXPECT_EQ(losses[0].how, "ended with exit code 3");
  EXPECT_EQ(losses[0].restarts, 0);
  EXPECT_EQ(losses[1].restarts, 1);
  EXPECT_GT(losses[1].delay, losses[0].delay);
  EXPECT_GE(events.WaitForReady(2).size(), 2u);
}

TEST(WorkerProcessTest, SaysWhichSignalEndedIt) {
  Events events;
  WorkerProcess process(events.Shell("kill -9 $$"));
  EXPECT_THAT(events.WaitForLosses(1)[0].how, HasSubstr("signal 9"));
}

TEST(WorkerProcessTest, AProgramThatIsNotThereIsALossWithoutItsPath) {
  Events events;
  WorkerProcess process(events.Program("/nowhere/h3-worker", {}));
  EXPECT_THAT(events.WaitForLosses(1)[0].how, HasSubstr("cannot be started"));
  EXPECT_THAT(events.WaitForLosses(1)[0].how, Not(HasSubstr("/nowhere")));
}

TEST(WorkerProcessTest, TheChildInheritsNoFilesOfOurs) {
  const int ours = fcntl(STDERR_FILENO, F_DUPFD, 200);  // Without close-on-exec, as a library might open it.
  ASSERT_GE(ours, 200);
  Events events;
  WorkerProcess process(events.Shell("echo ready : $(ls /proc/self/fd) :; exec cat"));
  EXPECT_THAT(events.WaitForReady(1).front(), Not(HasSubstr(std::to_string(ours))));
  close(ours);
}

TEST(WorkerProcessTest, StopsTheChildAtOnceThoughOurOwnSignalsAreBlocked) {
  sigset_t term, before;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &term, &before);
  Events events;
  auto process = std::make_unique<WorkerProcess>(events.Shell("echo ready now; exec cat"));
  events.WaitForReady(1);
  const absl::Time start = absl::Now();
  process.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_TRUE(events.losses().empty()) << "an end that was asked for is no loss";
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace h3
