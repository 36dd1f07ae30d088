// How long to wait before a worker is started again.
#pragma once

#include "absl/time/time.h"

namespace h3 {

// Doubles from 200 ms to 30 s; a worker that served for a minute starts over. Thread-compatible.
class RestartBackoff {
 public:
  // The worker ended after serving (or trying to) for `lived`.
  absl::Duration NextDelay(absl::Duration lived);

 private:
  absl::Duration next_ = absl::Milliseconds(200);
};

}  // namespace h3
