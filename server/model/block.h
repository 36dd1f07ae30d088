// One transformer block over the packed rows: a main block (modulated, rotary) or a refiner block (neither).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "server/model/resident_model.h"
#include "server/model/stack_program.h"
#include "server/nn/rope.h"
#include "server/nn/site.h"

namespace h3 {

// What is the same for all blocks of one evaluation.
struct RowContext {
  RowModality modality;
  const RotaryTable* rotary = nullptr;  // Null in the refiner.
  at::Tensor pair;                      // int64 [rows]: the line of the modulation that a row takes; undefined in the refiner.
};

// x [rows, hidden] of the model's compute type, updated in place. `name`: "blocks.3", "token_refiner.blocks.0". `modulation`:
// [entries, 6, hidden], undefined in the refiner.
void ApplyBlock(const ResidentModel& model, const std::string& name, const StackProgram& program, const RowContext& rows,
                const at::Tensor& modulation, at::Tensor& x);

// RmsNorm under the canonical name of its weight, with the stack's difference on that weight, if any: float32.
at::Tensor NormWithStack(const ResidentModel& model, const StackProgram& program, const std::string& weight, const RowModality& rows,
                         const at::Tensor& x);

}  // namespace h3
