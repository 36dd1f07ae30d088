#include "server/worker/device_thread.h"

#include <utility>

namespace h3 {

DeviceThread::DeviceThread(size_t capacity) : capacity_(capacity), thread_([this] { Run(); }) {}

DeviceThread::~DeviceThread() {
  {
    absl::MutexLock lock(&mu_);
    ending_ = true;
  }
  thread_.join();
}

bool DeviceThread::Post(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  if (ending_ || tasks_.size() >= capacity_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void DeviceThread::Continue(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  tasks_.push_back(std::move(task));
}

void DeviceThread::Run() {
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &DeviceThread::HasWork));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace h3
