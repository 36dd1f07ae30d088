#include <grpcpp/alarm.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "absl/time/clock.h"
#include "proto/support/status.h"
#include "server/base/error.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

template <typename Response>
void FillDevices(const SchedulerCore& core, Response& response) {
  for (const auto& worker : core.workers()) {
    const auto snapshot = worker->snapshot();
    if (snapshot == nullptr || worker->state() == v1::WORKER_STATE_LOST) continue;
    v1::DeviceMemory& device = *response.add_devices();
    device = snapshot->memory();
    device.set_worker(worker->name());
  }
}

// Asks every worker for a fresh snapshot; `done` runs once, when all have answered or a second has passed.
void RefreshAll(const SchedulerCore& core, std::function<void()> done) {
  const auto workers = core.workers();
  if (workers.empty()) return done();
  auto left = std::make_shared<std::atomic<size_t>>(workers.size());
  auto shared = std::make_shared<std::function<void()>>(std::move(done));
  for (const auto& worker : workers) {
    worker->Refresh([left, shared] {
      if (left->fetch_sub(1) == 1) (*shared)();
    });
  }
}

class WatchMemoryCall final : public grpc::ServerWriteReactor<v1::WatchMemoryResponse>,
                              public std::enable_shared_from_this<WatchMemoryCall> {
 public:
  WatchMemoryCall(const SchedulerCore& core, absl::Duration interval) : core_(core), interval_(interval) {}
  void Begin() {
    self_ = shared_from_this();
    Next();
  }

 private:
  void Next() {
    RefreshAll(core_, [self = shared_from_this()] {
      if (self->cancelled_.load()) return self->FinishOnce();
      self->response_.Clear();
      FillDevices(self->core_, self->response_);
      self->StartWrite(&self->response_);
    });
  }
  void OnWriteDone(bool ok) override {
    if (!ok || cancelled_.load()) return FinishOnce();
    absl::MutexLock lock(&alarm_mu_);  // Its callbacks run elsewhere, never in Set or Cancel.
    alarm_.Set(absl::ToChronoTime(absl::Now() + interval_), [self = shared_from_this()](bool) {
      if (self->cancelled_.load()) return self->FinishOnce();
      self->Next();
    });
    if (cancelled_.load()) alarm_.Cancel();
  }
  void OnCancel() override {
    cancelled_.store(true);
    absl::MutexLock lock(&alarm_mu_);
    alarm_.Cancel();
  }
  void OnDone() override { self_.reset(); }
  void FinishOnce() {
    if (!finished_.exchange(true)) Finish(grpc::Status::CANCELLED);
  }

  const SchedulerCore& core_;
  const absl::Duration interval_;
  v1::WatchMemoryResponse response_;
  absl::Mutex alarm_mu_;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(alarm_mu_);
  std::shared_ptr<WatchMemoryCall> self_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> finished_{false};
};

// Refuses before it begins.
class RefusedWatch final : public grpc::ServerWriteReactor<v1::WatchMemoryResponse> {
 public:
  explicit RefusedWatch(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerUnaryReactor* OperationsService::GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest*,
                                                      v1::GetModelResponse* response) {
  std::set<std::string> seen;
  for (const auto& worker : core_.workers()) {
    const auto snapshot = worker->snapshot();
    if (snapshot != nullptr && seen.insert(snapshot->model().base_fingerprint()).second)
      *response->add_models() = snapshot->model();
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* OperationsService::GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest*,
                                                       v1::GetStatusResponse* response) {
  response->set_version(H3_VERSION);
  response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - start_));
  response->set_queued(static_cast<uint32_t>(core_.dispatcher().queued()));
  response->set_queue_capacity(static_cast<uint32_t>(core_.dispatcher().capacity()));
  response->set_running(static_cast<uint32_t>(core_.dispatcher().running()));
  response->set_draining(core_.draining());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  // What a worker said at its last heartbeat may be over since.
  RefreshAll(core_, [this, reactor, response] {
    for (const auto& worker : core_.workers()) *response->add_workers() = worker->Status();
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerUnaryReactor* OperationsService::GetMemory(grpc::CallbackServerContext* context, const v1::GetMemoryRequest*,
                                                       v1::GetMemoryResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  RefreshAll(core_, [this, reactor, response] {
    FillDevices(core_, *response);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::WatchMemoryResponse>* OperationsService::WatchMemory(grpc::CallbackServerContext*,
                                                                                  const v1::WatchMemoryRequest* request) {
  const double seconds = request->interval_seconds() == 0 ? 1 : request->interval_seconds();
  if (!(seconds >= 0.1 && seconds <= 60)) {
    return new RefusedWatch(
        RefuseArgument(reason::kBadRequest, "interval_seconds must be 0.1 to 60", {{"field", "interval_seconds"}}));
  }
  auto call = std::make_shared<WatchMemoryCall>(core_, absl::Seconds(seconds));
  call->Begin();
  return call.get();
}

}  // namespace h3
