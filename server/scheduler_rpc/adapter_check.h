// What an adapter is and whether it would load: judged by its header here, and by every value on a worker.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "h3/v1/adapters.pb.h"
#include "server/scheduler_rpc/scheduler_core.h"

namespace h3 {

// Begins on the file thread; `done` is called once, on any thread. Verdicts are kept by digest, settings and base, so that a worker is
// asked once. An error only where there is no such adapter, or no base to check against.
void CheckAdapter(SchedulerCore& core, const std::string& name, std::function<void(absl::StatusOr<v1::AdapterReport>)> done);

}  // namespace h3
