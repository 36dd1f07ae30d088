#include "server/base/serial_executor.h"

#include <utility>

namespace h3 {

SerialExecutor::SerialExecutor(size_t capacity) : capacity_(capacity), thread_([this] { Run(); }) {}

SerialExecutor::~SerialExecutor() {
  {
    absl::MutexLock lock(&mu_);
    ending_ = true;
  }
  thread_.join();
}

bool SerialExecutor::Post(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  if (ending_ || tasks_.size() >= capacity_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void SerialExecutor::Continue(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  tasks_.push_back(std::move(task));
}

void SerialExecutor::Run() {
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &SerialExecutor::HasWork));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace h3
