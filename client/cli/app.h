// The command line of h3ctl.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/context.h"

namespace h3::ctl {

// A parsed command line.
struct Invocation {
  std::string help;    // Not empty: to be printed, and nothing else to be done (--help, --version).
  std::string server;  // From --server, H3_SERVER, or the default.
  bool json = false;
  std::function<absl::Status(Context&)> run;
};

// USAGE: what does not parse; the message says what and where help is.
absl::StatusOr<Invocation> ParseCommandLine(int argc, const char* const* argv);

}  // namespace h3::ctl
