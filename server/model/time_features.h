// c(t): what the AdaLN projections are applied to.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "server/base/tiling.h"
#include "server/model/resident_model.h"
#include "server/model/stack_program.h"

namespace h3 {

// A point at which modulation is wanted: the timestep and the modality of the rows that use it.
struct ModulationPoint {
  float t = 0;
  int modality = 0;
  bool operator==(const ModulationPoint&) const = default;
};

// Linear interpolation of a table [rows, width] over t in [0, 1], clamped; float32 [points, width].
at::Tensor LerpTable(const at::Tensor& table, const std::vector<float>& t);

// float32 [points, adaln_width]. Full model: silu(time_embedder(t)), with the program's terms on the embedder; pruned: the table.
at::Tensor TimeFeatures(const ResidentModel& model, const StackProgram& program, const std::vector<ModulationPoint>& points);

// float32 [points, grid width]: the full model's silu(time embedding) on a pruned base. Requires model.silu_grid().
at::Tensor GridFeatures(const ResidentModel& model, const std::vector<ModulationPoint>& points);

}  // namespace h3
