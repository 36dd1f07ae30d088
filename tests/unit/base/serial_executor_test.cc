#include "server/base/serial_executor.h"

#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace h3 {
namespace {

using ::testing::ElementsAre;

// Holds an executor's thread until released.
class Gate {
 public:
  explicit Gate(SerialExecutor& executor) {
    absl::Notification entered;
    EXPECT_TRUE(executor.Post([&entered, open = open_] {
      entered.Notify();
      open->WaitForNotification();
    }));
    entered.WaitForNotification();
  }
  ~Gate() { Open(); }
  void Open() {
    if (!open_->HasBeenNotified()) open_->Notify();
  }

 private:
  // Shared: the thread may still leave its wait when the gate is gone.
  const std::shared_ptr<absl::Notification> open_ = std::make_shared<absl::Notification>();
};

TEST(SerialExecutorTest, RunsTasksInTheirOrderOnItsOneThread) {
  std::vector<int> order;
  {
    SerialExecutor executor(100);
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(executor.Post([&, i] {
        EXPECT_TRUE(executor.OnThisThread());
        order.push_back(i);
      }));
    }
    EXPECT_FALSE(executor.OnThisThread());
  }
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
}

TEST(SerialExecutorTest, RefusesAboveItsCapacityAndTakesAgainAfterwards) {
  SerialExecutor executor(2);
  int ran = 0;
  {
    Gate gate(executor);
    EXPECT_TRUE(executor.Post([&] { ++ran; }));
    EXPECT_TRUE(executor.Post([&] { ++ran; }));
    EXPECT_FALSE(executor.Post([&] { ++ran; }));
    absl::Notification done;
    executor.Continue([&] { done.Notify(); });
    gate.Open();
    done.WaitForNotification();
  }
  EXPECT_EQ(ran, 2);
  EXPECT_TRUE(executor.Post([] {}));
}

TEST(SerialExecutorTest, AContinuationIsTakenBeyondTheCapacityAndTakesItsTurn) {
  std::vector<int> order;
  {
    SerialExecutor executor(1);
    Gate gate(executor);
    EXPECT_TRUE(executor.Post([&] { order.push_back(1); }));
    executor.Continue([&] { order.push_back(2); });
    EXPECT_FALSE(executor.Post([&] { order.push_back(3); }));
    gate.Open();
  }
  EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST(SerialExecutorTest, EndingRunsWhatATaskContinues) {
  int steps = 0;
  {
    SerialExecutor executor(1);
    EXPECT_TRUE(executor.Post([&] {
      ++steps;
      executor.Continue([&] { ++steps; });
    }));
  }
  EXPECT_EQ(steps, 2);
}

TEST(SerialExecutorTest, ManyThreadsMayPost) {
  int ran = 0;  // Only its thread counts.
  {
    SerialExecutor executor(1000);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 100; ++i) EXPECT_TRUE(executor.Post([&] { ++ran; }));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(ran, 400);
}

TEST(SerialExecutorTest, ATaskIsDestroyedOnceItRan) {
  const auto resource = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = resource;
  {
    SerialExecutor executor(1);
    EXPECT_TRUE(executor.Post([held = resource] {}));
  }
  EXPECT_EQ(watch.use_count(), 1);
}

}  // namespace
}  // namespace h3
