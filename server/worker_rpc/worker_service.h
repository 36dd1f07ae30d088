// The Worker service over an Engine. Reactors only pass values to the device thread and messages back; nothing in them blocks.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "h3/v1/worker.grpc.pb.h"
#include "server/base/serial_executor.h"
#include "server/metrics/worker_metrics.h"
#include "server/worker/engine.h"

namespace h3 {

struct WorkerServiceOptions {
  int64_t max_request_bytes = int64_t{2} << 30;
  // Called once, on any thread, when the engine is no longer healthy: the process must leave.
  std::function<void(absl::Status)> on_fault;
};

// Thread-safe. The engine and the device thread must outlive it; the server that it is registered with must not.
class WorkerService final : public v1::Worker::CallbackService {
 public:
  WorkerService(Engine& engine, SerialExecutor& device, WorkerMetrics& metrics, WorkerServiceOptions options)
      : engine_(engine), device_(device), metrics_(metrics), options_(std::move(options)) {}
  // Waits until the device has let go of what it ran for calls that ended. Not on the device thread.
  ~WorkerService() override;

  grpc::ServerBidiReactor<v1::GenerateRequest, v1::GenerateResponse>* Generate(grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<v1::EvaluateRequest, v1::EvaluateResponse>* Evaluate(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* LoadAdapter(grpc::CallbackServerContext* context, const v1::WorkerLoadAdapterRequest* request,
                                        v1::WorkerLoadAdapterResponse* response) override;
  grpc::ServerUnaryReactor* UnloadAdapter(grpc::CallbackServerContext* context, const v1::WorkerUnloadAdapterRequest* request,
                                          v1::WorkerUnloadAdapterResponse* response) override;
  grpc::ServerUnaryReactor* CheckAdapter(grpc::CallbackServerContext* context, const v1::WorkerCheckAdapterRequest* request,
                                         v1::WorkerCheckAdapterResponse* response) override;
  grpc::ServerUnaryReactor* PrefetchAdapters(grpc::CallbackServerContext* context, const v1::PrefetchAdaptersRequest* request,
                                             v1::PrefetchAdaptersResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext* context,
                                                     const v1::WatchRequest* request) override;
  grpc::ServerUnaryReactor* GetSnapshot(grpc::CallbackServerContext* context, const v1::GetSnapshotRequest* request,
                                        v1::GetSnapshotResponse* response) override;

  // From now on new work is refused with UNAVAILABLE / DRAINING; what runs goes on.
  void Drain() { draining_.store(true); }
  // Generations and sessions that have not ended.
  int Active() const { return running_.load() + sessions_.load(); }

  v1::WorkerSnapshot Snapshot() const;

  // For its streams.
  Engine& engine() { return engine_; }
  SerialExecutor& device() { return device_; }
  WorkerMetrics& metrics() { return metrics_; }
  const WorkerServiceOptions& options() const { return options_; }
  absl::Status CheckServing() const;
  std::atomic<int>& running() { return running_; }
  std::atomic<int>& sessions() { return sessions_; }
  // After each piece of work on the device: tells on_fault when the engine has a fault. Returns the engine's health.
  absl::Status CheckHealth();

 private:
  Engine& engine_;
  SerialExecutor& device_;
  WorkerMetrics& metrics_;
  const WorkerServiceOptions options_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> fault_told_{false};
  std::atomic<int> running_{0};
  std::atomic<int> sessions_{0};
  SerialExecutor prefetch_{64};  // Reads adapters ahead. Last: its tasks use the rest.
};

}  // namespace h3
