// DoRA at run time, without a merged copy: V = W' + (alpha/r) B A where W' is the weight as the stack has patched it so far;
// W'' = W' + s (m V / |V| - W'). Norms are recombined from the vectors of a NormCache; only where the stack before it holds what
// they cannot express (LoKr, a DoRA of the other axis) the weight is read again, in chunks of rows. Nothing of a weight's size is made.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "absl/types/span.h"
#include "server/lora/norm_cache.h"
#include "server/lora/resident_adapter.h"
#include "server/nn/linear.h"
#include "server/nn/site.h"

namespace h3 {

// The operation of one DoRA term after `before` at its site. `scale`: alpha / r, with an auto-strength ratio in it; `strength`: of
// each modality, with every factor in it. `cache`: null where the base is a merged copy, whose vectors would serve once.
SiteOp MakeDoraOp(const BaseLinear& base, NormCache* cache, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale,
                  const std::array<double, kModalities>& strength);

// Sum over all elements of (m V / |V| - W)^2 with V = W + scale B A: what auto-strength measures of a DoRA term.
double DoraSquaredNorm(const BaseLinear& base, NormCache& cache, const ResidentTerm& term, double scale);

}  // namespace h3
