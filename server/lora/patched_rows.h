// The weight that a stack amounts to, a few rows at a time: what norms are taken of, and what a merged copy is made of.
#pragma once

#include <ATen/core/Tensor.h>

#include "absl/types/span.h"
#include "server/nn/linear.h"
#include "server/nn/site.h"

namespace h3 {

// Rows that two ranges share.
struct SharedRows {
  int64_t in_first = 0;   // Where they begin in each.
  int64_t in_second = 0;
  int64_t count = 0;      // 0: none.
};
SharedRows Share(const OutRange& first, const OutRange& second);

// Rows that are looked at together in a pass over a weight: about 16 MiB of float32, and never more than a fifth of them, so that nothing of a
// weight's size is made however small the weight.
int64_t ChunkRows(const BaseLinear& base);

// Rows [begin, begin + count) of the weight as `ops` have patched it for rows of one modality: float32 [count, in], a fresh copy.
// Offsets are no part of a weight.
at::Tensor PatchedRows(const BaseLinear& base, absl::Span<const SiteOp> ops, int modality, int64_t begin, int64_t count);

}  // namespace h3
