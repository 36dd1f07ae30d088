#include "server/scheduler/dispatcher.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"

namespace h3 {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr char kBase[] = "base";

// Submits and releases.
void Enqueue(Dispatcher& dispatcher, RequestId id, PriorityClass priority = PriorityClass::kNormal, double work = 1,
             const std::string& fingerprint = kBase) {
  ASSERT_TRUE(dispatcher.Submit({id, priority, fingerprint, work}).ok());
  dispatcher.Release(id);
}

std::vector<std::pair<RequestId, WorkerId>> Started(Dispatcher& dispatcher) {
  std::vector<std::pair<RequestId, WorkerId>> started;
  for (const Assignment& assignment : dispatcher.Dispatch(absl::UnixEpoch())) started.emplace_back(assignment.request, assignment.worker);
  return started;
}

TEST(DispatcherTest, ARequestWaitsForAWorker) {
  Dispatcher dispatcher(8);
  Enqueue(dispatcher, 1);
  EXPECT_THAT(Started(dispatcher), IsEmpty());
  dispatcher.WorkerReady("w", kBase);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "w")));
  EXPECT_EQ(dispatcher.queued(), 0u);
  EXPECT_EQ(dispatcher.running(), 1u);
}

TEST(DispatcherTest, OneRequestAtATimeRunsOnAWorker) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1);
  Enqueue(dispatcher, 2);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "w")));
  EXPECT_THAT(Started(dispatcher), IsEmpty());
  dispatcher.Finished(1, 2.0);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(2, "w")));
}

TEST(DispatcherTest, AReadyWorkerThatSaysSoAgainKeepsItsRequest) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1);
  Enqueue(dispatcher, 2);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "w")));
  dispatcher.WorkerReady("w", kBase);
  EXPECT_THAT(Started(dispatcher), IsEmpty());
}

TEST(DispatcherTest, ARequestDoesNotStartBeforeItsRelease) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  ASSERT_TRUE(dispatcher.Submit({1, PriorityClass::kNormal, kBase, 1}).ok());
  Enqueue(dispatcher, 2);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(2, "w")));  // The held one delays nobody.
  dispatcher.Finished(2, std::nullopt);
  EXPECT_THAT(Started(dispatcher), IsEmpty());
  dispatcher.Release(1);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "w")));
}

TEST(DispatcherTest, ARequestThatLostItsWorkerKeepsItsPlaceEvenInAFullQueue) {
  Dispatcher dispatcher(2);
  dispatcher.WorkerReady("a", kBase);
  dispatcher.WorkerReady("b", kBase);
  Enqueue(dispatcher, 1);
  Enqueue(dispatcher, 2);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "a"), Pair(2, "b")));
  Enqueue(dispatcher, 3);
  Enqueue(dispatcher, 4, PriorityClass::kHigh);
  dispatcher.WorkerGone("a");
  dispatcher.WorkerGone("b");
  dispatcher.Requeue(2);
  dispatcher.Requeue(1);
  dispatcher.Requeue(9);  // Not one of ours.
  EXPECT_EQ(dispatcher.queued(), 4u);
  EXPECT_EQ(dispatcher.running(), 0u);
  EXPECT_FALSE(dispatcher.Submit({5, PriorityClass::kNormal, kBase, 1}).ok());
  std::vector<RequestId> places;
  for (const Dispatcher::Place& place : dispatcher.Places()) places.push_back(place.id);
  EXPECT_THAT(places, ElementsAre(4, 1, 2, 3));
  EXPECT_TRUE(dispatcher.Remove(1));
  dispatcher.WorkerReady("a", kBase);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(4, "a")));
  dispatcher.Finished(4, std::nullopt);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(2, "a")));
}

TEST(DispatcherTest, ARequestThatIsTakenBackFreesItsWorker) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "w")));
  dispatcher.Requeue(1);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "w")));
}

TEST(DispatcherTest, APlaceIsToldOnlyOnceTheRequestIsReleasedButItCountsFromTheStart) {
  Dispatcher dispatcher(8);
  ASSERT_TRUE(dispatcher.Submit({1, PriorityClass::kNormal, kBase, 1}).ok());
  Enqueue(dispatcher, 2);
  ASSERT_EQ(dispatcher.Places().size(), 1u);
  EXPECT_EQ(dispatcher.Places()[0].id, 2u);
  EXPECT_EQ(dispatcher.Places()[0].position, 1u);
  EXPECT_EQ(dispatcher.PlaceOf(1)->position, 0u);
  dispatcher.Release(1);
  EXPECT_EQ(dispatcher.Places().size(), 2u);
}

TEST(DispatcherTest, HigherClassesGoFirstAndEachInItsOrder) {
  Dispatcher dispatcher(8);
  Enqueue(dispatcher, 1, PriorityClass::kLow);
  Enqueue(dispatcher, 2, PriorityClass::kNormal);
  Enqueue(dispatcher, 3, PriorityClass::kNormal);
  Enqueue(dispatcher, 4, PriorityClass::kHigh);
  std::vector<RequestId> places;
  for (const Dispatcher::Place& place : dispatcher.Places()) {
    EXPECT_EQ(place.position, places.size());
    places.push_back(place.id);
  }
  EXPECT_THAT(places, ElementsAre(4, 2, 3, 1));
  EXPECT_EQ(dispatcher.queued(PriorityClass::kNormal), 2u);
  dispatcher.WorkerReady("w", kBase);
  std::vector<RequestId> order;
  for (int i = 0; i < 4; ++i) {
    for (const auto& [id, worker] : Started(dispatcher)) {
      order.push_back(id);
      dispatcher.Finished(id, std::nullopt);
    }
  }
  EXPECT_THAT(order, ElementsAre(4, 2, 3, 1));
}

TEST(DispatcherTest, ARequestGoesToAWorkerOfItsBaseOnly) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("a", "base-a");
  dispatcher.WorkerReady("b", "base-b");
  Enqueue(dispatcher, 1, PriorityClass::kNormal, 1, "base-b");
  Enqueue(dispatcher, 2, PriorityClass::kNormal, 1, "base-b");
  Enqueue(dispatcher, 3, PriorityClass::kNormal, 1, "base-a");
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(1, "b"), Pair(3, "a")));  // 2 does not stand in the way of 3.
  EXPECT_EQ(dispatcher.queued(), 1u);
}

TEST(DispatcherTest, AFullQueueRefusesAndSaysWhenToComeBack) {
  Dispatcher dispatcher(2);
  Enqueue(dispatcher, 1);
  Enqueue(dispatcher, 2, PriorityClass::kHigh);
  const absl::Status refused = dispatcher.Submit({3, PriorityClass::kHigh, kBase, 1});
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), reason::kQueueFull);
  int seconds = 0;
  EXPECT_TRUE(absl::SimpleAtoi(DetailsOf(refused).at("retry_seconds"), &seconds));
  EXPECT_GE(seconds, 1);
  EXPECT_EQ(DetailsOf(refused).at("capacity"), "2");
  EXPECT_TRUE(dispatcher.Remove(1));
  EXPECT_TRUE(dispatcher.Submit({3, PriorityClass::kHigh, kBase, 1}).ok());
}

TEST(DispatcherTest, OnlyWaitingRequestsAreRemoved) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1);
  Enqueue(dispatcher, 2);
  Started(dispatcher);
  EXPECT_FALSE(dispatcher.Remove(1));
  EXPECT_TRUE(dispatcher.Remove(2));
  EXPECT_FALSE(dispatcher.Remove(2));
  EXPECT_EQ(dispatcher.PlaceOf(2), std::nullopt);
  dispatcher.Finished(1, std::nullopt);
  EXPECT_THAT(Started(dispatcher), IsEmpty());
}

TEST(DispatcherTest, AWorkerThatIsGoneGetsNothing) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1);
  Started(dispatcher);
  dispatcher.WorkerGone("w");
  Enqueue(dispatcher, 2);
  EXPECT_THAT(Started(dispatcher), IsEmpty());
  dispatcher.Finished(1, std::nullopt);
  EXPECT_EQ(dispatcher.running(), 0u);
  EXPECT_THAT(Started(dispatcher), IsEmpty());
  dispatcher.WorkerReady("w", kBase);
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(2, "w")));
}

TEST(DispatcherTest, ARestartedWorkerMayServeAnotherBase) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  dispatcher.WorkerGone("w");
  dispatcher.WorkerReady("w", "other");
  Enqueue(dispatcher, 1);
  Enqueue(dispatcher, 2, PriorityClass::kLow, 1, "other");
  EXPECT_THAT(Started(dispatcher), ElementsAre(Pair(2, "w")));
}

TEST(DispatcherTest, TimesArePredictedFromWhatHasRun) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1, PriorityClass::kNormal, 10);
  Started(dispatcher);
  Enqueue(dispatcher, 2, PriorityClass::kNormal, 20);
  EXPECT_EQ(dispatcher.PlaceOf(2)->eta_seconds, 0);  // Nothing is known yet.
  dispatcher.Finished(1, 5.0);                       // Half a second for each unit of work.
  EXPECT_DOUBLE_EQ(dispatcher.PlaceOf(2)->eta_seconds, 10);
  Enqueue(dispatcher, 3, PriorityClass::kNormal, 4);
  EXPECT_DOUBLE_EQ(dispatcher.PlaceOf(3)->eta_seconds, 12);
  dispatcher.WorkerReady("second", kBase);
  EXPECT_DOUBLE_EQ(dispatcher.PlaceOf(3)->eta_seconds, 6);
}

TEST(DispatcherTest, WhatDidNotCompleteTeachesNothing) {
  Dispatcher dispatcher(8);
  dispatcher.WorkerReady("w", kBase);
  Enqueue(dispatcher, 1, PriorityClass::kNormal, 10);
  Started(dispatcher);
  dispatcher.Finished(1, std::nullopt);
  dispatcher.Finished(1, 100.0);  // Twice, and unknown by now.
  Enqueue(dispatcher, 2);
  EXPECT_EQ(dispatcher.PlaceOf(2)->eta_seconds, 0);
}

TEST(DispatcherTest, FiguresTellTheWorkThatWaitsAndWhatIsLeftOfWhatRuns) {
  const absl::Time start = absl::FromUnixSeconds(1000);
  Dispatcher dispatcher(8);
  EXPECT_EQ(dispatcher.FiguresAt(start).oldest, std::nullopt);
  dispatcher.WorkerReady("w", kBase);
  const auto enqueue = [&](RequestId id, PriorityClass priority, double work, absl::Time when) {
    ASSERT_TRUE(dispatcher.Submit({id, priority, kBase, work, when}).ok());
    dispatcher.Release(id);
  };
  enqueue(1, PriorityClass::kNormal, 10, start);
  ASSERT_EQ(dispatcher.Dispatch(start).size(), 1u);
  enqueue(2, PriorityClass::kLow, 30, start + absl::Seconds(3));
  enqueue(3, PriorityClass::kHigh, 20, start + absl::Seconds(4));
  EXPECT_EQ(dispatcher.FiguresAt(start).work_seconds, 0) << "nothing is known before the first has completed";
  dispatcher.Finished(1, 5.0);  // 0.5 seconds for each unit of work.
  ASSERT_EQ(dispatcher.Dispatch(start + absl::Seconds(5)).size(), 1u);

  Dispatcher::Figures figures = dispatcher.FiguresAt(start + absl::Seconds(5));
  EXPECT_THAT(figures.queued, ElementsAre(0, 0, 1));
  EXPECT_DOUBLE_EQ(figures.work_seconds, 15 + 10);
  EXPECT_EQ(figures.oldest, start + absl::Seconds(3));
  EXPECT_DOUBLE_EQ(dispatcher.FiguresAt(start + absl::Seconds(9)).work_seconds, 15 + 6);
  EXPECT_DOUBLE_EQ(dispatcher.FiguresAt(start + absl::Seconds(60)).work_seconds, 15) << "late, not negative";
  ASSERT_TRUE(dispatcher.Remove(2));
  figures = dispatcher.FiguresAt(start + absl::Seconds(60));
  EXPECT_EQ(figures.work_seconds, 0);
  EXPECT_EQ(figures.oldest, std::nullopt);
}

TEST(DispatcherTest, EveryRequestOfManyThreadsStartsOnce) {
  constexpr int kThreads = 4, kEach = 100;
  Dispatcher dispatcher(kThreads * kEach);
  for (int i = 0; i < 3; ++i) dispatcher.WorkerReady(absl::StrCat("w", i), kBase);
  std::atomic<int> started{0};
  const auto run_all = [&] {
    for (const Assignment& assignment : dispatcher.Dispatch(absl::UnixEpoch())) {
      ++started;
      dispatcher.Finished(assignment.request, 1.0);
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        Enqueue(dispatcher, static_cast<RequestId>(t * kEach + i));
        run_all();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (dispatcher.queued() > 0) run_all();
  EXPECT_EQ(started, kThreads * kEach);
  EXPECT_EQ(dispatcher.running(), 0u);
}

}  // namespace
}  // namespace h3
