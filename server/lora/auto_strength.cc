#include "server/lora/auto_strength.h"

#include <algorithm>
#include <cmath>

#include "server/lora/adapter_strength.h"

namespace h3 {
namespace {

constexpr double kNoEffect = 1e-8;

}  // namespace

std::map<int, double> AutoStrengthRatios(const ResidentModel& model, const ResidentAdapter& adapter, NormCache& cache,
                                         const std::vector<double>& scales, double floor, double ceiling) {
  std::map<int, double> rms;
  double sum = 0;
  int counted = 0;
  for (const auto& [site, norm] : DeltaNorms(model, adapter, cache, scales)) {
    rms[site] = std::sqrt(norm.square / static_cast<double>(norm.elements));
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
