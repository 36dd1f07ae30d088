#include "server/lora/auto_strength.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>

#include "server/lora/dora.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

constexpr double kNoEffect = 1e-8;

// |B A|_F^2 = sum((B^T B) * (A A^T)): two products of rank x rank, in float64.
double SquaredNorm(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
  return at::mm(wide_b.t(), wide_b).mul_(at::mm(wide_a, wide_a.t())).sum().item<double>();
}

double SquaredNorm(const at::Tensor& x) { return x.to(at::kDouble).square().sum().item<double>(); }

}  // namespace

std::map<int, double> AutoStrengthRatios(const ResidentModel& model, const ResidentAdapter& adapter,
                                         const std::vector<double>& scales, double floor, double ceiling) {
  const OwnerScope owner(Owner::kWorkspace);
  std::map<int, double> squares;  // Of each site's scaled delta.
  for (size_t i = 0; i < adapter.terms.size(); ++i) {
    const ResidentTerm& term = adapter.terms[i];
    const auto* low_rank = std::get_if<ResidentLowRank>(&term.what);
    double square = 0;
    if (low_rank != nullptr && low_rank->magnitude_axis != MagnitudeAxis::kNone) {
      square = DoraSquaredNorm(model.linear(term.site), term, scales[i]);
    } else if (low_rank != nullptr) {
      square = SquaredNorm(low_rank->a, low_rank->b) * scales[i] * scales[i];
    } else if (const auto* kronecker = std::get_if<ResidentKronecker>(&term.what)) {
      square = SquaredNorm(kronecker->w1) * SquaredNorm(kronecker->w2) * scales[i] * scales[i];
    } else {
      continue;
    }
    squares[term.site] += square;
  }
  std::map<int, double> rms;
  double sum = 0;
  int counted = 0;
  for (const auto& [site, square] : squares) {
    const Site& s = model.sites()[static_cast<size_t>(site)];
    rms[site] = std::sqrt(square / static_cast<double>(s.out * s.in));
    if (rms[site] <= kNoEffect) continue;
    sum += rms[site];
    ++counted;
  }
  std::map<int, double> ratios;
  for (const auto& [site, value] : rms) {
    ratios[site] = value <= kNoEffect ? 1.0 : std::clamp(sum / counted / value, floor, ceiling);
  }
  return ratios;
}

}  // namespace h3
