// The public services of a scheduler over its core.
#pragma once

#include <grpcpp/grpcpp.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "h3/v1/adapters.grpc.pb.h"
#include "h3/v1/generation.grpc.pb.h"
#include "h3/v1/operations.grpc.pb.h"
#include "h3/v1/presets.grpc.pb.h"
#include "server/scheduler_rpc/scheduler_core.h"

namespace h3 {

// All thread-safe; the core must outlive them.
class GenerationService final : public v1::Generation::CallbackService {
 public:
  explicit GenerationService(SchedulerCore& core) : core_(core) {}
  grpc::ServerBidiReactor<v1::GenerateRequest, v1::GenerateResponse>* Generate(grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<v1::EvaluateRequest, v1::EvaluateResponse>* Evaluate(grpc::CallbackServerContext* context) override;

 private:
  SchedulerCore& core_;
};

class AdaptersService final : public v1::Adapters::CallbackService {
 public:
  explicit AdaptersService(SchedulerCore& core) : core_(core) {}
  grpc::ServerUnaryReactor* ListAdapters(grpc::CallbackServerContext* context, const v1::ListAdaptersRequest* request,
                                         v1::ListAdaptersResponse* response) override;
  grpc::ServerUnaryReactor* LoadAdapter(grpc::CallbackServerContext* context, const v1::LoadAdapterRequest* request,
                                        v1::LoadAdapterResponse* response) override;
  grpc::ServerUnaryReactor* UnloadAdapter(grpc::CallbackServerContext* context, const v1::UnloadAdapterRequest* request,
                                          v1::UnloadAdapterResponse* response) override;
  grpc::ServerUnaryReactor* CheckAdapter(grpc::CallbackServerContext* context, const v1::CheckAdapterRequest* request,
                                         v1::CheckAdapterResponse* response) override;
  grpc::ServerReadReactor<v1::UploadAdapterRequest>* UploadAdapter(grpc::CallbackServerContext* context,
                                                                   v1::UploadAdapterResponse* response) override;
  grpc::ServerUnaryReactor* SetAdapter(grpc::CallbackServerContext* context, const v1::SetAdapterRequest* request,
                                       v1::SetAdapterResponse* response) override;

 private:
  SchedulerCore& core_;
};

class PresetsService final : public v1::Presets::CallbackService {
 public:
  explicit PresetsService(SchedulerCore& core) : core_(core) {}
  grpc::ServerUnaryReactor* ListPresets(grpc::CallbackServerContext* context, const v1::ListPresetsRequest* request,
                                        v1::ListPresetsResponse* response) override;
  grpc::ServerUnaryReactor* SetPreset(grpc::CallbackServerContext* context, const v1::SetPresetRequest* request,
                                      v1::SetPresetResponse* response) override;
  grpc::ServerUnaryReactor* GetPreset(grpc::CallbackServerContext* context, const v1::GetPresetRequest* request,
                                      v1::GetPresetResponse* response) override;
  grpc::ServerUnaryReactor* RemovePreset(grpc::CallbackServerContext* context, const v1::RemovePresetRequest* request,
                                         v1::RemovePresetResponse* response) override;

 private:
  SchedulerCore& core_;
};

class OperationsService final : public v1::Operations::CallbackService {
 public:
  explicit OperationsService(SchedulerCore& core) : core_(core), start_(absl::Now()) {}
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerUnaryReactor* GetMemory(grpc::CallbackServerContext* context, const v1::GetMemoryRequest* request,
                                      v1::GetMemoryResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchMemoryResponse>* WatchMemory(grpc::CallbackServerContext* context,
                                                                 const v1::WatchMemoryRequest* request) override;

 private:
  SchedulerCore& core_;
  const absl::Time start_;
};

}  // namespace h3
