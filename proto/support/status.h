// Refusals across the wire: absl::Status with reason and details (server/base/error.h) <-> grpc::Status whose trailers carry a
// google.rpc.Status with ErrorInfo, and RetryInfo or BadRequest where a detail says so.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/error.h"  // IWYU pragma: export. ReasonOf and DetailsOf, for clients too.

namespace h3 {

inline constexpr absl::string_view kErrorDomain = "h3.v1";

// Details with a meaning of their own.
inline constexpr absl::string_view kRetrySecondsDetail = "retry_seconds";  // Also as RetryInfo.
inline constexpr absl::string_view kFieldDetail = "field";                 // Also as a BadRequest field violation.

// Made valid UTF-8 and cut so that the trailers pass every client: the text at 1024 bytes, a detail at 512, all details at 1536
// (in the order of their keys). OK gives OK.
grpc::Status ToGrpc(const absl::Status& status);

// The reverse: code, text, reason and details.
absl::Status FromGrpc(const grpc::Status& status);

// "INVALID_ARGUMENT": the name of a code as users see it.
absl::string_view CodeName(absl::StatusCode code);

}  // namespace h3
