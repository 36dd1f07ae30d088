// The two things that an engine runs.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/worker/engine.h"
#include "server/worker/h3_engine.h"

namespace h3 {

absl::StatusOr<std::unique_ptr<Generation>> MakeGeneration(H3Engine& engine, GenerationSpec spec);
absl::StatusOr<std::unique_ptr<Session>> MakeSession(H3Engine& engine, Conditions conditions,
                                                     std::vector<std::pair<float, float>> announced,
                                                     const CancellationToken& cancel);

}  // namespace h3
