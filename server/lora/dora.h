// DoRA at run time, without a merged copy: V = W' + (alpha/r) B A where W' is the weight as the stack has patched it so far;
// W'' = W' + s (m V / |V| - W'). Norms are taken in float32 over chunks of rows, so nothing of a weight's size is made.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "absl/types/span.h"
#include "server/lora/resident_adapter.h"
#include "server/nn/linear.h"
#include "server/nn/site.h"

namespace h3 {

// The operation of one DoRA term after `before` at its site. `scale`: alpha / r, with an auto-strength ratio in it; `strength`: of
// each modality, with every factor in it. Reads the base weight once.
SiteOp MakeDoraOp(const BaseLinear& base, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale,
                  const std::array<double, kModalities>& strength);

// Sum over all elements of (m V / |V| - W)^2 with V = W + scale B A: what auto-strength measures of a DoRA term.
double DoraSquaredNorm(const BaseLinear& base, const ResidentTerm& term, double scale);

}  // namespace h3
