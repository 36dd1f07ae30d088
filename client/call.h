// What every RPC of the client has: a context with deadline and canceller, and one way to end. Internal to client/.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/sync_stream.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/canceller.h"
#include "client/session.h"
#include "client/tensor.h"
#include "h3/v1/types.pb.h"
#include "proto/support/tensor_stream.h"

namespace h3::client {

// Thread-compatible, but for the canceller.
class Call {
 public:
  // `server` names it in messages.
  Call(const CallOptions& options, std::string server);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  grpc::ClientContext* context() { return &context_; }

  // The call's end as the status that client.h promises: a server's refusal as it is, a lost connection as UNREACHABLE, ...
  absl::Status End(const grpc::Status& status) const;

 private:
  const CallOptions options_;
  const std::string server_;
  grpc::ClientContext context_;
};

// INTERNAL / PROTOCOL.
absl::Status ProtocolError(absl::string_view what);

// Announces `tensors` in `specs`, replacing what is there.
void Announce(absl::Span<const TensorView> tensors, TensorSpecs* specs);

// Writes a message and the chunks of its tensors on a thread of its own, so that what the server has to say meanwhile is read
// (and a server that waits for its reader keeps reading). Destroying it waits for the last byte, or for the stream to break:
// then its Finish says why. Join before Finish.
template <typename Request, typename Response>
class Upload {
 public:
  using Stream = grpc::ClientReaderWriterInterface<Request, Response>;

  // Borrows all but `message`. `half_close`: nothing follows.
  Upload(Stream& stream, Request message, absl::Span<const TensorView> tensors, bool half_close)
      : thread_([&stream, message = std::move(message), tensors, half_close] {
          if (stream.Write(message) && SendChunks(stream, tensors) && half_close) stream.WritesDone();
        }) {}
  ~Upload() { thread_.join(); }
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

 private:
  static bool SendChunks(Stream& stream, absl::Span<const TensorView> tensors) {
    std::vector<absl::string_view> data;
    for (const TensorView& tensor : tensors) data.push_back(tensor.data);
    ChunkReader chunks(std::move(data));
    Request request;
    while (chunks.Next(*request.mutable_chunk())) {
      if (!stream.Write(request)) return false;
    }
    return true;
  }

  std::thread thread_;
};

// The tensors of a result. PROTOCOL where they are not complete.
absl::StatusOr<std::vector<Tensor>> TakeTensors(TensorAssembler& assembler);

}  // namespace h3::client
