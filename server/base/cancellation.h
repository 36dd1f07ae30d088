// A flag that any thread may raise and the device thread reads between blocks.
#pragma once

#include <atomic>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace h3 {

// Copies share one flag. Thread-safe. A default-constructed token is never cancelled until Cancel is called on a copy of it.
class CancellationToken {
 public:
  CancellationToken() : state_(std::make_shared<State>()) {}

  // The first status wins; it must not be OK.
  void Cancel(absl::Status why);
  bool IsCancelled() const { return state_->raised.load(std::memory_order_acquire); }
  // OK, or why it was cancelled, with `where` appended to the message: "cancelled by the client (before block 7)".
  absl::Status Check(absl::string_view where) const;

 private:
  struct State {
    std::atomic<bool> raised{false};
    absl::Mutex mu;
    absl::Status why ABSL_GUARDED_BY(mu);
  };
  std::shared_ptr<State> state_;
};

}  // namespace h3
