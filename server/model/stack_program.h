// What a whole stack does, at every place of the model, with the effective factors of one evaluation. Built by the lora layer,
// read by the forward; const while it runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "server/nn/site.h"

namespace h3 {

// A complete pruned adapter's modulation, evaluated on its own table: m += f (m_curve - m_base).
struct CurveOp {
  at::Tensor table;                 // float32 [rows, width]
  std::vector<at::Tensor> weights;  // Blocks, then the final layer: [18 or 2 hidden, width]
  std::vector<at::Tensor> biases;
  Factors factors;
};

// AdaLN terms that are applied to features of their own, by site.
struct FeatureProgram {
  at::Tensor table;  // float32 [rows, width] over t; undefined: the model's silu grid.
  std::map<int, SiteProgram> sites;
};

struct StackProgram {
  std::vector<SiteProgram> sites;  // By index into Sites(geometry).
  // AdaLN terms that are not applied to the base's own features.
  std::vector<FeatureProgram> features;
  // Added to norm weights, float32 [1 or 3 (by modality), n], by canonical tensor name.
  std::map<std::string, at::Tensor> norms;
  std::vector<CurveOp> curves;

  explicit StackProgram(size_t site_count) : sites(site_count) {}
};

}  // namespace h3
