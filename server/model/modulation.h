// AdaLN modulation, in float32, only for the (timestep, modality) pairs that rows use.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/status/statusor.h"
#include "server/base/cancellation.h"
#include "server/model/modulation_cache.h"
#include "server/model/resident_model.h"
#include "server/model/stack_program.h"
#include "server/model/time_features.h"

namespace h3 {

// One line of a Modulation: a point under the effective factors of a program.
struct ModulationEntry {
  ModulationPoint point;
  const StackProgram* program = nullptr;
  bool operator==(const ModulationEntry&) const = default;
};

struct Modulation {
  // Of each block: [entries, 6, hidden], shift, scale, gate of attention, then of the MLP.
  std::vector<at::Tensor> blocks;
  // [entries, 2, hidden]: shift, scale.
  at::Tensor final;
};

// Reads each AdaLN weight once, however many entries there are, and not at all for points that `cache` (null: none) knows. An entry's
// values have the same bits whichever others are computed with it, and whatever was cached. CANCELLED between blocks. Counts the
// result under Owner::kActivations.
absl::StatusOr<Modulation> ComputeModulation(const ResidentModel& model, const std::vector<ModulationEntry>& entries,
                                             ModulationCache* cache, const CancellationToken& cancel);

}  // namespace h3
