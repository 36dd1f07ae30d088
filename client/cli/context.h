// What every command of h3ctl works with.
#pragma once

#include <ostream>

#include "absl/time/time.h"
#include "client/client.h"

namespace h3::ctl {

struct Context {
  client::Client& client;
  client::Canceller& interrupt;  // Raised by Ctrl-C.
  std::ostream& out;
  bool json = false;      // --json
  bool terminal = false;  // `out` is one.

  // Answers come from snapshots; a server that takes longer is not well.
  client::CallOptions Snapshot() { return {.timeout = absl::Seconds(30), .cancel = &interrupt}; }
};

}  // namespace h3::ctl
