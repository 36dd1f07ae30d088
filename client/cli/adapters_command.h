// `h3ctl adapters list | load | unload`.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/cli/context.h"

namespace h3::ctl {

// Tables on a terminal and in a pipe alike; one JSON object with --json.
absl::Status RunAdaptersList(Context& context);
absl::Status RunAdaptersLoad(const std::string& name, Context& context);
absl::Status RunAdaptersUnload(const std::string& name, Context& context);

}  // namespace h3::ctl
