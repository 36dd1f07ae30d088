#include "client/client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <utility>

#include "client/call.h"
#include "client/streams.h"
#include "h3/v1/adapters.grpc.pb.h"
#include "h3/v1/generation.grpc.pb.h"
#include "h3/v1/operations.grpc.pb.h"
#include "h3/v1/presets.grpc.pb.h"

namespace h3::client {
namespace {

// A chunk is 1 MiB; nothing larger than this belongs on the wire.
constexpr int kMaxMessageBytes = 8 << 20;
// A run may be silent for minutes, and a peer that stopped (or a cut wire) is seen only by pinging. Servers permit every 5 s.
constexpr int kKeepaliveMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;

std::shared_ptr<grpc::ChannelInterface> Connect(const std::string& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // However long the silence.
  return grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

struct Client::Stubs {
  explicit Stubs(const std::shared_ptr<grpc::ChannelInterface>& channel)
      : generation(v1::Generation::NewStub(channel)),
        adapters(v1::Adapters::NewStub(channel)),
        presets(v1::Presets::NewStub(channel)),
        operations(v1::Operations::NewStub(channel)) {}

  const std::unique_ptr<v1::Generation::Stub> generation;
  const std::unique_ptr<v1::Adapters::Stub> adapters;
  const std::unique_ptr<v1::Presets::Stub> presets;
  const std::unique_ptr<v1::Operations::Stub> operations;
};

namespace {

// A unary call: `method` of `stub`.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Unary(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                               const Request& request, const CallOptions& options, const std::string& server) {
  Call call(options, server);
  Response response;
  if (absl::Status end = call.End((stub.*method)(call.context(), request, &response)); !end.ok()) return end;
  return response;
}

}  // namespace

Client::Client(const std::string& server) : Client(Connect(server), server) {}

Client::Client(std::shared_ptr<grpc::ChannelInterface> channel, std::string server)
    : server_(std::move(server)), stubs_(std::make_unique<Stubs>(channel)) {}

Client::~Client() = default;

absl::StatusOr<GenerateResult> Client::Generate(v1::GenerateHeader header, absl::Span<const TensorView> tensors,
                                                const GenerateEvents& events, const CallOptions& options) {
  return RunGenerateStream(*stubs_->generation, std::move(header), tensors, events, options, server_);
}

absl::StatusOr<std::unique_ptr<Session>> Client::OpenSession(v1::EvaluateHeader header, absl::Span<const TensorView> tensors,
                                                             const CallOptions& options) {
  return OpenSessionStream(*stubs_->generation, std::move(header), tensors, options, server_);
}

absl::StatusOr<v1::ListAdaptersResponse> Client::ListAdapters(const CallOptions& options) {
  return Unary(*stubs_->adapters, &v1::Adapters::Stub::ListAdapters, v1::ListAdaptersRequest(), options, server_);
}

absl::StatusOr<v1::LoadAdapterResponse> Client::LoadAdapter(const std::string& name, const CallOptions& options) {
  v1::LoadAdapterRequest request;
  request.set_name(name);
  return Unary(*stubs_->adapters, &v1::Adapters::Stub::LoadAdapter, request, options, server_);
}

absl::StatusOr<v1::UnloadAdapterResponse> Client::UnloadAdapter(const std::string& name, const CallOptions& options) {
  v1::UnloadAdapterRequest request;
  request.set_name(name);
  return Unary(*stubs_->adapters, &v1::Adapters::Stub::UnloadAdapter, request, options, server_);
}

absl::StatusOr<v1::CheckAdapterResponse> Client::CheckAdapter(const std::string& name, const CallOptions& options) {
  v1::CheckAdapterRequest request;
  request.set_name(name);
  return Unary(*stubs_->adapters, &v1::Adapters::Stub::CheckAdapter, request, options, server_);
}

absl::StatusOr<v1::UploadAdapterResponse> Client::UploadAdapter(const std::string& name, const std::string& path,
                                                                const UploadOptions& upload, const CallOptions& options) {
  return RunUploadStream(*stubs_->adapters, name, path, upload, options, server_);
}

absl::StatusOr<v1::SetAdapterResponse> Client::SetAdapter(const std::string& name, const v1::AdapterSettings& settings,
                                                          bool reset, const CallOptions& options) {
  v1::SetAdapterRequest request;
  request.set_name(name);
  *request.mutable_settings() = settings;
  request.set_reset(reset);
  return Unary(*stubs_->adapters, &v1::Adapters::Stub::SetAdapter, request, options, server_);
}

absl::StatusOr<v1::ListPresetsResponse> Client::ListPresets(const CallOptions& options) {
  return Unary(*stubs_->presets, &v1::Presets::Stub::ListPresets, v1::ListPresetsRequest(), options, server_);
}

absl::StatusOr<v1::SetPresetResponse> Client::SetPreset(const v1::SetPresetRequest& request, const CallOptions& options) {
  return Unary(*stubs_->presets, &v1::Presets::Stub::SetPreset, request, options, server_);
}

absl::StatusOr<v1::GetPresetResponse> Client::GetPreset(const std::string& name, const CallOptions& options) {
  v1::GetPresetRequest request;
  request.set_name(name);
  return Unary(*stubs_->presets, &v1::Presets::Stub::GetPreset, request, options, server_);
}

absl::StatusOr<v1::RemovePresetResponse> Client::RemovePreset(const std::string& name, const CallOptions& options) {
  v1::RemovePresetRequest request;
  request.set_name(name);
  return Unary(*stubs_->presets, &v1::Presets::Stub::RemovePreset, request, options, server_);
}

absl::StatusOr<v1::GetModelResponse> Client::GetModel(const CallOptions& options) {
  return Unary(*stubs_->operations, &v1::Operations::Stub::GetModel, v1::GetModelRequest(), options, server_);
}

absl::StatusOr<v1::GetStatusResponse> Client::GetStatus(const CallOptions& options) {
  return Unary(*stubs_->operations, &v1::Operations::Stub::GetStatus, v1::GetStatusRequest(), options, server_);
}

absl::StatusOr<v1::GetMemoryResponse> Client::GetMemory(const CallOptions& options) {
  return Unary(*stubs_->operations, &v1::Operations::Stub::GetMemory, v1::GetMemoryRequest(), options, server_);
}

absl::Status Client::WatchMemory(absl::Duration interval, const std::function<bool(const v1::WatchMemoryResponse&)>& show,
                                 const CallOptions& options) {
  Call call(options, server_);
  v1::WatchMemoryRequest request;
  request.set_interval_seconds(absl::ToDoubleSeconds(interval));
  const auto stream = stubs_->operations->WatchMemory(call.context(), request);
  v1::WatchMemoryResponse response;
  while (stream->Read(&response)) {
    if (show(response)) continue;
    call.context()->TryCancel();
    stream->Finish();
    return absl::OkStatus();
  }
  return call.End(stream->Finish());
}

}  // namespace h3::client
