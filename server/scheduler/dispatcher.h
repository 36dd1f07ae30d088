// Which request runs next, and where. Pure decisions: no I/O, no threads of its own, time from the caller.
//
// A request waits in its priority class, first come first served, until a worker that serves it is free; one request at a time
// runs on a worker. The queue is bounded and refuses.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace h3 {

enum class PriorityClass { kHigh, kNormal, kLow };
inline constexpr int kPriorityClasses = 3;

using RequestId = uint64_t;
using WorkerId = std::string;

struct PendingRequest {
  RequestId id = 0;
  PriorityClass priority = PriorityClass::kNormal;
  std::string fingerprint;  // Of the base that must serve it.
  double work = 0;          // Rows x evaluations: what its time is proportional to.
};

struct Assignment {
  RequestId request = 0;
  WorkerId worker;
};

// Thread-safe. Each call that may free a place returns what is to be started now; the caller starts it outside of every lock.
class Dispatcher {
 public:
  explicit Dispatcher(size_t capacity) : capacity_(capacity) {}

  // RESOURCE_EXHAUSTED / QUEUE_FULL with retry_seconds. Otherwise the request has its place, but does not start before Release:
  // the caller first tells its client.
  absl::Status Submit(PendingRequest request) ABSL_LOCKS_EXCLUDED(mu_);
  void Release(RequestId id) ABSL_LOCKS_EXCLUDED(mu_);
  // What can start now. Call after Release, WorkerReady and Finished.
  std::vector<Assignment> Dispatch() ABSL_LOCKS_EXCLUDED(mu_);
  // Takes a waiting request out; false when it does not wait (any more).
  bool Remove(RequestId id) ABSL_LOCKS_EXCLUDED(mu_);
  // A running request has ended. `seconds`: how long it ran where it completed; teaches the prediction.
  void Finished(RequestId id, std::optional<double> seconds) ABSL_LOCKS_EXCLUDED(mu_);

  void WorkerReady(const WorkerId& worker, const std::string& fingerprint) ABSL_LOCKS_EXCLUDED(mu_);
  // What ran there must be ended by the caller (Finished).
  void WorkerGone(const WorkerId& worker) ABSL_LOCKS_EXCLUDED(mu_);

  struct Place {
    RequestId id = 0;
    uint32_t position = 0;   // Requests before it, 0: next.
    double eta_seconds = 0;  // Until its result; 0 while nothing is known.
  };
  // Every waiting request.
  std::vector<Place> Places() const ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<Place> PlaceOf(RequestId id) const ABSL_LOCKS_EXCLUDED(mu_);

  size_t queued(PriorityClass priority) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t queued() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t running() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t capacity() const { return capacity_; }

 private:
  struct Waiting {
    PendingRequest request;
    bool held = true;  // Until Release.
  };
  struct Worker {
    std::string fingerprint;
    std::optional<RequestId> running;
  };

  std::vector<Place> PlacesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  size_t QueuedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t capacity_;
  mutable absl::Mutex mu_;
  std::deque<Waiting> queues_[kPriorityClasses] ABSL_GUARDED_BY(mu_);
  std::map<WorkerId, Worker> workers_ ABSL_GUARDED_BY(mu_);
  std::map<RequestId, PendingRequest> running_ ABSL_GUARDED_BY(mu_);
  double seconds_per_work_ ABSL_GUARDED_BY(mu_) = 0;  // Moving average over completed requests.
};

}  // namespace h3
