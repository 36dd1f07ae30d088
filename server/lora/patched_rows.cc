#include "server/lora/patched_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "server/base/tiling.h"

namespace h3 {
namespace {

at::Tensor Product(const at::Tensor& a, const at::Tensor& b, const SharedRows& rows) {
  return at::mm(b.narrow(0, rows.in_second, rows.count).to(at::kFloat), a.to(at::kFloat));
}

// Rows of kron(w1, w2) in the order of the site.
at::Tensor KroneckerRows(const KroneckerOp& op, const SharedRows& rows) {
  const int64_t o2 = op.w2.size(0), total = op.w1.size(0) * o2;
  const at::TensorOptions index = op.w1.options().dtype(at::kLong);
  at::Tensor row = op.row_order.defined() ? op.row_order.narrow(0, rows.in_second, rows.count)
                                          : at::arange(rows.in_second, rows.in_second + rows.count, index);
  const at::Tensor present = row.lt(total).to(at::kFloat).unsqueeze(1);
  row = row.clamp_max(total - 1);
  const at::Tensor left = op.w1.to(at::kFloat).index_select(0, row.div(o2, "floor")).unsqueeze(2);
  const at::Tensor right = op.w2.to(at::kFloat).index_select(0, row.remainder(o2)).unsqueeze(1);
  return left.mul(right).reshape({rows.count, -1}).mul_(present);
}

at::Tensor Line(const at::Tensor& table, int modality) { return table.select(0, table.size(0) == 1 ? 0 : modality); }

}  // namespace

SharedRows Share(const OutRange& first, const OutRange& second) {
  const int64_t from = std::max(first.begin, second.begin);
  const int64_t to = std::min(first.begin + first.count, second.begin + second.count);
  return {from - first.begin, from - second.begin, std::max<int64_t>(0, to - from)};
}

int64_t ChunkRows(const BaseLinear& base) { return std::min(WidenedRows(base.in()), (base.out() + 4) / 5); }

at::Tensor PatchedRows(const BaseLinear& base, absl::Span<const SiteOp> ops, int modality, int64_t begin, int64_t count) {
  at::Tensor rows = base.Rows(begin, count).clone();
  const auto factor = [&](const Factors& factors) { return factors.of[static_cast<size_t>(modality)]; };
  for (const SiteOp& op : ops) {
    const SharedRows shared = Share({begin, count}, std::visit([](const auto& o) { return o.range; }, op));
    if (shared.count == 0) continue;
    at::Tensor part = rows.narrow(0, shared.in_first, shared.count);
    if (const auto* low_rank = std::get_if<LowRankOp>(&op)) {
      part.add_(Product(low_rank->a, low_rank->b, shared), factor(low_rank->factors));
    } else if (const auto* kronecker = std::get_if<KroneckerOp>(&op)) {
      part.add_(KroneckerRows(*kronecker, shared), factor(kronecker->factors));
    } else if (const auto* difference = std::get_if<DifferenceOp>(&op)) {
      part.add_(difference->difference.narrow(0, shared.in_second, shared.count).to(at::kFloat), factor(difference->factors));
    } else if (const auto* dora_rows = std::get_if<DoraRowsOp>(&op)) {
      const auto line = [&](const at::Tensor& table) {
        return Line(table, modality).narrow(0, shared.in_second, shared.count).unsqueeze(1);
      };
      part.mul_(line(dora_rows->keep)).add_(Product(dora_rows->a, dora_rows->b, shared).mul_(line(dora_rows->gain)));
    } else if (const auto* columns = std::get_if<DoraColumnsOp>(&op)) {
      part.mul_(Line(columns->keep, modality));
      part.add_(Product(columns->a, columns->b, shared).mul_(Line(columns->gain, modality)), factor(columns->factors));
    }
  }
  return rows;
}

}  // namespace h3
