// Time, injected, so that no test sleeps.
#pragma once

#include "absl/time/time.h"

namespace h3 {

class Clock {
 public:
  virtual ~Clock() = default;
  // Thread-safe.
  virtual absl::Time Now() const = 0;

  // The machine's clock; lives for ever.
  static const Clock& Real();
};

}  // namespace h3
