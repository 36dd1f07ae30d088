#include "server/nn/site.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <type_traits>

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

// The part of an operation (not an offset) that concerns the output rows of `within`; nullopt: none.
std::optional<SiteOp> Narrow(const SiteOp& op, OutRange within) {
  return std::visit(
      [&](auto narrowed) -> std::optional<SiteOp> {
        const int64_t begin = std::max(within.begin, narrowed.range.begin);
        const int64_t count = std::min(within.begin + within.count, narrowed.range.begin + narrowed.range.count) - begin;
        if (count <= 0) return std::nullopt;
        const int64_t offset = begin - narrowed.range.begin;
        narrowed.range = {begin, count};
        if constexpr (requires { narrowed.b; }) narrowed.b = narrowed.b.narrow(0, offset, count);
        if constexpr (std::is_same_v<decltype(narrowed), DoraRowsOp>) {
          narrowed.keep = narrowed.keep.narrow(1, offset, count);
          narrowed.gain = narrowed.gain.narrow(1, offset, count);
        }
        if constexpr (std::is_same_v<decltype(narrowed), KroneckerOp>) {
          narrowed.row_order = narrowed.row_order.defined()
                                   ? narrowed.row_order.narrow(0, offset, count)
                                   : at::arange(offset, offset + count, narrowed.w1.options().dtype(at::kLong));
        }
        return narrowed;
      },
      op);
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
    : merged_(program.merged), base_(merged_ != nullptr ? *merged_ : base), compute_(compute) {
  const OwnerScope owner(Owner::kWorkspace);
  std::set<int64_t> borders = {0, base_.out()};
  std::vector<const SiteOp*> ops;
  for (const SiteOp& op : program.ops) {
    if (const auto* offset = std::get_if<OffsetOp>(&op)) {
      offsets_.push_back(offset);
      continue;
    }
    H3_CHECK(!std::holds_alternative<DifferenceOp>(op));
    ops.push_back(&op);
    if (const auto* columns = std::get_if<DoraColumnsOp>(&op)) {
      borders.insert({columns->range.begin, columns->range.begin + columns->range.count});
    }
  }
  for (auto border = borders.begin(); std::next(border) != borders.end(); ++border) {
    const OutRange range{*border, *std::next(border) - *border};
    if (range.count == base_.out()) {
      segments_.push_back(MakeSegment(range, ops));
      break;
    }
    std::vector<const SiteOp*> within;
    for (const SiteOp* op : ops) {
      std::optional<SiteOp> narrowed = Narrow(*op, range);
      if (narrowed.has_value()) within.push_back(&narrowed_.emplace_back(*std::move(narrowed)));
    }
    segments_.push_back(MakeSegment(range, within));
  }
}

BoundSite::Segment BoundSite::MakeSegment(OutRange range, const std::vector<const SiteOp*>& ops) const {
  Segment segment{.range = range};
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
      segment.steps.push_back(std::move(step));
    }
    step = Step();
  };
  for (const SiteOp* op : ops) {
    if (const auto* low_rank = std::get_if<LowRankOp>(op)) {
      const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.range == low_rank->range; });
      if (same == groups.end()) {
        groups.push_back({low_rank->range, {low_rank}});
      } else {
        same->ops.push_back(low_rank);
      }
    } else if (const auto* kronecker = std::get_if<KroneckerOp>(op)) {
      step.kroneckers.push_back(kronecker);
    } else {
      close_step();
      step.dora_rows = std::get_if<DoraRowsOp>(op);
      step.dora_columns = std::get_if<DoraColumnsOp>(op);
      close_step();
    }
  }
  close_step();
  return segment;
}

at::Tensor BoundSite::Apply(const at::Tensor& x, const RowModality& rows) const {
  at::Tensor y = at::empty({x.size(0), base_.out()}, x.options());
  Apply(x, rows, y);
  return y;
}

std::vector<at::Tensor> BoundSite::Inputs(const Segment& segment, const at::Tensor& x, const RowModality& rows) const {
  H3_CHECK(x.scalar_type() == compute_);
  const std::vector<Step>& steps = segment.steps;
  std::vector<at::Tensor> inputs(steps.size() + 1);
  at::Tensor seen = x;
  for (size_t i = steps.size(); i-- > 0;) {
    inputs[i] = seen;
    if (steps[i].dora_columns != nullptr) seen = seen.mul(ByRow(steps[i].dora_columns->keep, rows)).to(compute_);
  }
  inputs.back() = seen;
  return inputs;
}

void BoundSite::Apply(const at::Tensor& x, const RowModality& rows, at::Tensor& y) const {
  const OwnerScope owner(Owner::kWorkspace);
  for (const Segment& segment : segments_) {
    const std::vector<at::Tensor> inputs = Inputs(segment, x, rows);
    at::Tensor part = y.narrow(1, segment.range.begin, segment.range.count);
    base_.Multiply(inputs.back(), segment.range.begin, segment.range.count, part);
    for (size_t i = 0; i < segment.steps.size(); ++i) ApplyStep(segment.steps[i], inputs[i], rows, y);
  }
  AddOffsets(rows, y);
  if (base_.bias().defined()) y.add_(base_.bias());
}

at::Tensor BoundSite::BaseInput(const at::Tensor& x, const RowModality& rows) const {
  H3_CHECK(segments_.size() == 1);
  const OwnerScope owner(Owner::kWorkspace);
  return Inputs(segments_.front(), x, rows).back();
}

void BoundSite::AddTerms(const at::Tensor& x, const RowModality& rows, at::Tensor& y) const {
  H3_CHECK(segments_.size() == 1);
  const OwnerScope owner(Owner::kWorkspace);
  const Segment& segment = segments_.front();
  const std::vector<at::Tensor> inputs = Inputs(segment, x, rows);
  for (size_t i = 0; i < segment.steps.size(); ++i) ApplyStep(segment.steps[i], inputs[i], rows, y);
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
      const int64_t product_rows = op->w1.size(0) * op->w2.size(0);
      if (product_rows < base_.out()) delta = at::constant_pad_nd(delta, {0, 1});  // The zero row that row_order may name.
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
