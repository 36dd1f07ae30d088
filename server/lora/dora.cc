#include "server/lora/dora.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "server/base/check.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// Rows of a chunk that an operation's range covers.
struct Overlap {
  int64_t in_chunk = 0;
  int64_t in_range = 0;
  int64_t count = 0;
};

Overlap Intersect(int64_t begin, int64_t count, const OutRange& range) {
  const int64_t from = std::max(begin, range.begin);
  const int64_t to = std::min(begin + count, range.begin + range.count);
  return {from - begin, from - range.begin, std::max<int64_t>(0, to - from)};
}

at::Tensor Product(const at::Tensor& a, const at::Tensor& b, const Overlap& rows) {
  return at::mm(b.narrow(0, rows.in_range, rows.count).to(at::kFloat), a.to(at::kFloat));
}

// Rows of kron(w1, w2) in the order of the site.
at::Tensor KroneckerRows(const KroneckerOp& op, const Overlap& rows) {
  const int64_t o2 = op.w2.size(0), total = op.w1.size(0) * o2;
  const at::TensorOptions index = op.w1.options().dtype(at::kLong);
  at::Tensor row = op.row_order.defined() ? op.row_order.narrow(0, rows.in_range, rows.count)
                                          : at::arange(rows.in_range, rows.in_range + rows.count, index);
  const at::Tensor present = row.lt(total).to(at::kFloat).unsqueeze(1);
  row = row.clamp_max(total - 1);
  const at::Tensor left = op.w1.to(at::kFloat).index_select(0, row.div(o2, "floor")).unsqueeze(2);
  const at::Tensor right = op.w2.to(at::kFloat).index_select(0, row.remainder(o2)).unsqueeze(1);
  return left.mul(right).reshape({rows.count, -1}).mul_(present);
}

at::Tensor Line(const at::Tensor& table, int modality) { return table.select(0, table.size(0) == 1 ? 0 : modality); }

// Rows [begin, begin + count) of the weight as `ops` have patched it for rows of one modality, float32, a fresh copy.
at::Tensor PatchedRows(const BaseLinear& base, absl::Span<const SiteOp> ops, int modality, int64_t begin, int64_t count) {
  at::Tensor rows = base.Rows(begin, count).clone();
  const auto factor = [&](const Factors& factors) { return factors.of[static_cast<size_t>(modality)]; };
  for (const SiteOp& op : ops) {
    const OutRange range = std::visit([](const auto& o) { return o.range; }, op);
    const Overlap overlap = Intersect(begin, count, range);
    if (overlap.count == 0) continue;
    at::Tensor part = rows.narrow(0, overlap.in_chunk, overlap.count);
    if (const auto* low_rank = std::get_if<LowRankOp>(&op)) {
      part.add_(Product(low_rank->a, low_rank->b, overlap), factor(low_rank->factors));
    } else if (const auto* kronecker = std::get_if<KroneckerOp>(&op)) {
      part.add_(KroneckerRows(*kronecker, overlap), factor(kronecker->factors));
    } else if (const auto* dora_rows = std::get_if<DoraRowsOp>(&op)) {
      const auto line = [&](const at::Tensor& table) {
        return Line(table, modality).narrow(0, overlap.in_range, overlap.count).unsqueeze(1);
      };
      part.mul_(line(dora_rows->keep)).add_(Product(dora_rows->a, dora_rows->b, overlap).mul_(line(dora_rows->gain)));
    } else if (const auto* columns = std::get_if<DoraColumnsOp>(&op)) {
      part.mul_(Line(columns->keep, modality));
      part.add_(Product(columns->a, columns->b, overlap).mul_(Line(columns->gain, modality)), factor(columns->factors));
    }
  }
  return rows;
}

// Calls visit(first row within the term's range, V's rows, W' rows) over chunks of the term's range.
template <typename F>
void ForEachChunk(const BaseLinear& base, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale, int modality,
                  F&& visit) {
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const int64_t step = WidenedRows(base.in());
  for (int64_t done = 0; done < term.range.count; done += step) {
    const int64_t count = std::min(step, term.range.count - done);
    const at::Tensor patched = PatchedRows(base, before, modality, term.range.begin + done, count);
    const at::Tensor adapted = patched.add(Product(low_rank.a, low_rank.b, {0, done, count}), scale);
    visit(done, adapted, patched);
  }
}

// |V| of the rows [range.count] or of the columns [in], float32.
at::Tensor Norms(const BaseLinear& base, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale, int modality) {
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const bool by_rows = low_rank.magnitude_axis == MagnitudeAxis::kRows;
  // Column sums run over all rows: in float64, so that their order does not matter.
  at::Tensor squares = by_rows ? at::empty({term.range.count}, low_rank.magnitude.options())
                               : at::zeros({base.in()}, low_rank.magnitude.options().dtype(at::kDouble));
  ForEachChunk(base, before, term, scale, modality, [&](int64_t done, const at::Tensor& adapted, const at::Tensor&) {
    if (by_rows) {
      squares.narrow(0, done, adapted.size(0)).copy_(adapted.square().sum(1));
    } else {
      squares.add_(adapted.square().sum(0).to(at::kDouble));
    }
  });
  return squares.sqrt_().to(at::kFloat);
}

// m / |V|; 1 where the row or column is all zero or the adapter has none, so that nothing is divided by zero.
at::Tensor Gains(const ResidentLowRank& low_rank, const at::Tensor& norms) {
  at::Tensor gains = low_rank.magnitude.div(norms).nan_to_num_(1.0, 1.0, 1.0);
  if (low_rank.covered.defined()) gains = gains.mul(low_rank.covered).add_(low_rank.covered.neg().add_(1.0));
  return gains;
}

}  // namespace

SiteOp MakeDoraOp(const BaseLinear& base, absl::Span<const SiteOp> before, const ResidentTerm& term, double scale,
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
    const at::Tensor g = Gains(low_rank, Norms(base, before, term, scale, static_cast<int>(line)));
    keep.select(0, line).copy_(g.mul(s).add_(1.0 - s));
    // By rows the strength and the scale are in the gain; by columns they scale the narrow product instead.
    gain.select(0, line).copy_(by_rows ? g.mul(s * scale) : g);
  }
  if (by_rows) return DoraRowsOp{low_rank.a, low_rank.b, term.range, keep, gain};
  return DoraColumnsOp{low_rank.a, low_rank.b, term.range, factors, keep, gain};
}

double DoraSquaredNorm(const BaseLinear& base, const ResidentTerm& term, double scale) {
  const OwnerScope owner(Owner::kWorkspace);
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const at::Tensor gains = Gains(low_rank, Norms(base, {}, term, scale, 0));
  double sum = 0;
  ForEachChunk(base, {}, term, scale, 0, [&](int64_t done, const at::Tensor& adapted, const at::Tensor& patched) {
    const at::Tensor g = low_rank.magnitude_axis == MagnitudeAxis::kRows ? gains.narrow(0, done, adapted.size(0)).unsqueeze(1) : gains;
    sum += adapted.mul(g).sub_(patched).to(at::kDouble).square().sum().item<double>();
  });
  return sum;
}

}  // namespace h3
