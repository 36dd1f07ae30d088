#include "server/lora/adapter_strength.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "server/lora/dora.h"
#include "server/lora/patched_rows.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// |B A|_F^2 = sum((B^T B) * (A A^T)): two products of rank x rank, in float64, some rows at a time (a rank may be absurd).
double SquaredNorm(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kRows = 512;
  const at::Tensor wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
  double sum = 0;
  for (int64_t begin = 0; begin < a.size(0); begin += kRows) {
    const int64_t count = std::min(kRows, a.size(0) - begin);
    sum += at::mm(wide_b.narrow(1, begin, count).t(), wide_b).mul_(at::mm(wide_a.narrow(0, begin, count), wide_a.t())).sum().item<double>();
  }
  return sum;
}

double SquaredNorm(const at::Tensor& x) { return x.to(at::kDouble).square_().sum().item<double>(); }

}  // namespace

std::map<int, DeltaNorm> DeltaNorms(const ResidentModel& model, const ResidentAdapter& adapter, NormCache& cache,
                                    const std::vector<double>& scales) {
  const OwnerScope owner(Owner::kWorkspace);
  std::map<int, DeltaNorm> norms;
  for (size_t i = 0; i < adapter.terms.size(); ++i) {
    const ResidentTerm& term = adapter.terms[i];
    const BaseLinear& base = model.linear(term.site);
    const double scale = scales[i] * scales[i];
    double square = 0;
    int64_t width = base.in();
    if (const auto* low_rank = std::get_if<ResidentLowRank>(&term.what)) {
      width = low_rank->a.size(1);
      square = low_rank->magnitude_axis == MagnitudeAxis::kNone ? SquaredNorm(low_rank->a, low_rank->b) * scale
                                                                : DoraSquaredNorm(base, cache, term, scales[i]);
    } else if (const auto* kronecker = std::get_if<ResidentKronecker>(&term.what)) {
      width = kronecker->w1.size(1) * kronecker->w2.size(1);
      square = SquaredNorm(kronecker->w1) * SquaredNorm(kronecker->w2) * scale;
    } else if (const auto* difference = std::get_if<ResidentDifference>(&term.what)) {
      square = SquaredNorm(difference->difference) * scale;
    } else {
      continue;
    }
    DeltaNorm& norm = norms[term.site];
    norm.square += square;
    norm.elements = base.out() * width;
    norm.on_base = term.features == AdalnFeatures::kBase;
  }
  return norms;
}

double SquaredNorm(const BaseLinear& base) {
  const OwnerScope owner(Owner::kWorkspace);
  const int64_t step = ChunkRows(base);
  double sum = 0;
  for (int64_t begin = 0; begin < base.out(); begin += step) {
    sum += SquaredNorm(base.Rows(begin, std::min(step, base.out() - begin)));
  }
  return sum;
}

}  // namespace h3
