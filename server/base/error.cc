#include "server/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace h3 {
namespace {
constexpr absl::string_view kReasonUrl = "h3.v1/reason";
constexpr absl::string_view kDetailPrefix = "h3.v1/detail/";
}  // namespace

absl::Status Refuse(absl::StatusCode code, absl::string_view reason, absl::string_view message, ErrorDetails details) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  for (const auto& [key, value] : details) status.SetPayload(absl::StrCat(kDetailPrefix, key), absl::Cord(value));
  return status;
}

absl::Status RefuseArgument(absl::string_view reason, absl::string_view message, ErrorDetails details) {
  return Refuse(absl::StatusCode::kInvalidArgument, reason, message, std::move(details));
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : "";
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (absl::ConsumePrefix(&url, kDetailPrefix)) details.emplace(std::string(url), std::string(value));
  });
  return details;
}

absl::Status WithDetail(absl::Status status, absl::string_view key, absl::string_view value) {
  if (!status.ok()) status.SetPayload(absl::StrCat(kDetailPrefix, key), absl::Cord(value));
  return status;
}

}  // namespace h3
