#include "client/canceller.h"

#include <grpcpp/client_context.h>

namespace h3::client {

void Canceller::Cancel() {
  absl::MutexLock lock(&mu_);
  cancelled_ = true;
  for (grpc::ClientContext* const call : calls_) call->TryCancel();
}

bool Canceller::cancelled() const {
  absl::MutexLock lock(&mu_);
  return cancelled_;
}

void Canceller::Attach(grpc::ClientContext* call) {
  absl::MutexLock lock(&mu_);
  calls_.insert(call);
  if (cancelled_) call->TryCancel();
}

void Canceller::Detach(grpc::ClientContext* call) {
  absl::MutexLock lock(&mu_);
  calls_.erase(call);
}

}  // namespace h3::client
