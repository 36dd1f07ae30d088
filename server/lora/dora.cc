#include "server/lora/dora.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "server/base/check.h"
#include "server/lora/patched_rows.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// A low-rank part of W', with the coefficient that each entry of the axis takes (float64, broadcast where it is one number).
struct Part {
  at::Tensor a, b;
  OutRange pair;
  at::Tensor coefficient;  // [1] or [length]
};

// W' = base_coefficient W + the parts, over the rows of one DoRA term.
struct Combination {
  at::Tensor base_coefficient;
  std::vector<Part> parts;
};

at::Tensor Line(const at::Tensor& table, int modality) { return table.select(0, table.size(0) == 1 ? 0 : modality).to(at::kDouble); }

// The stack before a term as a combination; nullopt where it is none: LoKr, and DoRA of the other axis or of other rows.
std::optional<Combination> Combine(absl::Span<const SiteOp> before, MagnitudeAxis axis, OutRange range, int modality,
                                   const at::TensorOptions& options) {
  Combination sum{.base_coefficient = at::ones({1}, options.dtype(at::kDouble))};
  const auto scale_all = [&](const at::Tensor& factor) {
    sum.base_coefficient = sum.base_coefficient.mul(factor);
    for (Part& part : sum.parts) part.coefficient = part.coefficient.mul(factor);
  };
  for (const SiteOp& op : before) {
    const OutRange covered = std::visit([](const auto& o) { return o.range; }, op);
    const SharedRows shared = Share(range, covered);
    if (shared.count == 0 || std::holds_alternative<OffsetOp>(op)) continue;
    if (const auto* low_rank = std::get_if<LowRankOp>(&op)) {
      const double factor = low_rank->factors.of[static_cast<size_t>(modality)];
      sum.parts.push_back({low_rank->a, low_rank->b, covered, at::ones({1}, options.dtype(at::kDouble)).mul(factor)});
    } else if (const auto* rows = std::get_if<DoraRowsOp>(&op); rows != nullptr && axis == MagnitudeAxis::kRows) {
      at::Tensor keep = at::ones({range.count}, options.dtype(at::kDouble)), gain = at::zeros_like(keep);
      keep.narrow(0, shared.in_first, shared.count).copy_(Line(rows->keep, modality).narrow(0, shared.in_second, shared.count));
      gain.narrow(0, shared.in_first, shared.count).copy_(Line(rows->gain, modality).narrow(0, shared.in_second, shared.count));
      scale_all(keep);
      sum.parts.push_back({rows->a, rows->b, covered, gain});
    } else if (const auto* columns = std::get_if<DoraColumnsOp>(&op);
               columns != nullptr && axis == MagnitudeAxis::kColumns && shared.count == range.count) {
      scale_all(Line(columns->keep, modality));
      sum.parts.push_back({columns->a, columns->b, covered,
                           Line(columns->gain, modality).mul(columns->factors.of[static_cast<size_t>(modality)])});
    } else {
      return std::nullopt;
    }
  }
  return sum;
}

// |V|^2 over the axis, float64.
at::Tensor SquaredNorms(const BaseLinear& base, NormCache& cache, MagnitudeAxis axis, OutRange range, const Combination& v) {
  at::Tensor squares = v.base_coefficient.square().mul(cache.Base(base, axis, range));
  std::vector<at::Tensor> left, right;
  for (const Part& part : v.parts) {
    const at::Tensor& p = cache.Term(base, axis, range, part.a, part.b, part.pair);
    squares.add_(v.base_coefficient.mul(part.coefficient).mul(p), 2);
    left.push_back(LeftFactor(axis, range, part.a, part.b, part.pair));
    right.push_back(RightFactor(axis, range, part.a, part.b, part.pair));
  }
  for (size_t i = 0; i < v.parts.size(); ++i) {
    for (size_t j = i; j < v.parts.size(); ++j) {
      const at::Tensor q = at::mm(left[i], at::mm(right[i], right[j].t())).mul_(left[j]).sum(1, false, at::kDouble);
      squares.add_(v.parts[i].coefficient.mul(v.parts[j].coefficient).mul(q), i == j ? 1 : 2);
    }
  }
  return squares;
}

// The same by reading the weight, in chunks of rows.
at::Tensor SquaredNormsByPass(const BaseLinear& base, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale, int modality) {
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const bool by_rows = low_rank.magnitude_axis == MagnitudeAxis::kRows;
  at::Tensor squares = at::zeros({by_rows ? term.range.count : base.in()}, low_rank.magnitude.options().dtype(at::kDouble));
  const int64_t step = ChunkRows(base);
  for (int64_t done = 0; done < term.range.count; done += step) {
    const int64_t count = std::min(step, term.range.count - done);
    at::Tensor v = PatchedRows(base, before, modality, term.range.begin + done, count);
    v.addmm_(low_rank.b.narrow(0, done, count).to(at::kFloat), low_rank.a.to(at::kFloat), 1, scale);
    const at::Tensor part = v.square_().sum(by_rows ? 1 : 0);
    if (by_rows) {
      squares.narrow(0, done, count).copy_(part);
    } else {
      squares.add_(part);
    }
  }
  return squares;
}

// |V| of the rows [range.count] or of the columns [in], float64.
at::Tensor Norms(const BaseLinear& base, NormCache* cache, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale,
                 int modality) {
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const at::TensorOptions options = low_rank.magnitude.options();
  if (cache != nullptr) {
    std::optional<Combination> v = Combine(before, low_rank.magnitude_axis, term.range, modality, options);
    if (v.has_value()) {
      v->parts.push_back({low_rank.a, low_rank.b, term.range, at::ones({1}, options.dtype(at::kDouble)).mul(scale)});
      return SquaredNorms(base, *cache, low_rank.magnitude_axis, term.range, *v).clamp_min_(0).sqrt_();
    }
  }
  return SquaredNormsByPass(base, before, term, scale, modality).sqrt_();
}

// m / |V|, float64; 1 where the row or column is all zero or the adapter has none, so that nothing is divided by zero. NaN where
// squares overflowed: m / inf would be 0, a finite answer and a wrong one.
at::Tensor Gains(const ResidentLowRank& low_rank, const at::Tensor& norms) {
  at::Tensor gains = low_rank.magnitude.to(at::kDouble).div(norms);
  gains.masked_fill_(norms.eq(0), 1.0).masked_fill_(norms.isfinite().logical_not_(), std::numeric_limits<double>::quiet_NaN());
  if (low_rank.covered.defined()) gains = gains.mul(low_rank.covered).add_(low_rank.covered.neg().add_(1.0));
  return gains;
}

}  // namespace

SiteOp MakeDoraOp(const BaseLinear& base, NormCache* cache, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale,
                  const std::array<double, kModalities>& strength) {
  const OwnerScope owner(Owner::kActivations);
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const bool by_rows = low_rank.magnitude_axis == MagnitudeAxis::kRows;
  H3_CHECK(low_rank.magnitude_axis != MagnitudeAxis::kNone);
  // One line for all modalities where nothing tells them apart.
  const bool uniform = strength[0] == strength[1] && strength[1] == strength[2] &&
                       std::all_of(before.begin(), before.end(), [](const SiteOp& op) {
                         return std::visit(
                             [](const auto& o) {
                               if constexpr (requires { o.keep; }) {
                                 if (o.keep.size(0) > 1) return false;
                               }
                               if constexpr (requires { o.factors; }) return o.factors.uniform();
                               return true;
                             },
                             op);
                       });
  const int64_t lines = uniform ? 1 : kModalities;
  const int64_t length = by_rows ? term.range.count : base.in();
  at::Tensor keep = at::empty({lines, length}, low_rank.magnitude.options()), gain = at::empty_like(keep);
  Factors factors;
  for (int m = 0; m < kModalities; ++m) factors.of[static_cast<size_t>(m)] = static_cast<float>(strength[static_cast<size_t>(m)] * scale);
  for (int64_t line = 0; line < lines; ++line) {
    const double s = strength[static_cast<size_t>(line)];
    const at::Tensor g = Gains(low_rank, Norms(base, cache, before, term, scale, static_cast<int>(line)));
    keep.select(0, line).copy_(g.mul(s).add_(1.0 - s));
    // By rows the strength and the scale are in the gain; by columns they scale the narrow product instead.
    gain.select(0, line).copy_(by_rows ? g.mul(s * scale) : g);
  }
  if (by_rows) return DoraRowsOp{low_rank.a, low_rank.b, term.range, keep, gain};
  return DoraColumnsOp{low_rank.a, low_rank.b, term.range, factors, keep, gain};
}

double DoraSquaredNorm(const BaseLinear& base, NormCache& cache, const ResidentTerm& term, double scale) {
  const OwnerScope owner(Owner::kWorkspace);
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const MagnitudeAxis axis = low_rank.magnitude_axis;
  const at::Tensor left = LeftFactor(axis, term.range, low_rank.a, low_rank.b, term.range);
  const at::Tensor right = RightFactor(axis, term.range, low_rank.a, low_rank.b, term.range);
  const at::Tensor n0 = cache.Base(base, axis, term.range).to(at::kDouble);
  const at::Tensor p = cache.Term(base, axis, term.range, low_rank.a, low_rank.b, term.range).to(at::kDouble);
  const at::Tensor q = at::mm(left, at::mm(right, right.t())).mul_(left).sum(1, false, at::kDouble);
  const at::Tensor norms = n0.add(p, 2 * scale).add_(q, scale * scale).clamp_min_(0).sqrt_();
  // g V - W = (g - 1) W + g scale B A, squared without taking large numbers from each other.
  const at::Tensor g = Gains(low_rank, norms), below = g.neg().add_(1.0);
  return n0.mul(below.square())
      .sub_(p.mul(g).mul_(below), 2 * scale)
      .add_(q.mul(g.square()), scale * scale)
      .sum()
      .item<double>();
}

}  // namespace h3
