#include "server/scheduler/backoff.h"

#include <algorithm>

namespace h3 {

absl::Duration RestartBackoff::NextDelay(absl::Duration lived) {
  if (lived >= absl::Minutes(1)) next_ = absl::Milliseconds(200);
  const absl::Duration delay = next_;
  next_ = std::min(next_ * 2, absl::Seconds(30));
  return delay;
}

}  // namespace h3
