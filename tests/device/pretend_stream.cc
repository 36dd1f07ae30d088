#include "tests/device/pretend_stream.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "server/base/check.h"

namespace h3::testing {
namespace {

thread_local c10::StreamId current_stream = 0;

// The device's thread and its queues.
class Runner {
 public:
  Runner() { std::thread([this] { Run(); }).detach(); }

  c10::StreamId Add() {
    const std::lock_guard lock(mu_);
    streams_.emplace_back();
    return static_cast<c10::StreamId>(streams_.size()) - 1;
  }

  void Queue(c10::StreamId id, std::function<void()> work, StreamMark after) {
    const std::lock_guard lock(mu_);
    Stream& stream = streams_.at(static_cast<size_t>(id));
    stream.queue.push_back({std::move(work), after});
    ++stream.queued;
    counters_.longest_queue = std::max(counters_.longest_queue, ++counters_.queued);
  }

  StreamMark Mark(c10::StreamId id) {
    const std::lock_guard lock(mu_);
    return {id, streams_.at(static_cast<size_t>(id)).queued};
  }

  bool Done(StreamMark mark) {
    const std::lock_guard lock(mu_);
    return DoneLocked(mark);
  }

  void Wait(StreamMark mark) {
    std::unique_lock lock(mu_);
    if (!DoneLocked(mark)) {
      wanted_.push_back(mark);
      changed_.notify_all();
      changed_.wait(lock, [&] { return DoneLocked(mark); });
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

  std::vector<StreamMark> Marks() {
    const std::lock_guard lock(mu_);
    std::vector<StreamMark> marks;
    for (size_t i = 0; i < streams_.size(); ++i) marks.push_back({static_cast<c10::StreamId>(i), streams_[i].queued});
    return marks;
  }

  void Count(const std::function<void(PretendCounters&)>& add) {
    const std::lock_guard lock(mu_);
    add(counters_);
  }

 private:
  struct Item {
    std::function<void()> work;  // Null: only waits for `after`.
    StreamMark after;
  };
  struct Stream {
    std::deque<Item> queue;
    int64_t queued = 0;  // Ever.
    int64_t done = 0;
  };

  bool DoneLocked(StreamMark mark) { return streams_.at(static_cast<size_t>(mark.stream)).done >= mark.ticket; }

  void Run() {
    std::unique_lock lock(mu_);
    for (;;) {
      changed_.wait(lock, [&] { return !wanted_.empty(); });
      const StreamMark mark = wanted_.front();
      wanted_.pop_front();
      RunUntil(mark, lock);
      changed_.notify_all();
    }
  }

  void RunUntil(StreamMark mark, std::unique_lock<std::mutex>& lock) {
    while (!DoneLocked(mark)) {
      Stream& stream = streams_.at(static_cast<size_t>(mark.stream));
      Item item = std::move(stream.queue.front());
      stream.queue.pop_front();
      RunUntil(item.after, lock);
      if (item.work != nullptr && failure_ == nullptr) {
        lock.unlock();
        std::exception_ptr failure;
        try {
          item.work();
        } catch (...) {
          failure = std::current_exception();
        }
        item.work = nullptr;
        lock.lock();
        if (failure_ == nullptr) failure_ = failure;
      }
      ++streams_.at(static_cast<size_t>(mark.stream)).done;
      --counters_.queued;
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Stream> streams_ = std::deque<Stream>(1);  // The first is the default stream.
  std::deque<StreamMark> wanted_;
  std::exception_ptr failure_;
  PretendCounters counters_;
};

Runner& TheRunner() {
  static Runner* const runner = new Runner();
  return *runner;
}

}  // namespace

c10::StreamId NewStream() { return TheRunner().Add(); }
c10::StreamId CurrentStream() { return current_stream; }
c10::StreamId ExchangeStream(c10::StreamId stream) { return std::exchange(current_stream, stream); }
void Launch(std::function<void()> work) { TheRunner().Queue(current_stream, std::move(work), {}); }
StreamMark MarkOf(c10::StreamId stream) { return TheRunner().Mark(stream); }
bool IsDone(StreamMark mark) { return TheRunner().Done(mark); }
void StreamWaits(c10::StreamId stream, StreamMark mark) { TheRunner().Queue(stream, nullptr, mark); }

void Wait(StreamMark mark) {
  Count([](PretendCounters& c) { ++c.waits; });
  TheRunner().Wait(mark);
}

void WaitForAll(bool counted) {
  if (counted) Count([](PretendCounters& c) { ++c.waits; });
  for (const StreamMark& mark : TheRunner().Marks()) TheRunner().Wait(mark);
}

void Count(const std::function<void(PretendCounters&)>& add) { TheRunner().Count(add); }

PretendCounters GetPretendCounters() {
  PretendCounters counters;
  Count([&](PretendCounters& c) { counters = c; });
  return counters;
}

void ResetPretendCounters() {
  Count([](PretendCounters& c) {
    const int64_t queued = c.queued;
    c = {};
    c.queued = c.longest_queue = queued;
  });
}

}  // namespace h3::testing
