#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/call.h"
#include "client/streams.h"
#include "proto/support/status.h"

namespace h3::client {
namespace {

// Puts the events of one run together and holds them to their order: accepted, progress*, result, chunk*, completed.
class Receiver {
 public:
  explicit Receiver(const GenerateEvents& events) : events_(events) {}

  absl::Status On(v1::GenerateResponse& response) {
    switch (response.event_case()) {
      case v1::GenerateResponse::kAccepted:
        if (accepted_) return OutOfOrder("accepted");
        accepted_ = true;
        result_.accepted = std::move(*response.mutable_accepted());
        if (events_.accepted) events_.accepted(result_.accepted);
        return absl::OkStatus();
      case v1::GenerateResponse::kProgress:
        if (!accepted_ || assembler_.has_value()) return OutOfOrder("progress");
        if (events_.progress) events_.progress(response.progress());
        return absl::OkStatus();
      case v1::GenerateResponse::kResult:
        if (!accepted_ || assembler_.has_value()) return OutOfOrder("result");
        if (const absl::Status specs = CheckTensorSpecs(response.result().tensors(), std::numeric_limits<int64_t>::max());
            !specs.ok()) {
          return ProtocolError(specs.message());
        }
        assembler_.emplace(response.result().tensors());
        if (events_.result) events_.result(response.result());
        return absl::OkStatus();
      case v1::GenerateResponse::kChunk:
        if (!assembler_.has_value() || completed_) return OutOfOrder("chunk");
        if (const absl::Status added = assembler_->Add(response.chunk()); !added.ok()) return ProtocolError(added.message());
        return absl::OkStatus();
      case v1::GenerateResponse::kCompleted:
        if (!assembler_.has_value() || completed_) return OutOfOrder("completed");
        completed_ = true;
        result_.completed = std::move(*response.mutable_completed());
        return absl::OkStatus();
      case v1::GenerateResponse::EVENT_NOT_SET:
        break;
    }
    return absl::OkStatus();  // An event of a newer server.
  }

  absl::StatusOr<GenerateResult> Take() {
    if (!completed_) return ProtocolError("the stream ended before the run was completed");
    absl::StatusOr<std::vector<Tensor>> tensors = TakeTensors(*assembler_);
    if (!tensors.ok()) return tensors.status();
    result_.tensors = *std::move(tensors);
    return std::move(result_);
  }

 private:
  static absl::Status OutOfOrder(absl::string_view event) { return ProtocolError(absl::StrCat(event, " out of order")); }

  const GenerateEvents& events_;
  GenerateResult result_;
  bool accepted_ = false;
  bool completed_ = false;
  std::optional<TensorAssembler> assembler_;
};

}  // namespace

absl::StatusOr<GenerateResult> RunGenerateStream(v1::Generation::StubInterface& stub, v1::GenerateHeader header,
                                                 absl::Span<const TensorView> tensors, const GenerateEvents& events,
                                                 const CallOptions& options, const std::string& server) {
  Call call(options, server);
  const auto stream = stub.Generate(call.context());
  v1::GenerateRequest request;
  *request.mutable_header() = std::move(header);
  Announce(tensors, request.mutable_header()->mutable_tensors());
  Receiver receiver(events);
  absl::Status broken;
  {
    const Upload upload(*stream, std::move(request), tensors, /*half_close=*/true);
    v1::GenerateResponse response;
    while (broken.ok() && stream->Read(&response)) broken = receiver.On(response);
    if (!broken.ok()) call.context()->TryCancel();
  }
  const absl::Status end = call.End(stream->Finish());
  if (!broken.ok()) return broken;
  if (!end.ok()) return end;
  return receiver.Take();
}

}  // namespace h3::client
