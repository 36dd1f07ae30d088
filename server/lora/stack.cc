#include "server/lora/stack.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/lora/auto_strength.h"
#include "server/lora/dora.h"

namespace h3 {
namespace {

bool IsTextSite(absl::string_view name) {
  return absl::StartsWith(name, "condition_proj") || absl::StartsWith(name, "token_refiner.");
}

double ScaleOf(const ResidentTerm& term, const std::optional<double>& alpha) {
  if (!alpha.has_value() || term.rank == 0) return term.scale;
  const double rank = static_cast<double>(term.rank);
  return *alpha / (term.root_rank ? std::sqrt(rank) : rank);
}

// One line for each (kind, rank, alpha, source) that occurs.
std::vector<EffectiveScale> SummariseScales(const ResidentModel& model, const ResidentAdapter& adapter,
                                            const std::optional<double>& alpha) {
  std::map<std::tuple<std::string, int64_t, double, double, std::string>, int64_t> lines;
  for (const ResidentTerm& term : adapter.terms) {
    const bool overridden = alpha.has_value() && term.rank > 0;
    ++lines[{std::string(SiteKindName(model.sites()[static_cast<size_t>(term.site)].kind)), term.rank,
             overridden ? *alpha : term.alpha, ScaleOf(term, alpha), overridden ? "request" : term.scale_source}];
  }
  std::vector<EffectiveScale> scales;
  for (const auto& [key, modules] : lines) {
    const auto& [kind, rank, line_alpha, scale, source] = key;
    scales.push_back({kind, modules, rank, line_alpha, scale, source});
  }
  return scales;
}

// [3, n]: the difference as each modality's rows take it.
at::Tensor NormLines(const at::Tensor& offset, const Factors& factors) {
  const at::Tensor by_modality = at::tensor(at::ArrayRef<float>(factors.of), at::kFloat).view({kModalities, 1});
  return by_modality.to(offset.device()).mul(offset.view({1, -1}));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Stack>> Stack::Build(const ResidentModel& model, AdapterStore& store,
                                                    absl::Span<const StackEntry> entries) {
  H3_RETURN_IF_ERROR(CheckStack(entries, 0));
  auto stack = absl::WrapUnique(new Stack(model));
  for (size_t i = 0; i < entries.size(); ++i) {
    const StackEntry& entry = entries[i];
    if (entry.apply == Apply::kMaterialized) {
      return RefuseArgument(reason::kBadRequest, absl::StrCat("stack[", i, "] (", entry.adapter, "): apply=materialized is not served; apply=bypass is exact"),
                            {{"field", absl::StrCat("stack[", i, "].apply")}});
    }
    const auto adapter = store.Acquire(entry.adapter, entry.digest, entry.leave_out);
    if (!adapter.ok()) return WithDetail(adapter.status(), "field", absl::StrCat("stack[", i, "]"));
    Member member{.entry = entry, .adapter = *adapter};
    for (const ResidentTerm& term : (*adapter)->terms) {
      member.scales.push_back(ScaleOf(term, entry.alpha));
      member.touches_text |= IsTextSite(model.sites()[static_cast<size_t>(term.site)].name);
    }
    for (const ResidentNormOffset& norm : (*adapter)->norm_offsets) member.touches_text |= IsTextSite(norm.tensor);
    if (entry.auto_strength.has_value()) {
      const std::map<int, double> ratios = AutoStrengthRatios(model, **adapter, member.scales, entry.auto_strength->floor,
                                                              entry.auto_strength->ceiling);
      for (size_t t = 0; t < member.scales.size(); ++t) {
        const ResidentTerm& term = (*adapter)->terms[t];
        if (!std::holds_alternative<ResidentOffset>(term.what)) member.scales[t] *= ratios.at(term.site);
      }
    }
    std::set<int> modules;
    for (const ResidentTerm& term : (*adapter)->terms) modules.insert(term.site);
    stack->resolved_.push_back({.adapter = entry.adapter,
                                .digest = (*adapter)->digest,
                                .strength = entry.strength,
                                .scales = SummariseScales(model, **adapter, entry.alpha),
                                .bytes = (*adapter)->bytes,
                                .modules = static_cast<int64_t>(modules.size()),
                                .left_out = (*adapter)->left_out,
                                .warnings = (*adapter)->warnings});
    stack->members_.push_back(std::move(member));
  }
  return stack;
}

std::vector<double> Stack::EvaluationFactors(int64_t evaluation, absl::Span<const double> factors) const {
  std::vector<double> result;
  for (size_t i = 0; i < members_.size(); ++i) {
    const std::vector<double>& per_evaluation = members_[i].entry.per_evaluation;
    double factor = 1;
    if (!factors.empty()) {
      factor = factors[i];
    } else if (!per_evaluation.empty()) {
      factor = per_evaluation[std::min(static_cast<size_t>(evaluation), per_evaluation.size() - 1)];
    }
    result.push_back(members_[i].entry.strength * factor);
  }
  return result;
}

const StackProgram& Stack::Program(int64_t evaluation, absl::Span<const double> factors) {
  const std::vector<double> key = EvaluationFactors(evaluation, factors);
  std::unique_ptr<StackProgram>& program = programs_[key];
  if (program == nullptr) program = MakeProgram(key);
  return *program;
}

Stack::TextKey Stack::TextKeyOf(int64_t evaluation, absl::Span<const double> factors) const {
  TextKey key = EvaluationFactors(evaluation, factors);
  for (size_t i = 0; i < key.size(); ++i) {
    if (!members_[i].touches_text) key[i] = 0;
  }
  return key;
}

std::unique_ptr<StackProgram> Stack::MakeProgram(const std::vector<double>& factors) const {
  auto program = std::make_unique<StackProgram>(model_.sites().size());
  for (size_t m = 0; m < members_.size(); ++m) {
    const Member& member = members_[m];
    const auto scaled = [&](double scale) {
      const StackEntry& e = member.entry;
      Factors f;
      f.of = {static_cast<float>(factors[m] * scale * e.video), static_cast<float>(factors[m] * scale * e.text),
              static_cast<float>(factors[m] * scale * e.audio)};
      return f;
    };
    for (size_t t = 0; t < member.adapter->terms.size(); ++t) {
      const ResidentTerm& term = member.adapter->terms[t];
      const Factors f = scaled(member.scales[t]);
      if (f.zero()) continue;
      SiteProgram& site = term.through_grid ? program->grid_sites[term.site] : program->sites[static_cast<size_t>(term.site)];
      const auto* low_rank = std::get_if<ResidentLowRank>(&term.what);
      if (low_rank != nullptr && low_rank->magnitude_axis != MagnitudeAxis::kNone) {
        const StackEntry& e = member.entry;
        site.ops.push_back(MakeDoraOp(model_.linear(term.site), site.ops, term, member.scales[t],
                                      {factors[m] * e.video, factors[m] * e.text, factors[m] * e.audio}));
      } else if (low_rank != nullptr) {
        site.ops.push_back(LowRankOp{low_rank->a, low_rank->b, term.range, f});
      } else if (const auto* kronecker = std::get_if<ResidentKronecker>(&term.what)) {
        site.ops.push_back(KroneckerOp{kronecker->w1, kronecker->w2, kronecker->row_order, term.range, f});
      } else {
        site.ops.push_back(OffsetOp{std::get<ResidentOffset>(term.what).offset, term.range, f});
      }
    }
    const Factors plain = scaled(1);
    if (plain.zero()) continue;
    for (const ResidentNormOffset& norm : member.adapter->norm_offsets) {
      const at::Tensor lines = NormLines(norm.offset, plain);
      at::Tensor& sum = program->norms[norm.tensor];
      sum = sum.defined() ? sum.add(lines) : lines;
    }
    for (const ResidentCurve& curve : member.adapter->curves) {
      program->curves.push_back({curve.table, curve.weights, curve.biases, plain});
    }
  }
  return program;
}

ByteCount Stack::MergedBytes() const {
  std::vector<const ResidentAdapter*> adapters;
  for (const Member& member : members_) adapters.push_back(member.adapter.get());
  return h3::MergedBytes(model_, adapters);
}

}  // namespace h3
