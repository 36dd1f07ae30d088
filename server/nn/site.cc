#include "server/nn/site.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>

#include "server/base/check.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// [rows or 1, columns]: the line of `table` [1 or 3, columns] that each row takes.
at::Tensor ByRow(const at::Tensor& table, const RowModality& rows) {
  if (table.size(0) == 1) return table;
  return rows.tags.defined() ? table.index_select(0, rows.tags) : table.narrow(0, rows.uniform, 1);
}

at::Tensor FactorTable(const Factors& factors, const at::TensorOptions& options) {
  return at::tensor(at::ArrayRef<float>(factors.of), at::kFloat).view({kModalities, 1}).to(options.device());
}

// The factor that all rows share, or nullopt.
std::optional<float> SharedFactor(const Factors& factors, const RowModality& rows) {
  if (factors.uniform()) return factors.of[0];
  if (!rows.tags.defined()) return factors.of[static_cast<size_t>(rows.uniform)];
  return std::nullopt;
}

// y += f * delta, row by row where the factor follows the modality. Destroys delta.
void AddScaled(at::Tensor& y, at::Tensor delta, const Factors& factors, const RowModality& rows) {
  if (const auto shared = SharedFactor(factors, rows); shared.has_value()) {
    y.add_(delta, *shared);
  } else {
    y.add_(delta.mul_(ByRow(FactorTable(factors, y.options()), rows)));
  }
}

}  // namespace

BoundSite::BoundSite(const BaseLinear& base, const SiteProgram& program, c10::ScalarType compute)
    : base_(base), compute_(compute) {
  const OwnerScope owner(Owner::kWorkspace);
  struct Group {
    OutRange range;
    std::vector<const LowRankOp*> ops;
  };
  std::vector<Group> groups;
  Step step;
  const auto close_step = [&] {
    for (const Group& group : groups) {
      Pair pair{.range = group.range};
      if (group.ops.size() == 1 && group.ops.front()->factors.uniform()) {
        pair.a = group.ops.front()->a.to(compute_);
        pair.b = group.ops.front()->b.to(compute_);
        pair.factor = group.ops.front()->factors.of[0];
      } else {
        std::vector<at::Tensor> a, b, columns;
        bool uniform = true;
        for (const LowRankOp* op : group.ops) {
          uniform = uniform && op->factors.uniform();
          a.push_back(op->a.to(compute_));
          b.push_back(op->b.to(compute_));
          columns.push_back(FactorTable(op->factors, op->a.options()).expand({kModalities, op->a.size(0)}));
        }
        pair.a = a.size() == 1 ? a.front() : at::cat(a);
        pair.b = b.size() == 1 ? b.front() : at::cat(b, 1);
        pair.columns = at::cat(columns, 1);
        if (uniform) pair.columns = pair.columns.narrow(0, 0, 1);
      }
      step.pairs.push_back(std::move(pair));
    }
    groups.clear();
    if (!step.pairs.empty() || !step.kroneckers.empty() || step.dora_rows || step.dora_columns) {
      steps_.push_back(std::move(step));
    }
    step = Step();
  };
  for (const SiteOp& op : program.ops) {
    if (const auto* low_rank = std::get_if<LowRankOp>(&op)) {
      const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.range == low_rank->range; });
      if (same == groups.end()) {
        groups.push_back({low_rank->range, {low_rank}});
      } else {
        same->ops.push_back(low_rank);
      }
    } else if (const auto* kronecker = std::get_if<KroneckerOp>(&op)) {
      step.kroneckers.push_back(kronecker);
    } else if (const auto* offset = std::get_if<OffsetOp>(&op)) {
      offsets_.push_back(offset);
    } else {
      close_step();
      step.dora_rows = std::get_if<DoraRowsOp>(&op);
      step.dora_columns = std::get_if<DoraColumnsOp>(&op);
      close_step();
    }
  }
  close_step();
}

at::Tensor BoundSite::Apply(const at::Tensor& x, const RowModality& rows) const {
  at::Tensor y = at::empty({x.size(0), base_.out()}, x.options());
  Apply(x, rows, y);
  return y;
}

std::vector<at::Tensor> BoundSite::Inputs(const at::Tensor& x, const RowModality& rows) const {
  H3_CHECK(x.scalar_type() == compute_);
  std::vector<at::Tensor> inputs(steps_.size() + 1);
  at::Tensor seen = x;
  for (size_t i = steps_.size(); i-- > 0;) {
    inputs[i] = seen;
    if (steps_[i].dora_columns != nullptr) seen = seen.mul(ByRow(steps_[i].dora_columns->keep, rows)).to(compute_);
  }
  inputs.back() = seen;
  return inputs;
}

void BoundSite::Apply(const at::Tensor& x, const RowModality& rows, at::Tensor& y) const {
  const OwnerScope owner(Owner::kWorkspace);
  const std::vector<at::Tensor> inputs = Inputs(x, rows);
  base_.Multiply(inputs.back(), y);
  for (size_t i = 0; i < steps_.size(); ++i) ApplyStep(steps_[i], inputs[i], rows, y);
  AddOffsets(rows, y);
  if (base_.bias().defined()) y.add_(base_.bias());
}

at::Tensor BoundSite::BaseInput(const at::Tensor& x, const RowModality& rows) const {
  const OwnerScope owner(Owner::kWorkspace);
  return Inputs(x, rows).back();
}

void BoundSite::AddTerms(const at::Tensor& x, const RowModality& rows, at::Tensor& y) const {
  const OwnerScope owner(Owner::kWorkspace);
  const std::vector<at::Tensor> inputs = Inputs(x, rows);
  for (size_t i = 0; i < steps_.size(); ++i) ApplyStep(steps_[i], inputs[i], rows, y);
  AddOffsets(rows, y);
}

void BoundSite::AddOffsets(const RowModality& rows, at::Tensor& y) const {
  for (const OffsetOp* op : offsets_) {
    at::Tensor part = y.narrow(1, op->range.begin, op->range.count);
    const at::Tensor offset = op->offset.to(at::kFloat).view({1, op->range.count});
    part.add_(ByRow(FactorTable(op->factors, y.options()).mul(offset), rows));
  }
}

void BoundSite::ApplyStep(const Step& step, const at::Tensor& x, const RowModality& rows, at::Tensor& y) const {
  for (const Pair& pair : step.pairs) {
    at::Tensor narrow = at::mm(x, pair.a.t());  // [rows, sum of ranks]
    at::Tensor part = y.narrow(1, pair.range.begin, pair.range.count);
    if (pair.columns.defined()) narrow.mul_(ByRow(pair.columns, rows));
    part.addmm_(narrow, pair.b.t(), 1, pair.factor);
  }
  for (const KroneckerOp* op : step.kroneckers) {
    const int64_t i1 = op->w1.size(1), i2 = op->w2.size(1);
    // [rows, i1, i2] w2^T -> [rows, i1, o2]; w1 over the middle axis -> [rows, o1, o2].
    const at::Tensor inner = at::matmul(x.reshape({x.size(0), i1, i2}), op->w2.to(compute_).t());
    at::Tensor delta = at::matmul(op->w1.to(compute_), inner).reshape({x.size(0), -1});
    if (op->row_order.defined()) {
      if (delta.size(1) < op->range.count) delta = at::constant_pad_nd(delta, {0, 1});  // The zero row.
      delta = delta.index_select(1, op->row_order);
    }
    at::Tensor part = y.narrow(1, op->range.begin, op->range.count);
    AddScaled(part, std::move(delta), op->factors, rows);
  }
  if (const DoraRowsOp* op = step.dora_rows) {
    at::Tensor part = y.narrow(1, op->range.begin, op->range.count);
    part.mul_(ByRow(op->keep, rows));
    const at::Tensor narrow = at::mm(x, op->a.to(compute_).t());
    if (op->gain.size(0) == 1) {
      part.addmm_(narrow, op->b.to(at::kFloat).mul(op->gain.t()).to(compute_).t());
    } else {
      part.add_(at::mm(narrow, op->b.to(compute_).t()).mul(ByRow(op->gain, rows)));
    }
  }
  if (const DoraColumnsOp* op = step.dora_columns) {
    at::Tensor narrow = at::mm(x.mul(ByRow(op->gain, rows)).to(compute_), op->a.to(compute_).t());
    at::Tensor part = y.narrow(1, op->range.begin, op->range.count);
    float factor = 1;
    if (const auto shared = SharedFactor(op->factors, rows); shared.has_value()) {
      factor = *shared;
    } else {
      narrow.mul_(ByRow(FactorTable(op->factors, x.options()), rows));
    }
    part.addmm_(narrow, op->b.to(compute_).t(), 1, factor);
  }
}

}  // namespace h3
