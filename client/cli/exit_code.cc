#include "client/cli/exit_code.h"

#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/base/error.h"

namespace h3::ctl {
namespace {
constexpr absl::string_view kUsage = "USAGE";
}  // namespace

absl::Status UsageError(absl::string_view message) { return RefuseArgument(kUsage, message); }

int ExitCode(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kInvalidArgument && ReasonOf(status) == kUsage) return 2;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return 3;
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kAborted:
      return 4;
    default:
      return 1;
  }
}

std::string ErrorJson(const absl::Status& status) {
  nlohmann::ordered_json json;
  json["code"] = absl::StatusCodeToString(status.code());
  json["reason"] = ReasonOf(status);
  json["message"] = std::string(status.message());
  json["details"] = nlohmann::ordered_json::object();
  for (const auto& [key, value] : DetailsOf(status)) json["details"][key] = value;
  // A message may quote a name that is not UTF-8.
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string ErrorLine(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  const std::string line = absl::StrCat(absl::StatusCodeToString(status.code()),
                                        reason.empty() ? "" : absl::StrCat(" / ", reason), ": ", status.message());
  return absl::StrReplaceAll(line, {{"\n", " "}, {"\r", " "}});
}

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

}  // namespace h3::ctl
