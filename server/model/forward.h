// One model evaluation as a pure function: (const model, conditions, stack program, modulation, rows) -> velocity.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/status/statusor.h"
#include "server/base/cancellation.h"
#include "server/format/layout.h"
#include "server/model/modulation.h"
#include "server/model/resident_model.h"
#include "server/model/stack_program.h"
#include "server/nn/rope.h"

namespace h3 {

// The text stream: condition_proj, refiner, final norm. Does not depend on t. text [tokens, text_width], any float type ->
// [tokens, hidden] of the compute type. CANCELLED between blocks.
absl::StatusOr<at::Tensor> TextStream(const ResidentModel& model, const StackProgram& program, const at::Tensor& text,
                                      const CancellationToken& cancel);

// What every evaluation of a run shares, on the device.
struct PackedContext {
  Packing packing;
  at::Tensor tags;  // int64 [rows]
  RotaryTable rotary;
};
PackedContext MakePackedContext(const ResidentModel& model, Packing packing);

// The distinct (timestep, modality) points of one evaluation, and for each packed row the index of its point.
struct EvaluationPoints {
  std::vector<ModulationPoint> points;
  std::vector<int64_t> row_point;
};
EvaluationPoints AssignPoints(const Packing& packing, float t_video, float t_audio);

struct EvaluationInput {
  const StackProgram* program = nullptr;
  const at::Tensor* text = nullptr;   // From TextStream.
  const at::Tensor* video = nullptr;  // float32 [video rows, 4 C], condition rows first.
  const at::Tensor* audio = nullptr;  // float32 [audio rows, C], condition rows first.
  const Modulation* modulation = nullptr;
  at::Tensor row_line;                // int64 [rows]: each packed row's line of the modulation.
  bool condition_rows = false;        // Velocities of condition rows are wanted too.
};

struct Velocity {
  at::Tensor video;  // float32; condition rows first where wanted, else target rows only.
  at::Tensor audio;
};

// CANCELLED between blocks. Never writes to its inputs.
absl::StatusOr<Velocity> Forward(const ResidentModel& model, const PackedContext& context, const EvaluationInput& input,
                                 const CancellationToken& cancel);

}  // namespace h3
