#include "server/base/cancellation.h"

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace h3 {

void CancellationToken::Cancel(absl::Status why) {
  H3_CHECK(!why.ok());
  absl::MutexLock lock(&state_->mu);
  if (!state_->why.ok()) return;
  state_->why = std::move(why);
  state_->raised.store(true, std::memory_order_release);
}

absl::Status CancellationToken::Check(absl::string_view where) const {
  if (!IsCancelled()) return absl::OkStatus();
  absl::MutexLock lock(&state_->mu);
  const absl::Status& why = state_->why;
  return Refuse(why.code(), ReasonOf(why), absl::StrCat(why.message(), " (", where, ")"), DetailsOf(why));
}

}  // namespace h3
