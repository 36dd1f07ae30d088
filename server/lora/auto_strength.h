// Levels the modules of one adapter: ratio = clamp(mean rms / rms, floor, ceiling), where rms is that of the scaled delta of a
// module (one target weight). Source: h3-format.md section 3.
#pragma once

#include <map>
#include <vector>

#include "server/lora/norm_cache.h"
#include "server/lora/resident_adapter.h"
#include "server/model/resident_model.h"

namespace h3 {

// The ratio of each site that the adapter touches. Sites whose delta has rms <= 1e-8 get 1 and do not count, and so do offsets
// and curves. `scales`: the scale of each term of the adapter, in order. Computes; never makes anything of a weight's size.
std::map<int, double> AutoStrengthRatios(const ResidentModel& model, const ResidentAdapter& adapter, NormCache& cache,
                                         const std::vector<double>& scales, double floor, double ceiling);

}  // namespace h3
