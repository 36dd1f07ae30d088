#include "server/model/time_features.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "server/base/check.h"

namespace h3 {
namespace {

std::vector<float> Timesteps(const std::vector<ModulationPoint>& points) {
  std::vector<float> t;
  for (const ModulationPoint& point : points) t.push_back(point.t);
  return t;
}

// [cos | sin] of t * exp(-ln 10000 i / half), float32 on the CPU.
at::Tensor Sinusoid(const std::vector<float>& t, int64_t width) {
  at::Tensor out = at::zeros({static_cast<int64_t>(t.size()), width}, at::kFloat);
  const int64_t half = width / 2;
  float* row = out.data_ptr<float>();
  for (const float value : t) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = value * std::exp(-std::log(10000.0) * static_cast<double>(i) / static_cast<double>(half));
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
    }
    row += width;
  }
  return out;
}

// Calls `compute` (a function of [kTimestepBatch, in] rows and of their modalities) on padded batches of `rows`.
template <typename F>
at::Tensor InBatches(const at::Tensor& rows, F&& compute) {
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < rows.size(0); begin += kTimestepBatch) {
    const int64_t count = std::min(kTimestepBatch, rows.size(0) - begin);
    at::Tensor batch = at::zeros({kTimestepBatch, rows.size(1)}, rows.options());
    batch.narrow(0, 0, count).copy_(rows.narrow(0, begin, count));
    parts.push_back(compute(batch, begin, count).narrow(0, 0, count));
  }
  return at::cat(parts);
}

}  // namespace

at::Tensor LerpTable(const at::Tensor& table, const std::vector<float>& t) {
  const int64_t last = table.size(0) - 1;
  H3_CHECK(last >= 1);
  std::vector<int64_t> index;
  std::vector<float> fraction;
  for (const float value : t) {
    const double position = std::clamp(static_cast<double>(value), 0.0, 1.0) * static_cast<double>(last);
    const int64_t floor = std::min(static_cast<int64_t>(position), last - 1);
    index.push_back(floor);
    fraction.push_back(static_cast<float>(position - static_cast<double>(floor)));
  }
  const auto count = static_cast<int64_t>(t.size());
  const at::Tensor low = at::tensor(index, at::kLong).to(table.device());
  const at::Tensor weight = at::tensor(fraction, at::kFloat).view({count, 1}).to(table.device());
  return at::lerp(table.index_select(0, low).to(at::kFloat), table.index_select(0, low.add(1)).to(at::kFloat), weight);
}

at::Tensor TimeFeatures(const ResidentModel& model, const StackProgram& program, const std::vector<ModulationPoint>& points) {
  if (model.geometry().pruned()) return LerpTable(model.tensor("adaln_t_table"), Timesteps(points));
  const int in_site = model.SiteIndex("time_embedder.proj_in"), out_site = model.SiteIndex("time_embedder.proj_out");
  const BoundSite in(model.linear(in_site), program.sites[static_cast<size_t>(in_site)], at::kFloat);
  const BoundSite out(model.linear(out_site), program.sites[static_cast<size_t>(out_site)], at::kFloat);
  const at::Tensor sinusoid = Sinusoid(Timesteps(points), model.geometry().time_input).to(model.device());
  return InBatches(sinusoid, [&](const at::Tensor& batch, int64_t begin, int64_t count) {
    std::vector<int64_t> tags(static_cast<size_t>(kTimestepBatch), 0);
    for (int64_t i = 0; i < count; ++i) tags[static_cast<size_t>(i)] = points[static_cast<size_t>(begin + i)].modality;
    const RowModality rows{.tags = at::tensor(tags, at::kLong).to(model.device())};
    at::Tensor hidden = in.Apply(batch, rows);
    at::Tensor features = out.Apply(at::silu_(hidden), rows);
    return at::silu_(features);
  });
}

at::Tensor GridFeatures(const ResidentModel& model, const std::vector<ModulationPoint>& points) {
  H3_CHECK(model.silu_grid().has_value());
  const SiluGrid& grid = *model.silu_grid();
  if (grid.table.defined()) return LerpTable(grid.table, Timesteps(points));
  const at::Tensor sinusoid = Sinusoid(Timesteps(points), grid.in_weight.size(1)).to(model.device());
  return InBatches(sinusoid, [&](const at::Tensor& batch, int64_t, int64_t) {
    at::Tensor hidden = at::linear(batch, grid.in_weight, grid.in_bias);
    at::Tensor features = at::linear(at::silu_(hidden), grid.out_weight, grid.out_bias);
    return at::silu_(features);
  });
}

}  // namespace h3
