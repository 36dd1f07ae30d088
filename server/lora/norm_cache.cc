#include "server/lora/norm_cache.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "server/lora/patched_rows.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// visit(first row within the range, rows of W float32) over chunks of the range.
template <typename F>
void ForEachChunk(const BaseLinear& base, OutRange range, F&& visit) {
  const int64_t step = ChunkRows(base);
  for (int64_t done = 0; done < range.count; done += step) {
    visit(done, base.Rows(range.begin + done, std::min(step, range.count - done)));
  }
}

at::Tensor Kept(const at::Tensor& vector) {
  const OwnerScope owner(Owner::kCaches);
  return vector.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

at::Tensor LeftFactor(MagnitudeAxis axis, OutRange range, const at::Tensor& a, const at::Tensor& b, OutRange pair) {
  if (axis == MagnitudeAxis::kColumns) return a.to(at::kFloat).t();
  const SharedRows shared = Share(range, pair);
  const at::Tensor rows = b.narrow(0, shared.count == 0 ? 0 : shared.in_second, shared.count).to(at::kFloat);
  if (shared.count == range.count) return rows;
  at::Tensor padded = at::zeros({range.count, b.size(1)}, rows.options());
  if (shared.count > 0) padded.narrow(0, shared.in_first, shared.count).copy_(rows);
  return padded;
}

at::Tensor RightFactor(MagnitudeAxis axis, OutRange range, const at::Tensor& a, const at::Tensor& b, OutRange pair) {
  if (axis == MagnitudeAxis::kRows) return a.to(at::kFloat);
  return LeftFactor(MagnitudeAxis::kRows, range, a, b, pair).t();
}

const at::Tensor& NormCache::Base(const BaseLinear& base, MagnitudeAxis axis, OutRange range) {
  at::Tensor& vector = vectors_[{&base, nullptr, axis, range.begin, range.count}];
  if (vector.defined()) return vector;
  const OwnerScope owner(Owner::kWorkspace);
  const bool rows = axis == MagnitudeAxis::kRows;
  at::Tensor squares;
  ForEachChunk(base, range, [&](int64_t done, const at::Tensor& weight) {
    // Added up in float64, so that column sums over all rows hardly depend on the chunks.
    if (!squares.defined()) squares = at::zeros({rows ? range.count : base.in()}, weight.options().dtype(at::kDouble));
    const at::Tensor part = weight.square().sum(rows ? 1 : 0);
    if (rows) {
      squares.narrow(0, done, weight.size(0)).copy_(part);
    } else {
      squares.add_(part);
    }
  });
  return vector = Kept(squares);
}

const at::Tensor& NormCache::Term(const BaseLinear& base, MagnitudeAxis axis, OutRange range, const at::Tensor& a,
                                  const at::Tensor& b, OutRange pair) {
  at::Tensor& vector = vectors_[{&base, b.unsafeGetTensorImpl(), axis, range.begin, range.count}];
  if (vector.defined()) return vector;
  const OwnerScope owner(Owner::kWorkspace);
  const at::Tensor left = LeftFactor(axis, range, a, b, pair), right = RightFactor(axis, range, a, b, pair);
  at::Tensor product = at::zeros(left.sizes(), left.options());  // W A^T, or W^T B.
  ForEachChunk(base, range, [&](int64_t done, const at::Tensor& weight) {
    if (axis == MagnitudeAxis::kRows) {
      at::Tensor part = product.narrow(0, done, weight.size(0));
      at::mm_out(part, weight, right.t());
    } else {
      product.addmm_(weight.t(), right.narrow(1, done, weight.size(0)).t());
    }
  });
  return vector = Kept(product.mul_(left).sum(1, false, at::kDouble));
}

void NormCache::Forget(const ResidentAdapter& adapter) {
  for (const ResidentTerm& term : adapter.terms) {
    const auto* low_rank = std::get_if<ResidentLowRank>(&term.what);
    if (low_rank == nullptr) continue;
    std::erase_if(vectors_, [&](const auto& entry) { return std::get<1>(entry.first) == low_rank->b.unsafeGetTensorImpl(); });
  }
}

}  // namespace h3
