// Which request runs next, and where. Pure decisions: no I/O, no threads of its own, time from the caller.
//
// A request waits in its priority class, first come first served, until a worker that serves it is free and has the memory for it;
// one request at a time runs on a worker. The queue is bounded and refuses.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/bytes.h"

namespace h3 {

enum class PriorityClass { kHigh, kNormal, kLow };
inline constexpr int kPriorityClasses = 3;

using RequestId = uint64_t;
using WorkerId = std::string;

struct NeededAdapter {
  std::string name;
  std::string digest;
  ByteCount bytes;
};

struct PendingRequest {
  RequestId id = 0;
  PriorityClass priority = PriorityClass::kNormal;
  std::string fingerprint;  // Of the base that must serve it.
  double work = 0;          // Rows x evaluations: what its time is proportional to.
  absl::Time enqueued = absl::UnixEpoch();  // When it came.
  ByteCount bytes;          // What it takes of a device at most, beside its adapters.
  std::vector<NeededAdapter> adapters;
};

// What a worker said of its memory last.
struct WorkerMemory {
  bool shared = false;  // Sessions hold a part of it: a request may have to wait for that.
  ByteCount headroom;   // What a request may take, adapters that are not pinned included.
  std::set<std::string> pinned;  // Digests of adapters that are in use there.
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
  std::vector<Assignment> Dispatch(absl::Time now) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes a waiting request out; false when it does not wait (any more).
  bool Remove(RequestId id) ABSL_LOCKS_EXCLUDED(mu_);
  // A running request has lost its worker: it waits again, before all of its class that came after it. It had its
  // place already, so it is never refused.
  void Requeue(RequestId id) ABSL_LOCKS_EXCLUDED(mu_);
  // A running request has ended. `seconds`: how long it ran where it completed; teaches the prediction.
  void Finished(RequestId id, std::optional<double> seconds) ABSL_LOCKS_EXCLUDED(mu_);

  // Serves that base from now on; again whenever its memory is another.
  void WorkerReady(const WorkerId& worker, const std::string& fingerprint, WorkerMemory memory = {}) ABSL_LOCKS_EXCLUDED(mu_);
  // What ran there must be ended by the caller (Finished or Requeue).
  void WorkerGone(const WorkerId& worker) ABSL_LOCKS_EXCLUDED(mu_);

  struct Place {
    RequestId id = 0;
    uint32_t position = 0;   // Requests before it, 0: next.
    double eta_seconds = 0;  // Until its result; 0 while nothing is known.
    bool held = false;       // Its client has not been told that it is accepted.
  };
  // Every waiting request that was released.
  std::vector<Place> Places() const ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<Place> PlaceOf(RequestId id) const ABSL_LOCKS_EXCLUDED(mu_);

  // The first `count` requests that wait, as they will be started: what they need may be prepared.
  std::vector<PendingRequest> Next(size_t count) const ABSL_LOCKS_EXCLUDED(mu_);
  // False where every worker of its base lacks the memory now.
  bool FitsNow(const PendingRequest& request) const ABSL_LOCKS_EXCLUDED(mu_);

  // One moment of the queue.
  struct Figures {
    std::array<size_t, kPriorityClasses> queued{};
    double work_seconds = 0;           // Predicted: of what waits, and what is left of what runs; 0 while nothing is known.
    std::optional<absl::Time> oldest;  // When that came which has waited longest.
  };
  Figures FiguresAt(absl::Time now) const ABSL_LOCKS_EXCLUDED(mu_);

  size_t queued(PriorityClass priority) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t queued() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t running() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t capacity() const { return capacity_; }

 private:
  struct Waiting {
    PendingRequest request;
    bool held = true;  // Until Release.
  };
  struct Running {
    PendingRequest request;
    absl::Time started;
  };
  struct Worker {
    std::string fingerprint;
    WorkerMemory memory;
    std::optional<RequestId> running;
  };

  void FreeLocked(RequestId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static bool Fits(const Worker& worker, const PendingRequest& request);
  std::vector<Place> PlacesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  size_t QueuedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t capacity_;
  mutable absl::Mutex mu_;
  std::deque<Waiting> queues_[kPriorityClasses] ABSL_GUARDED_BY(mu_);
  std::map<WorkerId, Worker> workers_ ABSL_GUARDED_BY(mu_);
  std::map<RequestId, Running> running_ ABSL_GUARDED_BY(mu_);
  double seconds_per_work_ ABSL_GUARDED_BY(mu_) = 0;  // Moving average over completed requests.
};

}  // namespace h3
