#include "server/lora/stack.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/lora/auto_strength.h"
#include "server/lora/dora.h"

namespace h3 {
namespace {

bool IsDora(const ResidentTerm& term) {
  const auto* low_rank = std::get_if<ResidentLowRank>(&term.what);
  return low_rank != nullptr && low_rank->magnitude_axis != MagnitudeAxis::kNone;
}

// Terms that are part of a weight, and so of a merged copy. The others are vectors, or functions of t that the base's own weight
// does not express: they are applied at run time even under apply=materialized.
bool IsMergeable(const ResidentTerm& term) {
  return term.features == AdalnFeatures::kBase && !std::holds_alternative<ResidentOffset>(term.what);
}

// [3, n]: the difference as each modality's rows take it.
at::Tensor NormLines(const at::Tensor& offset, const Factors& factors) {
  const at::Tensor by_modality = at::tensor(at::ArrayRef<float>(factors.of), at::kFloat).view({kModalities, 1});
  return by_modality.to(offset.device()).mul(offset.view({1, -1}));
}

// Where a term's operation belongs: the site itself, or the features of its own that it is applied to.
SiteProgram& ProgramOf(StackProgram& program, const ResidentAdapter& adapter, const ResidentTerm& term) {
  if (term.features == AdalnFeatures::kBase) return program.sites[static_cast<size_t>(term.site)];
  const at::Tensor table = term.features == AdalnFeatures::kOwnTable ? adapter.own_table : at::Tensor();
  for (FeatureProgram& features : program.features) {
    if (features.table.is_same(table)) return features.sites[term.site];
  }
  return program.features.emplace_back(FeatureProgram{.table = table}).sites[term.site];
}

}  // namespace

std::optional<double> AlphaOf(const StackEntry& entry) { return entry.alpha.has_value() ? entry.alpha : entry.settings.alpha; }

double ScaleOf(const ResidentTerm& term, const std::optional<double>& alpha) {
  if (!alpha.has_value() || term.rank == 0) return term.scale;
  const double rank = static_cast<double>(term.rank);
  return *alpha / (term.root_rank ? std::sqrt(rank) : rank);
}

ResolvedAdapter Resolve(const ResidentModel& model, const ResidentAdapter& adapter, const StackEntry& entry) {
  std::vector<TermScale> scales;
  std::set<int> modules;
  const std::optional<double> alpha = AlphaOf(entry);
  for (const ResidentTerm& term : adapter.terms) {
    const bool overridden = alpha.has_value() && term.rank > 0;
    scales.push_back({model.sites()[static_cast<size_t>(term.site)].kind, term.rank, overridden ? *alpha : term.alpha, ScaleOf(term, alpha),
                      !overridden ? term.scale_source : entry.alpha.has_value() ? "request" : "adapter settings"});
    modules.insert(term.site);
  }
  return {.adapter = entry.adapter,
          .digest = adapter.digest,
          .strength = entry.strength,
          .scales = SummariseScales(scales),
          .bytes = adapter.bytes,
          .modules = static_cast<int64_t>(modules.size()),
          .left_out = adapter.left_out,
          .warnings = adapter.warnings,
          .video = entry.video,
          .text = entry.text,
          .audio = entry.audio,
          .per_evaluation = entry.per_evaluation,
          .apply = entry.apply};
}

absl::StatusOr<std::unique_ptr<Stack>> Stack::Build(const ResidentModel& model, AdapterStore& store,
                                                    absl::Span<const StackEntry> entries, const Admit& admit) {
  H3_RETURN_IF_ERROR(CheckStack(entries, 0));
  auto stack = absl::WrapUnique(new Stack(model, store));
  for (size_t i = 0; i < entries.size(); ++i) {
    auto adapter = stack->Read(entries[i]);
    if (!adapter.ok()) return WithDetail(adapter.status(), "field", absl::StrCat("stack[", i, "]"));
    stack->members_.push_back({.entry = entries[i], .adapter = *std::move(adapter)});
  }
  if (admit) H3_RETURN_IF_ERROR(admit(*stack));
  for (Member& member : stack->members_) stack->Resolve(member);
  H3_RETURN_IF_ERROR(stack->PlanMerges());
  // Nothing of a stack that is refused stays.
  for (const Member& member : stack->members_) store.Keep(member.entry, member.adapter);
  return stack;
}

void Stack::Resolve(Member& member) {
  const StackEntry& entry = member.entry;
  const ResidentAdapter& adapter = *member.adapter;
  for (const ResidentTerm& term : adapter.terms) {
    member.scales.push_back(ScaleOf(term, AlphaOf(entry)));
    member.touches_text |= IsTextSite(model_.sites()[static_cast<size_t>(term.site)]);
  }
  member.touches_text |= adapter.shape.text_norms;
  resolved_.push_back(h3::Resolve(model_, adapter, entry));
  if (!entry.auto_strength.has_value()) return;
  const std::map<int, double> ratios =
      AutoStrengthRatios(model_, adapter, store_.norms(), member.scales, entry.auto_strength->floor, entry.auto_strength->ceiling);
  for (size_t t = 0; t < member.scales.size(); ++t) {
    const ResidentTerm& term = adapter.terms[t];
    if (!std::holds_alternative<ResidentOffset>(term.what)) member.scales[t] *= ratios.at(term.site);
  }
  for (const auto& [site, ratio] : ratios) {
    resolved_.back().auto_strength_ratios.push_back({model_.sites()[static_cast<size_t>(site)].name, ratio});
  }
}

std::vector<PlannedEntry> Stack::planned() const {
  std::vector<PlannedEntry> planned;
  for (const Member& member : members_) planned.push_back({&member.adapter->shape, &member.entry});
  return planned;
}

ByteCount Stack::AdapterBytes() const {
  std::set<const ResidentAdapter*> held;
  ByteCount bytes;
  for (const Member& member : members_) {
    if (held.insert(member.adapter.get()).second) bytes += member.adapter->bytes;
  }
  return bytes;
}

absl::StatusOr<std::shared_ptr<const ResidentAdapter>> Stack::Read(const StackEntry& entry) {
  for (const Member& member : members_) {
    const StackEntry& other = member.entry;
    const bool same = other.adapter == entry.adapter && other.digest == entry.digest && other.settings == entry.settings &&
                      other.leave_out == entry.leave_out;
    // The store refuses a whole difference that no merged copy takes.
    if (same && (entry.apply == Apply::kMaterialized || WholeDifference(*member.adapter) == nullptr)) return member.adapter;
  }
  auto adapter = store_.Read(entry, AdapterBytes());
  slowest_source_ = std::max(slowest_source_, store_.last_source());
  return adapter;
}

Stack::~Stack() {
  programs_.clear();
  merged_.clear();
  // Copies that were not all made are no use, and what they took may be what was missing.
  if (preparing_) store_.merged().Drop("");
  store_.merged().Trim();
}

absl::Status Stack::PlanMerges() {
  // By site, every mergeable term in stack order.
  std::map<int, std::vector<TermId>> all;
  for (size_t m = 0; m < members_.size(); ++m) {
    for (size_t t = 0; t < members_[m].adapter->terms.size(); ++t) {
      const TermId id{m, t};
      if (IsMergeable(term(id)) && members_[m].entry.strength != 0) all[term(id).site].push_back(id);
    }
  }
  for (const auto& [site, ids] : all) {
    const auto merged = [&](const TermId& id) { return members_[id.member].entry.apply == Apply::kMaterialized; };
    // A DoRA acts on the weight as it is by then: what comes before a merged one goes into the copy with it. Otherwise sums commute,
    // and run-time terms stay run-time terms.
    size_t last_dora = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (merged(ids[i]) && IsDora(term(ids[i]))) last_dora = i + 1;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      const StackEntry& entry = members_[ids[i].member].entry;
      const bool later = std::any_of(ids.begin() + static_cast<ptrdiff_t>(i), ids.end(), merged);
      const auto refuse = [&](absl::string_view what) {
        return RefuseArgument(reason::kBadStrength,
                              absl::StrCat("stack[", ids[i].member, "] (", entry.adapter, ") ", what, " at ",
                                           model_.sites()[static_cast<size_t>(site)].name, "; materialise it too, or put it last"),
                              {{"field", absl::StrCat("stack[", ids[i].member, "].apply")}, {"adapter", entry.adapter}});
      };
      if (!merged(ids[i]) && later && IsDora(term(ids[i]))) return refuse("is a run-time DoRA before an adapter with apply=materialized");
      if (!merged(ids[i]) && i >= last_dora) continue;
      if (entry.video != entry.text || entry.text != entry.audio || !entry.per_evaluation.empty()) {
        return refuse("has factors by modality or evaluation and comes before a DoRA with apply=materialized");
      }
      merges_[site].push_back(ids[i]);
    }
  }
  return absl::OkStatus();
}

bool Stack::MergedAt(int site, const TermId& id) const {
  const auto found = merges_.find(site);
  return found != merges_.end() && std::find(found->second.begin(), found->second.end(), id) != found->second.end();
}

absl::Status Stack::CheckFactors(absl::Span<const double> factors) const {
  for (const auto& [site, ids] : merges_) {
    for (const TermId& id : ids) {
      if (factors.empty() || factors[id.member] == 1) continue;
      const std::string& name = members_[id.member].entry.adapter;
      return RefuseArgument(reason::kBadStrength, absl::StrCat("adapter ", name, " is part of a merged copy: its factor must be 1"),
                            {{"adapter", name}});
    }
  }
  return absl::OkStatus();
}

std::string Stack::MergeKey(int site, const std::vector<TermId>& terms) const {
  std::string key = absl::StrCat(site);
  for (const TermId& id : terms) {
    const Member& member = members_[id.member];
    const AdapterSettings& settings = member.entry.settings;
    // Settings that change what a term is; alpha is in the scale.
    absl::StrAppend(&key, "|", member.adapter->digest, ":", id.term, ":", absl::Hex(std::bit_cast<uint64_t>(member.scales[id.term])), ":",
                    absl::Hex(std::bit_cast<uint64_t>(member.entry.strength * member.entry.video)), ":", static_cast<int>(settings.qkv_layout), ":",
                    settings.fc1_gate_first.has_value() ? static_cast<int>(*settings.fc1_gate_first) : -1, ":",
                    static_cast<int>(settings.partition), ":", absl::StrJoin(member.entry.leave_out, ","));
  }
  return key;
}

absl::Status Stack::Prepare(const CancellationToken& cancel) {
  preparing_ = merged_.size() < merges_.size();
  for (const auto& [site, ids] : merges_) {
    if (merged_.contains(site)) continue;
    H3_RETURN_IF_ERROR(cancel.Check(absl::StrCat("merging weights, ", merged_.size(), " of ", merges_.size())));
    const BaseLinear& base = model_.linear(site);
    merged_[site] = store_.merged().Get(MergeKey(site, ids), [&] {
      std::vector<SiteOp> ops;
      for (const TermId& id : ids) {
        std::optional<SiteOp> op = MakeOp(id, members_[id.member].entry.strength, ops, base, &store_.norms());
        if (op.has_value()) ops.push_back(*std::move(op));
      }
      return MergeWeight(base, ops, model_.device());
    });
  }
  preparing_ = false;
  return absl::OkStatus();
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

std::optional<SiteOp> Stack::MakeOp(const TermId& id, double factor, absl::Span<const SiteOp> before, const BaseLinear& base,
                                    NormCache* norms) const {
  const StackEntry& entry = members_[id.member].entry;
  const ResidentTerm& from = term(id);
  const double scale = members_[id.member].scales[id.term];
  const std::array<double, kModalities> strength = {factor * entry.video, factor * entry.text, factor * entry.audio};
  Factors f;
  for (size_t m = 0; m < strength.size(); ++m) f.of[m] = static_cast<float>(strength[m] * scale);
  if (IsDora(from)) {
    // A scale of 0 leaves the magnitudes to act.
    if (strength == std::array<double, kModalities>{}) return std::nullopt;
    return MakeDoraOp(base, norms, before, from, scale, strength);
  }
  if (f.zero()) return std::nullopt;
  if (const auto* low_rank = std::get_if<ResidentLowRank>(&from.what)) return LowRankOp{low_rank->a, low_rank->b, from.range, f};
  if (const auto* kronecker = std::get_if<ResidentKronecker>(&from.what)) {
    return KroneckerOp{kronecker->w1, kronecker->w2, kronecker->row_order, from.range, f};
  }
  if (const auto* difference = std::get_if<ResidentDifference>(&from.what)) return DifferenceOp{difference->difference, from.range, f};
  return OffsetOp{std::get<ResidentOffset>(from.what).offset, from.range, f};
}

std::unique_ptr<StackProgram> Stack::MakeProgram(const std::vector<double>& factors) const {
  auto program = std::make_unique<StackProgram>(model_.sites().size());
  for (const auto& [site, ids] : merges_) program->sites[static_cast<size_t>(site)].merged = merged_.at(site);
  for (size_t m = 0; m < members_.size(); ++m) {
    const StackEntry& entry = members_[m].entry;
    const ResidentAdapter& adapter = *members_[m].adapter;
    for (size_t t = 0; t < adapter.terms.size(); ++t) {
      const ResidentTerm& from = adapter.terms[t];
      if (MergedAt(from.site, {m, t})) continue;
      SiteProgram& site = ProgramOf(*program, adapter, from);
      const BaseLinear& base = site.merged != nullptr ? *site.merged : model_.linear(from.site);
      std::optional<SiteOp> op = MakeOp({m, t}, factors[m], site.ops, base, site.merged != nullptr ? nullptr : &store_.norms());
      if (op.has_value()) site.ops.push_back(*std::move(op));
    }
    Factors plain;
    plain.of = {static_cast<float>(factors[m] * entry.video), static_cast<float>(factors[m] * entry.text),
                static_cast<float>(factors[m] * entry.audio)};
    if (plain.zero()) continue;
    for (const ResidentNormOffset& norm : adapter.norm_offsets) {
      const at::Tensor lines = NormLines(norm.offset, plain);
      at::Tensor& sum = program->norms[norm.tensor];
      sum = sum.defined() ? sum.add(lines) : lines;
    }
    for (const ResidentCurve& curve : adapter.curves) {
      program->curves.push_back({curve.table, curve.weights, curve.biases, plain});
    }
  }
  return program;
}

ByteCount Stack::MergedBytes() const {
  std::vector<const ResidentAdapter*> adapters;
  for (const Member& member : members_) {
    if (member.entry.apply == Apply::kBypass) adapters.push_back(member.adapter.get());
  }
  return h3::MergedBytes(model_, adapters);
}

}  // namespace h3
