#include "server/worker_rpc/worker_service.h"

#include <grpcpp/alarm.h>

#include <chrono>
#include <utility>

#include "absl/synchronization/notification.h"
#include "proto/support/status.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"

namespace h3 {
namespace {

constexpr std::chrono::milliseconds kHeartbeat{1000};

// Sends a snapshot at once and then every heartbeat, until the scheduler hangs up.
class WatchCall final : public grpc::ServerWriteReactor<v1::WatchResponse> {
 public:
  explicit WatchCall(const WorkerService& service) : service_(service) { Write(); }

  void OnWriteDone(bool ok) override {
    if (!ok || cancelled_.load()) {
      FinishOnce();
      return;
    }
    absl::MutexLock lock(&mu_);
    alarm_.Set(std::chrono::system_clock::now() + kHeartbeat, [this](bool) {
      if (cancelled_.load()) {
        FinishOnce();
      } else {
        Write();
      }
    });
  }
  void OnCancel() override {
    cancelled_.store(true);
    absl::MutexLock lock(&mu_);
    alarm_.Cancel();
  }
  void OnDone() override { delete this; }

 private:
  void Write() {
    *response_.mutable_snapshot() = service_.Snapshot();
    StartWrite(&response_);
  }
  void FinishOnce() {
    if (!finished_.exchange(true)) Finish(grpc::Status::CANCELLED);
  }

  const WorkerService& service_;
  v1::WatchResponse response_;
  absl::Mutex mu_;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);  // Not thread-safe.
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> finished_{false};
};

// Runs `work` on the device thread and finishes the call with what it returns.
grpc::ServerUnaryReactor* OnDevice(WorkerService& service, grpc::CallbackServerContext* context,
                                   std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (const absl::Status serving = service.CheckServing(); !serving.ok()) {
    reactor->Finish(ToGrpc(serving));
    return reactor;
  }
  const bool posted = service.device().Post([&service, reactor, work = std::move(work)] {
    const absl::Status status = work();
    const absl::Status health = service.CheckHealth();
    reactor->Finish(ToGrpc(health.ok() ? status : health));
  });
  if (!posted) {
    reactor->Finish(ToGrpc(Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "the worker's queue is full",
                                  {{"retry_seconds", "1"}})));
  }
  return reactor;
}

// The adapter that a request of either kind names.
template <typename Request>
absl::StatusOr<StackEntry> EntryOf(const Request& request) {
  StackEntry entry{.adapter = request.name(), .digest = request.digest()};
  H3_ASSIGN_OR_RETURN(entry.settings, FromProto(request.settings()));
  return entry;
}

}  // namespace

grpc::ServerUnaryReactor* WorkerService::LoadAdapter(grpc::CallbackServerContext* context,
                                                     const v1::WorkerLoadAdapterRequest* request,
                                                     v1::WorkerLoadAdapterResponse* response) {
  return OnDevice(*this, context, [this, request, response]() -> absl::Status {
    H3_ASSIGN_OR_RETURN(const StackEntry entry, EntryOf(*request));
    H3_ASSIGN_OR_RETURN(const ResolvedAdapter resolved, engine_.LoadAdapter(entry));
    *response->mutable_resolved() = ToProto(resolved);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* WorkerService::CheckAdapter(grpc::CallbackServerContext* context,
                                                      const v1::WorkerCheckAdapterRequest* request,
                                                      v1::WorkerCheckAdapterResponse* response) {
  return OnDevice(*this, context, [this, request, response]() -> absl::Status {
    H3_ASSIGN_OR_RETURN(const StackEntry entry, EntryOf(*request));
    H3_ASSIGN_OR_RETURN(const AdapterMeasure measure, engine_.MeasureAdapter(entry));
    *response->mutable_resolved() = ToProto(measure.resolved);
    response->set_relative_strength(measure.relative_strength);
    for (const AdapterMeasure::Kind& kind : measure.kinds) {
      v1::KindStrength& line = *response->add_strengths();
      line.set_module_kind(kind.module_kind);
      line.set_modules(static_cast<uint32_t>(kind.modules));
      line.set_relative_strength(kind.relative_strength);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* WorkerService::PrefetchAdapters(grpc::CallbackServerContext* context,
                                                          const v1::PrefetchAdaptersRequest* request,
                                                          v1::PrefetchAdaptersResponse*) {
  for (const v1::PrefetchAdaptersRequest::Adapter& adapter : request->adapters()) {
    // A hint: what does not fit the queue of hints is not read ahead.
    prefetch_.Post([this, entry = StackEntry{.adapter = adapter.name(), .digest = adapter.digest()}] {
      engine_.PrefetchAdapter(entry).IgnoreError();
    });
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::UnloadAdapter(grpc::CallbackServerContext* context,
                                                       const v1::WorkerUnloadAdapterRequest* request,
                                                       v1::WorkerUnloadAdapterResponse* response) {
  return OnDevice(*this, context, [this, request, response]() -> absl::Status {
    const auto freed = engine_.UnloadAdapter(request->digest());
    if (!freed.ok()) return freed.status();
    response->set_freed_bytes(static_cast<uint64_t>(freed->value()));
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::WatchResponse>* WorkerService::Watch(grpc::CallbackServerContext*, const v1::WatchRequest*) {
  return new WatchCall(*this);
}

grpc::ServerUnaryReactor* WorkerService::GetSnapshot(grpc::CallbackServerContext* context, const v1::GetSnapshotRequest*,
                                                     v1::GetSnapshotResponse* response) {
  *response->mutable_snapshot() = Snapshot();
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

// A call that has ended takes one more turn on the device at most, to free what it holds: queued before this one.
WorkerService::~WorkerService() {
  absl::Notification done;
  device_.Continue([&done] { done.Notify(); });
  done.WaitForNotification();
}

absl::Status WorkerService::CheckServing() const {
  if (const absl::Status health = engine_.Health(); !health.ok()) {
    return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost, health.message());
  }
  if (!draining_.load()) return absl::OkStatus();
  return Refuse(absl::StatusCode::kUnavailable, reason::kDraining, "the worker is draining and takes no new work");
}

absl::Status WorkerService::CheckHealth() {
  const absl::Status health = engine_.Health();
  if (health.ok()) return health;
  if (!fault_told_.exchange(true) && options_.on_fault) options_.on_fault(health);
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost, health.message());
}

v1::WorkerSnapshot WorkerService::Snapshot() const {
  v1::WorkerSnapshot snapshot;
  const ModelInfo& info = engine_.model();
  v1::Model& model = *snapshot.mutable_model();
  model.set_base_fingerprint(info.fingerprint);
  model.set_name(info.name);
  model.set_container(std::string(ContainerName(info.container)));
  model.set_pruned(info.geometry.pruned());
  model.set_partition(ToProto(info.partition));
  model.set_dtype(info.dtype);
  model.set_qkv_layout(std::string(QkvLayoutName(info.qkv_layout)));
  *model.mutable_geometry() = ToProto(info.geometry);
  model.set_parameters(static_cast<uint64_t>(info.parameters));
  model.set_weight_bytes(static_cast<uint64_t>(info.weight_bytes.value()));
  model.set_host_weight_bytes(static_cast<uint64_t>(info.host_weight_bytes.value()));
  *model.mutable_plan() = ToProto(info.plan_base, info.plan_options);
  model.set_device(info.device);
  model.set_grid_width(info.grid_width);
  for (const std::string& warning : info.warnings) model.add_warnings(warning);

  const MemoryReport report = engine_.Memory();
  v1::DeviceMemory& memory = *snapshot.mutable_memory();
  memory = ToProto(report);
  memory.set_base_fingerprint(info.fingerprint);
  memory.set_out_of_memory(static_cast<uint64_t>(metrics_.out_of_memory()));
  for (const v1::AdapterMemory& adapter : memory.adapters()) {
    if (adapter.tier() != "device") continue;
    v1::Adapter& resident = *snapshot.add_resident();
    resident.set_name(adapter.name());
    resident.set_digest(adapter.digest());
    resident.set_bytes(adapter.bytes());
    resident.set_resident(true);
    resident.set_pins(adapter.pins());
  }
  snapshot.set_running(static_cast<uint32_t>(running_.load()));
  snapshot.set_sessions(static_cast<uint32_t>(sessions_.load()));
  snapshot.set_draining(draining_.load());
  return snapshot;
}

}  // namespace h3
