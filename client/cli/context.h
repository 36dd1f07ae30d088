// What every command of h3ctl works with.
#pragma once

#include <ostream>
#include <string>

#include "absl/time/time.h"
#include "client/cli/output_file.h"
#include "client/client.h"

namespace h3::ctl {

struct Context {
  client::Client& client;
  client::Canceller& interrupt;  // Raised by Ctrl-C.
  std::ostream& out;
  std::ostream& err;  // In place of `out` where the result itself goes to standard output.
  bool json = false;  // --json
  bool terminal = false;      // `out` is one.
  bool err_terminal = false;  // `err` is one.

  // What is shown beside a result that is written to `output`.
  Context Beside(const std::string& output) const {
    if (!IsStandardOutput(output)) return *this;
    return {.client = client,
            .interrupt = interrupt,
            .out = err,
            .err = err,
            .json = json,
            .terminal = err_terminal,
            .err_terminal = err_terminal};
  }

  // Answers come from snapshots; a server that takes longer is not well.
  client::CallOptions Snapshot() { return {.timeout = absl::Seconds(30), .cancel = &interrupt}; }
};

}  // namespace h3::ctl
