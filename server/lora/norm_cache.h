// What the norms of DoRA need of a base weight and of each low-rank term on it, computed once: after that a norm at any strength is
// a combination of vectors, and no weight is read. With W' = c0 W + sum c_i B_i A_i, where each c is a number or follows the axis,
//   |W'|^2 = c0^2 n0 + 2 sum c0 c_i p_i + sum c_i c_j q_ij
//   rows:    n0 = rowsum(W^2), p_i = rowsum(B_i * (W A_i^T)), q_ij = rowsum((B_i (A_i A_j^T)) * B_j)
//   columns: the same of W^T, with B_i^T for A_i and A_i^T for B_i.
// Source: design.md section 4. n0 and p are kept, as float32; q is made of factors alone whenever it is wanted.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <tuple>

#include "server/format/adapter.h"
#include "server/lora/resident_adapter.h"
#include "server/nn/linear.h"
#include "server/nn/site.h"

namespace h3 {

// On the device thread. Counts what it keeps under Owner::kCaches.
class NormCache {
 public:
  // n0 of rows `range` of the base: [range.count] by rows, [in] by columns.
  const at::Tensor& Base(const BaseLinear& base, MagnitudeAxis axis, OutRange range);
  // p of a pair whose B covers `pair` rows, taken over `range`: [range.count] (0 where the pair has no row) or [in].
  const at::Tensor& Term(const BaseLinear& base, MagnitudeAxis axis, OutRange range, const at::Tensor& a, const at::Tensor& b,
                         OutRange pair);
  // An adapter leaves: its vectors go with it.
  void Forget(const ResidentAdapter& adapter);

 private:
  // A pair is known by its B, which belongs to one resident adapter.
  using Key = std::tuple<const BaseLinear*, const void*, MagnitudeAxis, int64_t, int64_t>;

  std::map<Key, at::Tensor> vectors_;
};

// The left factor of a pair over the axis, float32: rows of B within `range` [range.count, rank], zero where it has none; or A^T.
at::Tensor LeftFactor(MagnitudeAxis axis, OutRange range, const at::Tensor& a, const at::Tensor& b, OutRange pair);
// The right factor: A [rank, in]; or the rows of B within `range` as [rank, range.count].
at::Tensor RightFactor(MagnitudeAxis axis, OutRange range, const at::Tensor& a, const at::Tensor& b, OutRange pair);

}  // namespace h3
