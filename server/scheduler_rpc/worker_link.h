// A scheduler's line to one worker: the channel, the heartbeat, what the worker said of itself last.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_callback.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "h3/v1/worker.grpc.pb.h"

namespace h3 {

// Thread-safe. Held by shared pointers: its calls keep it alive.
class WorkerLink : public std::enable_shared_from_this<WorkerLink> {
 public:
  // `on_change`: its state or its model is another now, or the memory that its sessions leave may be; on any thread, without locks held.
  WorkerLink(std::string name, std::function<void(WorkerLink&)> on_change)
      : name_(std::move(name)), on_change_(std::move(on_change)) {}

  // Connects and watches, again and again, until Disconnect or another Connect. Does not block.
  void Connect(const std::string& address) ABSL_LOCKS_EXCLUDED(mu_);
  // Known to be gone: no more attempts.
  void Disconnect(const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);

  // A call to it was lost or refused as a whole: it is not ready until it answers again.
  void Suspect(const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string& name() const { return name_; }
  v1::WorkerState state() const ABSL_LOCKS_EXCLUDED(mu_);
  // The last heartbeat, also of a worker that is lost now; null before the first.
  std::shared_ptr<const v1::WorkerSnapshot> snapshot() const ABSL_LOCKS_EXCLUDED(mu_);
  // When that came; the distant past before the first.
  absl::Time heard() const ABSL_LOCKS_EXCLUDED(mu_);
  v1::WorkerStatus Status() const ABSL_LOCKS_EXCLUDED(mu_);
  void CountRestart() ABSL_LOCKS_EXCLUDED(mu_);
  // Null while there is no connection.
  std::shared_ptr<v1::Worker::Stub> stub() const ABSL_LOCKS_EXCLUDED(mu_);
  // Tells the worker which adapters will be wanted soon. Does not block, and does not tell whether it arrived.
  void Prefetch(const v1::PrefetchAdaptersRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  // A fresh snapshot from the worker, or the last one if none comes within a second. `done` runs once, on any thread.
  void Refresh(std::function<void()> done) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Watcher;

  void StartWatch(int generation) ABSL_LOCKS_EXCLUDED(mu_);
  void OnHeartbeat(int generation, v1::WorkerSnapshot snapshot) ABSL_LOCKS_EXCLUDED(mu_);
  void OnWatchEnd(int generation, const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string name_;
  const std::function<void(WorkerLink&)> on_change_;
  mutable absl::Mutex mu_;
  int generation_ ABSL_GUARDED_BY(mu_) = 0;  // Of Connect: what an older one still says is not heard.
  std::shared_ptr<v1::Worker::Stub> stub_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Watcher> watcher_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<grpc::Alarm> retry_ ABSL_GUARDED_BY(mu_);
  v1::WorkerState state_ ABSL_GUARDED_BY(mu_) = v1::WORKER_STATE_STARTING;
  std::shared_ptr<const v1::WorkerSnapshot> snapshot_ ABSL_GUARDED_BY(mu_);
  absl::Time heard_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::string last_error_ ABSL_GUARDED_BY(mu_);
  uint32_t restarts_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace h3
