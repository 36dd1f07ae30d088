// The C++ client of H3 Serve: what the services of proto/h3/v1 do, as calls that return when they are done.
//
//   h3::client::Client client("127.0.0.1:50051");
//   h3::v1::GenerateHeader header;                       // layout, stack, sampling: see proto/h3/v1/generation.proto
//   auto result = client.Generate(header, {{"text", ...}, {"text_token_tags", ...}}, {.progress = ShowProgress});
//
// Errors are absl::Status with the code of the server; h3::ReasonOf(status) and h3::DetailsOf(status) give the reason and the
// numbers behind it (proto/support/status.h). In addition every call may end with
//   UNAVAILABLE / UNREACHABLE   no connection to the server, or it was lost; trying again may help,
//   CANCELLED / CANCELLED       the Canceller was used,
//   DEADLINE_EXCEEDED           CallOptions::timeout passed,
//   INTERNAL / PROTOCOL         the server sent what the protocol does not allow.
// examples/generate.cc is a whole program.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/canceller.h"
#include "client/session.h"
#include "client/tensor.h"
#include "h3/v1/adapters.pb.h"
#include "h3/v1/generation.pb.h"
#include "h3/v1/operations.pb.h"
#include "h3/v1/presets.pb.h"

namespace grpc {
class ChannelInterface;
}

namespace h3::client {

// Called on the thread that called Generate, in the order accepted, progress*, result. Any of them may be empty. What they take
// of time holds back the reading of the stream, never the device.
struct GenerateEvents {
  std::function<void(const v1::Accepted&)> accepted;
  std::function<void(const v1::Progress&)> progress;
  std::function<void(const v1::ResultHeader&)> result;  // Its chunks follow.
};

struct GenerateResult {
  v1::Accepted accepted;
  std::vector<Tensor> tensors;  // video, audio, video_latents, audio_latents.
  v1::Completed completed;
};

// Called on the thread that called UploadAdapter, about once a MiB: how far it is of `total` bytes. Any of them may be empty.
struct UploadEvents {
  std::function<void(uint64_t bytes, uint64_t total)> hashed;  // All of them before the first `sent`.
  std::function<void(uint64_t bytes, uint64_t total)> sent;    // After the last the server checks, which takes time too.
};

struct UploadOptions {
  bool check_only = false;  // Report, and keep nothing.
  UploadEvents events;
};

// Thread-safe: calls may run at once, over one connection that is made by the first and again after it was lost.
class Client {
 public:
  // `server`: HOST:PORT or unix:PATH. Does not connect yet.
  explicit Client(const std::string& server);
  // Over a channel of one's own making (TLS, in process). `server` names it in messages.
  Client(std::shared_ptr<grpc::ChannelInterface> channel, std::string server);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // A whole sampling run. Fills in header.tensors from `tensors` and sends their bytes. Blocks until the last chunk has come.
  absl::StatusOr<GenerateResult> Generate(v1::GenerateHeader header, absl::Span<const TensorView> tensors,
                                          const GenerateEvents& events = {}, const CallOptions& options = {});

  // Opens a session for single model evaluations. Fills in header.tensors. Blocks until the session is ready. The client must
  // outlive the session; the timeout is that of the whole session.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(v1::EvaluateHeader header, absl::Span<const TensorView> tensors,
                                                       const CallOptions& options = {});

  absl::StatusOr<v1::ListAdaptersResponse> ListAdapters(const CallOptions& options = {});
  // Returns when the workers hold the adapter.
  absl::StatusOr<v1::LoadAdapterResponse> LoadAdapter(const std::string& name, const CallOptions& options = {});
  absl::StatusOr<v1::UnloadAdapterResponse> UnloadAdapter(const std::string& name, const CallOptions& options = {});
  // OK whatever the verdict is: it is in the report.
  absl::StatusOr<v1::CheckAdapterResponse> CheckAdapter(const std::string& name, const CallOptions& options = {});
  // Reads the file twice, for its digest and to send it, a MiB at a time. `name` is empty with check_only. Besides what the
  // server says: NOT_FOUND / NO_SUCH_FILE, ABORTED / FILE_CHANGED (it was written to meanwhile).
  absl::StatusOr<v1::UploadAdapterResponse> UploadAdapter(const std::string& name, const std::string& path,
                                                          const UploadOptions& upload = {}, const CallOptions& options = {});
  // Fields of `settings` that are not set stay as they are kept; `reset` forgets those first. With neither, it only answers.
  absl::StatusOr<v1::SetAdapterResponse> SetAdapter(const std::string& name, const v1::AdapterSettings& settings,
                                                    bool reset = false, const CallOptions& options = {});

  absl::StatusOr<v1::ListPresetsResponse> ListPresets(const CallOptions& options = {});
  absl::StatusOr<v1::SetPresetResponse> SetPreset(const v1::SetPresetRequest& request, const CallOptions& options = {});
  absl::StatusOr<v1::GetPresetResponse> GetPreset(const std::string& name, const CallOptions& options = {});
  absl::StatusOr<v1::RemovePresetResponse> RemovePreset(const std::string& name, const CallOptions& options = {});

  absl::StatusOr<v1::GetModelResponse> GetModel(const CallOptions& options = {});
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const CallOptions& options = {});
  absl::StatusOr<v1::GetMemoryResponse> GetMemory(const CallOptions& options = {});
  // Calls `show` about every `interval` until it returns false (OK), or the stream ends or fails.
  absl::Status WatchMemory(absl::Duration interval, const std::function<bool(const v1::WatchMemoryResponse&)>& show,
                           const CallOptions& options = {});

 private:
  struct Stubs;
  const std::string server_;
  const std::unique_ptr<Stubs> stubs_;
};

}  // namespace h3::client
