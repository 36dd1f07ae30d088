#include "proto/support/status.h"

#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "server/base/error.h"
#include "server/base/text.h"

namespace h3 {
namespace {

// Trailers share a header limit of 8 KiB, beyond which a client gets another error in the place of ours. The text travels
// twice, once percent-encoded (up to three times as long); the details in base64.
constexpr size_t kMaxText = 1024;
constexpr size_t kMaxDetail = 512;
constexpr size_t kMaxDetails = 1536;     // All of them together.
constexpr size_t kMaxDescription = 128;  // Of a field violation: the whole text is beside it.

grpc::StatusCode ToGrpcCode(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return grpc::StatusCode::OK;
    case absl::StatusCode::kCancelled:
      return grpc::StatusCode::CANCELLED;
    case absl::StatusCode::kUnknown:
      return grpc::StatusCode::UNKNOWN;
    case absl::StatusCode::kInvalidArgument:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case absl::StatusCode::kDeadlineExceeded:
      return grpc::StatusCode::DEADLINE_EXCEEDED;
    case absl::StatusCode::kNotFound:
      return grpc::StatusCode::NOT_FOUND;
    case absl::StatusCode::kAlreadyExists:
      return grpc::StatusCode::ALREADY_EXISTS;
    case absl::StatusCode::kPermissionDenied:
      return grpc::StatusCode::PERMISSION_DENIED;
    case absl::StatusCode::kResourceExhausted:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case absl::StatusCode::kFailedPrecondition:
      return grpc::StatusCode::FAILED_PRECONDITION;
    case absl::StatusCode::kAborted:
      return grpc::StatusCode::ABORTED;
    case absl::StatusCode::kOutOfRange:
      return grpc::StatusCode::OUT_OF_RANGE;
    case absl::StatusCode::kUnimplemented:
      return grpc::StatusCode::UNIMPLEMENTED;
    case absl::StatusCode::kInternal:
      return grpc::StatusCode::INTERNAL;
    case absl::StatusCode::kUnavailable:
      return grpc::StatusCode::UNAVAILABLE;
    case absl::StatusCode::kDataLoss:
      return grpc::StatusCode::DATA_LOSS;
    case absl::StatusCode::kUnauthenticated:
      return grpc::StatusCode::UNAUTHENTICATED;
    default:
      return grpc::StatusCode::UNKNOWN;
  }
}

absl::StatusCode FromGrpcCode(grpc::StatusCode code) {
  for (int value = 0; value <= 16; ++value) {
    if (ToGrpcCode(static_cast<absl::StatusCode>(value)) == code) return static_cast<absl::StatusCode>(value);
  }
  return absl::StatusCode::kUnknown;
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const grpc::StatusCode code = ToGrpcCode(status.code());
  const std::string text = CleanText(status.message(), kMaxText);
  google::rpc::Status rich;
  rich.set_code(code);
  rich.set_message(text);
  const ErrorDetails details = DetailsOf(status);
  if (const std::string reason = ReasonOf(status); !reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(std::string(kErrorDomain));
    size_t left = kMaxDetails;
    for (const auto& [key, value] : details) {
      if (key.size() >= left) continue;
      std::string& kept = (*info.mutable_metadata())[CleanText(key, kMaxDetail)];
      kept = CleanText(value, std::min(kMaxDetail, left - key.size()));
      left -= key.size() + kept.size();
    }
    rich.add_details()->PackFrom(info);
  }
  if (const auto retry = details.find(std::string(kRetrySecondsDetail)); retry != details.end()) {
    double seconds = 0;
    if (absl::SimpleAtod(retry->second, &seconds) && seconds >= 0 && seconds < 1e9) {
      google::rpc::RetryInfo info;
      info.mutable_retry_delay()->set_seconds(static_cast<int64_t>(seconds));
      info.mutable_retry_delay()->set_nanos(
          static_cast<int32_t>((seconds - static_cast<double>(static_cast<int64_t>(seconds))) * 1e9));
      rich.add_details()->PackFrom(info);
    }
  }
  if (const auto field = details.find(std::string(kFieldDetail)); field != details.end()) {
    google::rpc::BadRequest request;
    google::rpc::BadRequest::FieldViolation& violation = *request.add_field_violations();
    violation.set_field(CleanText(field->second, kMaxDetail));
    violation.set_description(CleanText(text, kMaxDescription));
    rich.add_details()->PackFrom(request);
  }
  return grpc::Status(code, text, rich.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const absl::StatusCode code = FromGrpcCode(status.error_code());
  google::rpc::Status rich;
  if (!status.error_details().empty() && rich.ParseFromString(status.error_details())) {
    for (const google::protobuf::Any& detail : rich.details()) {
      google::rpc::ErrorInfo info;
      if (!detail.UnpackTo(&info)) continue;
      ErrorDetails details;
      for (const auto& [key, value] : info.metadata()) details[key] = value;
      return Refuse(code, info.reason(), status.error_message(), std::move(details));
    }
  }
  return absl::Status(code, status.error_message());
}

absl::string_view CodeName(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return "OK";
    case absl::StatusCode::kCancelled:
      return "CANCELLED";
    case absl::StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case absl::StatusCode::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case absl::StatusCode::kNotFound:
      return "NOT_FOUND";
    case absl::StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case absl::StatusCode::kPermissionDenied:
      return "PERMISSION_DENIED";
    case absl::StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case absl::StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case absl::StatusCode::kAborted:
      return "ABORTED";
    case absl::StatusCode::kOutOfRange:
      return "OUT_OF_RANGE";
    case absl::StatusCode::kUnimplemented:
      return "UNIMPLEMENTED";
    case absl::StatusCode::kInternal:
      return "INTERNAL";
    case absl::StatusCode::kUnavailable:
      return "UNAVAILABLE";
    case absl::StatusCode::kDataLoss:
      return "DATA_LOSS";
    case absl::StatusCode::kUnauthenticated:
      return "UNAUTHENTICATED";
    default:
      return "UNKNOWN";
  }
}

}  // namespace h3
