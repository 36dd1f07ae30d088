// What the scheduler's services share: workers, queue, registry, metrics. Joins the pure decisions with the wire.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <google/protobuf/repeated_ptr_field.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "h3/v1/types.pb.h"
#include "server/base/serial_executor.h"
#include "server/format/layout.h"
#include "server/format/request.h"
#include "server/metrics/fleet_metrics.h"
#include "server/metrics/scheduler_metrics.h"
#include "server/registry/adapter_registry.h"
#include "server/scheduler/dispatcher.h"
#include "server/scheduler_rpc/worker_link.h"

namespace h3 {

struct SchedulerOptions {
  std::string adapters = ".";
  int64_t max_upload_bytes = int64_t{16} << 30;
  size_t queue_capacity = 64;
  int64_t max_request_bytes = int64_t{1} << 30;
  int64_t max_buffered_bytes = int64_t{8} << 30;
  int max_sessions_per_worker = 8;
  uint32_t retries = 2;  // Times that a request is run again whose worker was lost.
  absl::Duration session_idle = absl::Minutes(5);
  bool refuse_when_full = false;  // What would have to wait for memory that sessions hold is refused instead.
};

// A request that waits for a worker. Called on any thread, without locks held.
class Ticket {
 public:
  virtual ~Ticket() = default;
  virtual void OnPlace(const Dispatcher::Place& place) = 0;
  // False when it cannot start there; then it is over.
  virtual bool OnAssigned(std::shared_ptr<WorkerLink> worker) = 0;
};

// The base that a request goes to.
struct ChosenBase {
  std::string fingerprint;
  BaseFacts facts;
  std::string dtype;  // Of its block stack.
};

using StackEntries = google::protobuf::RepeatedPtrField<v1::StackEntry>;

// A stack as a worker gets it: digests and settings filled in, names as the registry knows the content.
struct PinnedStack {
  StackEntries entries;
  std::vector<ResolvedAdapter> resolved;
};

// Thread-safe; nothing in it blocks.
class SchedulerCore {
 public:
  // `state` and `content`: what is kept over restarts.
  SchedulerCore(SchedulerOptions options, SchedulerMetrics& metrics, std::unique_ptr<StateStore> state, ContentStore content);

  // Workers.
  std::shared_ptr<WorkerLink> AddWorker(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::shared_ptr<WorkerLink>> workers() const ABSL_LOCKS_EXCLUDED(mu_);
  bool AnyReady() const;
  // For the scheduler's /metrics. Never waits for a worker. Memory only of workers whose last heartbeat is younger than two.
  std::vector<WorkerReport> WorkerReports(absl::Time now) const;

  // The base that serves `task`, or the one of that fingerprint or name. UNAVAILABLE / WORKER_LOST: no worker has ever been
  // ready; FAILED_PRECONDITION / BASE_MISMATCH: none of the bases there are, with the list.
  absl::StatusOr<ChosenBase> ChooseBase(Task task, const std::string& model) const;
  // A base that some worker serves, for questions that no task decides. UNAVAILABLE / WORKER_LOST.
  absl::StatusOr<ChosenBase> AnyBase() const;

  // Resolves the stack of a header, or its preset's, on the file thread; `done` runs there. RESOURCE_EXHAUSTED / QUEUE_FULL when too
  // many wait for the disk. `evaluations`: of the run, 0 for a session.
  using OnPinned = std::function<void(absl::StatusOr<PinnedStack>)>;
  void ResolveStack(std::string preset, StackEntries stack, int64_t evaluations, BaseFacts base, OnPinned done);
  // The same, on the file thread.
  absl::StatusOr<PinnedStack> PinStack(StackEntries stack, int64_t evaluations, const BaseFacts& base);

  // Host memory for the tensors of requests that wait or may be run again. RESOURCE_EXHAUSTED / QUEUE_FULL when it would not fit now;
  // what was taken must be given back.
  absl::Status TakeBuffer(int64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void GiveBuffer(int64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  int64_t buffered_bytes() const ABSL_LOCKS_EXCLUDED(mu_);

  // Whether a request of that plan can ever run on a base's workers. FAILED_PRECONDITION / VRAM_EXCEEDED with the numbers of the
  // largest of them.
  absl::Status CheckFits(const std::string& fingerprint, const RequestPlan& plan) const;

  // Queue. `accepted` runs once the request has its place and before its ticket hears anything; then the ticket is told its
  // place by each TellPlaces until it is assigned; Finish gives the worker back. UNAVAILABLE / DRAINING, or RESOURCE_EXHAUSTED /
  // QUEUE_FULL.
  absl::Status Submit(PendingRequest request, std::shared_ptr<Ticket> ticket,
                      const std::function<void(const Dispatcher::Place&)>& accepted) ABSL_LOCKS_EXCLUDED(mu_);
  // Instead of Finish, for a request whose worker was lost: it keeps its place in the order, whether there is room or not.
  void Requeue(RequestId id, WorkerLink& lost, std::shared_ptr<Ticket> ticket) ABSL_LOCKS_EXCLUDED(mu_);
  // True when it waited and will never be assigned.
  bool Withdraw(RequestId id) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish(RequestId id, std::optional<double> seconds) ABSL_LOCKS_EXCLUDED(mu_);
  // Tells every ticket that waits its place, if the queue has moved since the last time. For a clock to call: with every move of the
  // queue, n that wait would cost n messages for each that runs.
  void TellPlaces() ABSL_LOCKS_EXCLUDED(mu_);
  // A submitted request's call is over: its client has everything, or is gone.
  void Leave() { admitted_.fetch_sub(1); }
  RequestId NextId() { return next_id_.fetch_add(1) + 1; }

  // A ready worker of that base with room for one more session, counted until CloseSession. UNAVAILABLE / WORKER_LOST or
  // RESOURCE_EXHAUSTED / QUEUE_FULL.
  absl::StatusOr<std::shared_ptr<WorkerLink>> OpenSession(const std::string& fingerprint) ABSL_LOCKS_EXCLUDED(mu_);
  void CloseSession(const std::shared_ptr<WorkerLink>& worker) ABSL_LOCKS_EXCLUDED(mu_);

  void Drain() { draining_.store(true); }
  bool draining() const { return draining_.load(); }
  // UNAVAILABLE / DRAINING.
  absl::Status CheckServing() const;
  // Adapters that there are, as of the last half minute; begins to count them again where that is over. Never waits for the disk.
  int64_t adapters_registered() ABSL_LOCKS_EXCLUDED(mu_);
  // Requests that wait, run, or whose results are being sent; and sessions.
  size_t Active() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t admitted() const { return admitted_.load(); }
  size_t sessions() const ABSL_LOCKS_EXCLUDED(mu_);

  // Counts what a worker said about an accepted request that it did not start.
  void CountWorkerRefusal(const absl::Status& status);

  const SchedulerOptions& options() const { return options_; }
  SchedulerMetrics& metrics() { return metrics_; }
  AdapterRegistry& registry() { return registry_; }  // On the file thread.
  Dispatcher& dispatcher() { return dispatcher_; }
  // For file work of the services. False when too much waits.
  bool PostFileWork(std::function<void()> work) { return files_.Post(std::move(work)); }
  static absl::Status FileQueueFull();
  // The next piece of file work that was begun.
  void ContinueFileWork(std::function<void()> work) { files_.Continue(std::move(work)); }

 private:
  void OnWorkerChange(WorkerLink& worker) ABSL_LOCKS_EXCLUDED(mu_);
  // Has the workers read ahead what the requests that wait will need.
  void Prefetch() ABSL_LOCKS_EXCLUDED(mu_);
  void CountRegistered();
  // The queue has moved: starts what can start.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);
  // Calls tickets, one thread at a time and no lock held (gRPC may run reactions on this very thread): those that start, and, where
  // TellPlaces has asked for it, those that wait.
  void CallTickets() ABSL_LOCKS_EXCLUDED(mu_);
  void Assign() ABSL_LOCKS_EXCLUDED(mu_);

  const SchedulerOptions options_;
  SchedulerMetrics& metrics_;
  const std::unique_ptr<StateStore> state_;
  ContentStore content_;
  AdapterRegistry registry_;
  Dispatcher dispatcher_;
  std::atomic<RequestId> next_id_{0};
  std::atomic<size_t> admitted_{0};  // Requests from Submit to Leave.
  std::atomic<bool> draining_{false};
  mutable absl::Mutex mu_;
  bool calling_tickets_ ABSL_GUARDED_BY(mu_) = false;
  bool assign_ ABSL_GUARDED_BY(mu_) = false;
  bool tell_places_ ABSL_GUARDED_BY(mu_) = false;
  bool places_moved_ ABSL_GUARDED_BY(mu_) = false;  // Since places were told.
  std::map<WorkerId, std::shared_ptr<WorkerLink>> workers_ ABSL_GUARDED_BY(mu_);
  std::map<RequestId, std::shared_ptr<Ticket>> tickets_ ABSL_GUARDED_BY(mu_);
  std::map<WorkerId, int> sessions_ ABSL_GUARDED_BY(mu_);
  RequestId prefetched_ ABSL_GUARDED_BY(mu_) = 0;  // Requests up to this one were read ahead for.
  int64_t buffered_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time counted_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::atomic<int64_t> registered_{0};
  SerialExecutor files_;  // Last: its tasks use the rest.
};

}  // namespace h3
