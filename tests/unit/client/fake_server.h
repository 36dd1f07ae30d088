// A server in this process for the client's tests: real gRPC without a port, or over a socket. Each call does what the test
// says, on a thread of gRPC's; a call that the test says nothing about is refused as UNIMPLEMENTED.
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/client.h"
#include "h3/v1/adapters.grpc.pb.h"
#include "h3/v1/generation.grpc.pb.h"
#include "h3/v1/operations.grpc.pb.h"
#include "h3/v1/presets.grpc.pb.h"
#include "proto/support/status.h"
#include "proto/support/tensor_stream.h"

namespace h3::testing {

using GenerateStream = grpc::ServerReaderWriter<v1::GenerateResponse, v1::GenerateRequest>;
using EvaluateStream = grpc::ServerReaderWriter<v1::EvaluateResponse, v1::EvaluateRequest>;

using UploadReader = grpc::ServerReader<v1::UploadAdapterRequest>;

class FakeServer final : v1::Generation::Service, v1::Operations::Service, v1::Adapters::Service, v1::Presets::Service {
 public:
  // `listen`: "unix:PATH", for tests of what only a real transport does; empty: in process.
  explicit FakeServer(const std::string& listen = "") {
    grpc::ServerBuilder builder;
    if (!listen.empty()) builder.AddListeningPort(listen, grpc::InsecureServerCredentials());
    builder.RegisterService(static_cast<v1::Presets::Service*>(this));
    builder.RegisterService(static_cast<v1::Generation::Service*>(this));
    builder.RegisterService(static_cast<v1::Operations::Service*>(this));
    builder.RegisterService(static_cast<v1::Adapters::Service*>(this));
    server_ = builder.BuildAndStart();
  }
  ~FakeServer() override { server_->Shutdown(); }

  std::unique_ptr<client::Client> Connect() {
    return std::make_unique<client::Client>(server_->InProcessChannel(grpc::ChannelArguments()), "fake");
  }

  // Set before the call.
  std::function<absl::Status(grpc::ServerContext&, GenerateStream&)> on_generate;
  std::function<absl::Status(grpc::ServerContext&, EvaluateStream&)> on_evaluate;
  std::function<absl::Status(grpc::ServerContext&, grpc::ServerWriter<v1::WatchMemoryResponse>&)> on_watch;
  std::function<absl::Status(const v1::ListAdaptersRequest&, v1::ListAdaptersResponse&)> on_list;
  std::function<absl::Status(const v1::UnloadAdapterRequest&, v1::UnloadAdapterResponse&)> on_unload;
  std::function<absl::Status(const v1::CheckAdapterRequest&, v1::CheckAdapterResponse&)> on_check;
  std::function<absl::Status(grpc::ServerContext&, UploadReader&, v1::UploadAdapterResponse&)> on_upload;
  std::function<absl::Status(const v1::SetAdapterRequest&, v1::SetAdapterResponse&)> on_set;
  std::function<absl::Status(const v1::SetPresetRequest&, v1::SetPresetResponse&)> on_set_preset;
  std::function<absl::Status(const v1::GetPresetRequest&, v1::GetPresetResponse&)> on_get_preset;
  std::function<absl::Status(const v1::ListPresetsRequest&, v1::ListPresetsResponse&)> on_list_presets;
  std::function<absl::Status(const v1::RemovePresetRequest&, v1::RemovePresetResponse&)> on_remove_preset;

 private:
  template <typename Handler, typename... Args>
  static grpc::Status Run(const Handler& handler, Args&&... args) {
    if (!handler) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "the test expects no such call");
    return ToGrpc(handler(std::forward<Args>(args)...));
  }
  grpc::Status Generate(grpc::ServerContext* context, GenerateStream* stream) override {
    return Run(on_generate, *context, *stream);
  }
  grpc::Status Evaluate(grpc::ServerContext* context, EvaluateStream* stream) override {
    return Run(on_evaluate, *context, *stream);
  }
  grpc::Status WatchMemory(grpc::ServerContext* context, const v1::WatchMemoryRequest*,
                           grpc::ServerWriter<v1::WatchMemoryResponse>* writer) override {
    return Run(on_watch, *context, *writer);
  }
  grpc::Status UnloadAdapter(grpc::ServerContext*, const v1::UnloadAdapterRequest* request,
                             v1::UnloadAdapterResponse* response) override {
    return Run(on_unload, *request, *response);
  }
  grpc::Status ListAdapters(grpc::ServerContext*, const v1::ListAdaptersRequest* request,
                            v1::ListAdaptersResponse* response) override {
    return Run(on_list, *request, *response);
  }
  grpc::Status CheckAdapter(grpc::ServerContext*, const v1::CheckAdapterRequest* request,
                            v1::CheckAdapterResponse* response) override {
    return Run(on_check, *request, *response);
  }
  grpc::Status UploadAdapter(grpc::ServerContext* context, UploadReader* reader, v1::UploadAdapterResponse* response) override {
    return Run(on_upload, *context, *reader, *response);
  }
  grpc::Status SetAdapter(grpc::ServerContext*, const v1::SetAdapterRequest* request,
                          v1::SetAdapterResponse* response) override {
    return Run(on_set, *request, *response);
  }
  grpc::Status SetPreset(grpc::ServerContext*, const v1::SetPresetRequest* request, v1::SetPresetResponse* response) override {
    return Run(on_set_preset, *request, *response);
  }
  grpc::Status GetPreset(grpc::ServerContext*, const v1::GetPresetRequest* request, v1::GetPresetResponse* response) override {
    return Run(on_get_preset, *request, *response);
  }
  grpc::Status ListPresets(grpc::ServerContext*, const v1::ListPresetsRequest* request,
                           v1::ListPresetsResponse* response) override {
    return Run(on_list_presets, *request, *response);
  }
  grpc::Status RemovePreset(grpc::ServerContext*, const v1::RemovePresetRequest* request,
                            v1::RemovePresetResponse* response) override {
    return Run(on_remove_preset, *request, *response);
  }

  std::unique_ptr<grpc::Server> server_;
};

// A float32 vector as the server announces it.
inline void AnnounceVector(const std::string& name, const std::string& data, TensorSpecs* specs) {
  v1::TensorSpec& spec = *specs->Add();
  spec.set_name(name);
  spec.set_dtype(v1::DTYPE_F32);
  spec.add_shape(static_cast<int64_t>(data.size() / sizeof(float)));
  spec.set_bytes(data.size());
}

// Writes `data` as the chunks of the announced tensors.
template <typename Response, typename Stream>
void WriteChunks(Stream& stream, const std::vector<std::string>& data) {
  ChunkReader chunks({data.begin(), data.end()});
  Response response;
  while (chunks.Next(*response.mutable_chunk())) stream.Write(response);
}

// A short good run: reads everything, then accepted, one progress, the tensors `video` and `audio`, completed.
inline absl::Status ServeGoodRun(GenerateStream& stream, const std::string& video, const std::string& audio) {
  v1::GenerateRequest request;
  while (stream.Read(&request)) {
  }
  v1::GenerateResponse response;
  response.mutable_accepted()->set_request_id("r1");
  stream.Write(response);
  response.mutable_progress()->set_phase(v1::PHASE_DENOISE);
  response.mutable_progress()->set_step(1);
  response.mutable_progress()->set_steps(1);
  stream.Write(response);
  AnnounceVector("video", video, response.mutable_result()->mutable_tensors());
  AnnounceVector("audio", audio, response.mutable_result()->mutable_tensors());
  stream.Write(response);
  WriteChunks<v1::GenerateResponse>(stream, {video, audio});
  response.mutable_completed()->add_step_seconds(0.5);
  stream.Write(response);
  return absl::OkStatus();
}

}  // namespace h3::testing
