#include "client/session.h"

#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "client/call.h"
#include "client/streams.h"
#include "proto/support/status.h"

namespace h3::client {
namespace {

class StreamSession final : public Session {
 public:
  StreamSession(v1::Generation::StubInterface& stub, const CallOptions& options, const std::string& server)
      : call_(options, server), stream_(stub.Evaluate(call_.context())) {}

  ~StreamSession() override {
    if (!over_.has_value()) End(absl::CancelledError("the session was given up")).IgnoreError();
  }

  absl::Status Open(v1::EvaluateHeader header, absl::Span<const TensorView> tensors) {
    v1::EvaluateRequest request;
    *request.mutable_header() = std::move(header);
    Announce(tensors, request.mutable_header()->mutable_tensors());
    return Exchange(std::move(request), tensors, [this] { return ReadOpening(); });
  }

  const v1::Accepted& accepted() const override { return accepted_; }
  const v1::Ready& ready() const override { return ready_; }

  absl::StatusOr<EvaluationOutput> Evaluate(v1::Evaluation evaluation, absl::Span<const TensorView> tensors) override {
    if (over_.has_value()) return Over();
    v1::EvaluateRequest request;
    *request.mutable_evaluation() = std::move(evaluation);
    Announce(tensors, request.mutable_evaluation()->mutable_tensors());
    EvaluationOutput output;
    absl::Status status = Exchange(std::move(request), tensors, [this, &output] { return ReadResult(output); });
    if (!status.ok()) return status;
    return output;
  }

  absl::Status Close() override {
    if (over_.has_value()) return Over();
    stream_->WritesDone();
    v1::EvaluateResponse response;
    if (stream_->Read(&response)) return End(ProtocolError("an event after the last evaluation"));
    over_ = call_.End(stream_->Finish());
    return *over_;
  }

 private:
  // Sends, and reads the answer meanwhile. `read` gives false where the stream ended before its time.
  absl::Status Exchange(v1::EvaluateRequest request, absl::Span<const TensorView> tensors,
                        absl::FunctionRef<absl::StatusOr<bool>()> read) {
    absl::StatusOr<bool> answered;
    {
      const Upload upload(*stream_, std::move(request), tensors, /*half_close=*/false);
      answered = read();
      if (!answered.ok()) call_.context()->TryCancel();
    }
    if (!answered.ok()) return End(answered.status());
    if (!*answered) return EndOfStream();
    return absl::OkStatus();
  }

  absl::StatusOr<bool> ReadOpening() {
    v1::EvaluateResponse response;
    if (!stream_->Read(&response)) return false;
    if (!response.has_accepted()) return ProtocolError("accepted does not come first");
    accepted_ = std::move(*response.mutable_accepted());
    if (!stream_->Read(&response)) return false;
    if (!response.has_ready()) return ProtocolError("ready does not follow accepted");
    ready_ = response.ready();
    return true;
  }

  absl::StatusOr<bool> ReadResult(EvaluationOutput& output) {
    v1::EvaluateResponse response;
    if (!stream_->Read(&response)) return false;
    if (!response.has_result()) return ProtocolError("an evaluation's answer does not begin with its result");
    output.result = std::move(*response.mutable_result());
    const absl::Status specs = CheckTensorSpecs(output.result.tensors(), std::numeric_limits<int64_t>::max());
    if (!specs.ok()) return ProtocolError(specs.message());
    TensorAssembler assembler(output.result.tensors());
    while (!assembler.complete()) {
      if (!stream_->Read(&response)) return false;
      if (!response.has_chunk()) return ProtocolError("an event between the chunks of a result");
      if (const absl::Status added = assembler.Add(response.chunk()); !added.ok()) return ProtocolError(added.message());
    }
    absl::StatusOr<std::vector<Tensor>> taken = TakeTensors(assembler);
    if (!taken.ok()) return taken.status();
    output.tensors = *std::move(taken);
    return true;
  }

  // The server ended the stream where more was due.
  absl::Status EndOfStream() {
    over_ = call_.End(stream_->Finish());
    if (over_->ok()) over_ = ProtocolError("the stream ended in the middle of a session");
    return *over_;
  }

  // Ends it from our side.
  absl::Status End(absl::Status why) {
    call_.context()->TryCancel();
    stream_->Finish();
    over_ = std::move(why);
    return *over_;
  }

  absl::Status Over() const { return over_->ok() ? absl::FailedPreconditionError("the session was closed") : *over_; }

  Call call_;
  const std::unique_ptr<grpc::ClientReaderWriterInterface<v1::EvaluateRequest, v1::EvaluateResponse>> stream_;
  std::optional<absl::Status> over_;  // Set when the stream was finished.
  v1::Accepted accepted_;
  v1::Ready ready_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> OpenSessionStream(v1::Generation::StubInterface& stub, v1::EvaluateHeader header,
                                                           absl::Span<const TensorView> tensors, const CallOptions& options,
                                                           const std::string& server) {
  auto session = std::make_unique<StreamSession>(stub, options, server);
  if (absl::Status opened = session->Open(std::move(header), tensors); !opened.ok()) return opened;
  return session;
}

}  // namespace h3::client
