#include "client/call.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/support/status.h"

namespace h3::client {

namespace {

// The commonest trouble of all, so in plain words: which address, what is wrong with it, what to do.
std::string Unreachable(absl::string_view server, absl::string_view transport) {
  constexpr absl::string_view kStart =
      "; start a server there (h3-scheduler --model PATH --listen ADDRESS), or name the address of one that runs "
      "(h3ctl: --server or H3_SERVER)";
  if (absl::StrContains(transport, "Connection refused") || absl::StrContains(transport, "No such file or directory")) {
    return absl::StrCat("nothing listens at ", server, kStart);
  }
  return absl::StrCat("no connection to ", server, ", or it was lost (", transport, ")", kStart);
}

}  // namespace

Call::Call(const CallOptions& options, std::string server) : options_(options), server_(std::move(server)) {
  if (options_.timeout.has_value()) context_.set_deadline(absl::ToChronoTime(absl::Now() + *options_.timeout));
  if (options_.cancel != nullptr) options_.cancel->Attach(&context_);
}

Call::~Call() {
  if (options_.cancel != nullptr) options_.cancel->Detach(&context_);
}

absl::Status Call::End(const grpc::Status& grpc_status) const {
  absl::Status status = FromGrpc(grpc_status);
  if (status.ok() || !ReasonOf(status).empty()) return status;
  // Without a reason it comes from the transport and not from H3 Serve.
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
      return Refuse(status.code(), reason::kCancelled, "cancelled before the answer was complete");
    case absl::StatusCode::kDeadlineExceeded:
      return Refuse(status.code(), "DEADLINE_EXCEEDED",
                    absl::StrCat("no complete answer from ", server_, " within ",
                                 absl::FormatDuration(options_.timeout.value_or(absl::ZeroDuration()))),
                    {{"server", server_}});
    case absl::StatusCode::kUnavailable:
      return Refuse(status.code(), "UNREACHABLE", Unreachable(server_, status.message()), {{"server", server_}});
    default:
      return status;
  }
}

absl::Status ProtocolError(absl::string_view what) {
  return Refuse(absl::StatusCode::kInternal, "PROTOCOL", absl::StrCat("the server broke the protocol: ", what));
}

void Announce(absl::Span<const TensorView> tensors, TensorSpecs* specs) {
  specs->Clear();
  for (const TensorView& tensor : tensors) {
    v1::TensorSpec& spec = *specs->Add();
    spec.set_name(tensor.name);
    spec.set_dtype(tensor.dtype);
    spec.mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
    spec.set_bytes(tensor.data.size());
  }
}

absl::StatusOr<std::vector<Tensor>> TakeTensors(TensorAssembler& assembler) {
  if (const absl::Status complete = assembler.CheckComplete(); !complete.ok()) return ProtocolError(complete.message());
  std::vector<std::string> data = assembler.Take();
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < data.size(); ++i) {
    const v1::TensorSpec& spec = assembler.specs()[i];
    tensors.push_back({.name = spec.name(),
                       .dtype = spec.dtype(),
                       .shape = {spec.shape().begin(), spec.shape().end()},
                       .data = std::move(data[i])});
  }
  return tensors;
}

}  // namespace h3::client
