// Stops calls from another thread.
#pragma once

#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace grpc {
class ClientContext;
}

namespace h3::client {

// One canceller may serve many calls, one after the other or at once; calls that begin after Cancel end at once too.
// Thread-safe. Must outlive the calls that it was given to. Not for signal handlers: wait for the signal on a thread.
class Canceller {
 public:
  Canceller() = default;
  Canceller(const Canceller&) = delete;
  Canceller& operator=(const Canceller&) = delete;

  // The calls end with CANCELLED, the server stops the device within one model evaluation. Never blocks for long.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  bool cancelled() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class Call;
  void Attach(grpc::ClientContext* call) ABSL_LOCKS_EXCLUDED(mu_);
  void Detach(grpc::ClientContext* call) ABSL_LOCKS_EXCLUDED(mu_);

  mutable absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::set<grpc::ClientContext*> calls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3::client
