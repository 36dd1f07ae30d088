// One thread that runs tasks one after the other: the thread that owns a device, or the one that reads files. Its queue refuses
// instead of growing.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace h3 {

class SerialExecutor {
 public:
  // `capacity`: tasks that may wait.
  explicit SerialExecutor(size_t capacity);
  // Runs what is queued, then joins.
  ~SerialExecutor();
  SerialExecutor(const SerialExecutor&) = delete;
  SerialExecutor& operator=(const SerialExecutor&) = delete;

  // Thread-safe; never blocks. False when the queue is full or the thread is ending.
  bool Post(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_);
  // The same for the continuation of work that was accepted before: always taken, behind what waits, so that runs and sessions take
  // turns. On any thread.
  void Continue(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_);
  bool OnThisThread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ending_ || !tasks_.empty(); }

  const size_t capacity_;
  absl::Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace h3
