// How much an adapter changes the weights that it is applied to.
#pragma once

#include <map>
#include <vector>

#include "server/lora/norm_cache.h"
#include "server/lora/resident_adapter.h"
#include "server/model/resident_model.h"

namespace h3 {

// The scaled delta of one module, which is one target weight.
struct DeltaNorm {
  double square = 0;     // Sum of squares over all elements, at strength 1.
  int64_t elements = 0;
  bool on_base = true;   // Of the base's own weight; false: of features that the weight is not applied to (AdaLN through a grid).
};

// By site. Offsets and curves are no deltas of a weight and are left out. `scales`: of each term of the adapter, in order. Low-rank
// norms come from rank x rank products; nothing of a weight's size is made.
std::map<int, DeltaNorm> DeltaNorms(const ResidentModel& model, const ResidentAdapter& adapter, NormCache& cache,
                                    const std::vector<double>& scales);

// Sum of squares of a base weight. Reads all of it.
double SquaredNorm(const BaseLinear& base);

}  // namespace h3
