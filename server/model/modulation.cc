#include "server/model/modulation.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// Up to kTimestepBatch points of one modality under one program, padded to exactly that many rows.
struct Batch {
  int modality = 0;
  const StackProgram* program = nullptr;
  std::vector<int64_t> lines;  // Where each row goes: a base line, or an entry.
  std::vector<int64_t> base_lines;
  std::vector<int64_t> plain_lines;  // The untouched base's, where the program holds curves.
  at::Tensor features;               // [kTimestepBatch, adaln_width]
  std::vector<at::Tensor> own_features;  // The same for each of the program's own features.
  std::vector<float> timesteps;
};

// True where the program changes what the base projections are given, so that their products cannot be shared.
bool ChangesBaseInput(const ResidentModel& model, const StackProgram& program) {
  for (size_t i = 0; i < program.sites.size(); ++i) {
    const SiteKind kind = model.sites()[i].kind;
    const bool embedder = kind == SiteKind::kTimeIn || kind == SiteKind::kTimeOut;
    const bool adaln = kind == SiteKind::kAdaln || kind == SiteKind::kFinalAdaln;
    if ((embedder || adaln) && program.sites[i].merged != nullptr) return true;
    for (const SiteOp& op : program.sites[i].ops) {
      if (embedder || (adaln && std::holds_alternative<DoraColumnsOp>(op))) return true;
    }
  }
  return false;
}

// Rows of a projection that belong to one modality: a third of a block's, all of the final layer's.
OutRange RowsOf(const BaseLinear& linear, int modality, bool by_modality) {
  const int64_t count = by_modality ? linear.out() / kModalities : linear.out();
  return {by_modality ? modality * count : 0, count};
}

at::Tensor Padded(const at::Tensor& rows) {
  at::Tensor padded = at::zeros({kTimestepBatch, rows.size(1)}, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  return padded;
}

class ModulationComputer {
 public:
  ModulationComputer(const ResidentModel& model, const std::vector<ModulationEntry>& entries, ModulationCache* cache)
      : model_(model) {
    using Key = std::tuple<float, int, const StackProgram*>;
    std::map<Key, int64_t> base_lines;
    const int64_t elements = ModulationLineBytes(model.geometry().blocks, model.geometry().hidden) / static_cast<int64_t>(sizeof(float));
    // A new base line: from the cache, to be computed into it, or for this call alone.
    const auto add_base = [&](const ModulationEntry& entry, const StackProgram* special, int64_t line) {
      BaseLine& base = base_lines_.emplace_back();
      if (special == nullptr && cache != nullptr) {
        base.kept = cache->Find(entry.point);
        if (base.kept.defined()) return;
        base.kept = cache->Add(entry.point, elements, model.device());
      }
      if (!base.kept.defined()) base.row = transient_count_++;
      Add(base_batches_, entry, special, line, 0, 0);
    };
    for (size_t i = 0; i < entries.size(); ++i) {
      const ModulationEntry& entry = entries[i];
      if (!changes_.contains(entry.program)) changes_[entry.program] = ChangesBaseInput(model, *entry.program);
      const StackProgram* special = changes_[entry.program] ? entry.program : nullptr;
      const auto [found, fresh] = base_lines.try_emplace(Key{entry.point.t, entry.point.modality, special},
                                                         static_cast<int64_t>(base_lines.size()));
      if (fresh) add_base(entry, special, found->second);
      int64_t plain = found->second;
      if (special != nullptr && !entry.program->curves.empty()) {
        const auto [untouched, first] = base_lines.try_emplace(Key{entry.point.t, entry.point.modality, nullptr},
                                                               static_cast<int64_t>(base_lines.size()));
        if (first) add_base(entry, nullptr, untouched->second);
        plain = untouched->second;
      }
      Add(entry_batches_, entry, entry.program, static_cast<int64_t>(i), base_lines.at({entry.point.t, entry.point.modality, special}), plain);
    }
    entry_count_ = static_cast<int64_t>(entries.size());
    const StackProgram plain(model.sites().size());
    for (std::vector<Batch>* batches : {&base_batches_, &entry_batches_}) {
      for (Batch& batch : *batches) {
        std::vector<ModulationPoint> points;
        for (const float t : batch.timesteps) points.push_back({t, batch.modality});
        const StackProgram& program = batch.program == nullptr ? plain : *batch.program;
        batch.features = Padded(TimeFeatures(model, program, points));
        for (const FeatureProgram& own : program.features) {
          batch.own_features.push_back(Padded(own.table.defined() ? LerpTable(own.table, batch.timesteps) : GridFeatures(model, points)));
        }
      }
    }
  }

  // [entries, RowsOf(site).count]. `layer`: of the blocks, then the final one.
  at::Tensor Project(int site, int64_t layer, bool by_modality) const {
    const BaseLinear& linear = model_.linear(site);
    const int64_t columns = RowsOf(linear, 0, by_modality).count;
    const at::Tensor transient = at::empty({transient_count_, columns}, Options());
    std::vector<at::Tensor> base;  // W c, without bias, of each base line.
    for (const BaseLine& line : base_lines_) {
      base.push_back(line.kept.defined() ? line.kept.narrow(0, layer * 6 * model_.geometry().hidden, columns) : transient.select(0, line.row));
    }
    at::Tensor out;
    {
      const OwnerScope result(Owner::kActivations);
      out = at::empty({entry_count_, columns}, Options());
    }
    MultiplyBase(site, linear, by_modality, base);
    for (const Batch& batch : entry_batches_) AddStack(batch, site, layer, linear, by_modality, base, out);
    return out;
  }

 private:
  void Add(std::vector<Batch>& batches, const ModulationEntry& entry, const StackProgram* program, int64_t line, int64_t base_line,
           int64_t plain_line) {
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.modality == entry.point.modality && b.program == program &&
             static_cast<int64_t>(b.lines.size()) < kTimestepBatch;
    });
    if (batch == batches.end()) {
      batches.push_back({.modality = entry.point.modality, .program = program});
      batch = batches.end() - 1;
    }
    batch->lines.push_back(line);
    batch->base_lines.push_back(base_line);
    batch->plain_lines.push_back(plain_line);
    batch->timesteps.push_back(entry.point.t);
  }

  at::TensorOptions Options() const { return at::TensorOptions().device(model_.device()).dtype(at::kFloat); }

  // W c, without bias, for every base line that is not known. Each row of W is read (and widened) once.
  void MultiplyBase(int site, const BaseLinear& linear, bool by_modality, const std::vector<at::Tensor>& base) const {
    for (int modality = 0; modality < kModalities; ++modality) {
      struct Input {
        const Batch* batch;
        at::Tensor features;
        const BaseLinear* merged;  // Null: the base.
      };
      std::vector<Input> inputs;
      for (const Batch& batch : base_batches_) {
        if (batch.modality != modality) continue;
        Input input{&batch, batch.features, nullptr};
        if (batch.program != nullptr) {
          const SiteProgram& program = batch.program->sites[static_cast<size_t>(site)];
          input.features = BoundSite(linear, program, at::kFloat).BaseInput(input.features, {.uniform = modality});
          input.merged = program.merged.get();
        }
        inputs.push_back(std::move(input));
      }
      if (inputs.empty()) continue;
      const OutRange rows = RowsOf(linear, modality, by_modality);
      // The same steps for a weight that is widened or streamed and for one that is not: the same bits.
      const int64_t step = std::min(rows.count, WidenedRows(linear.in()));
      at::Tensor product = at::empty({kTimestepBatch, step}, Options());
      for (int64_t begin = 0; begin < rows.count; begin += step) {
        const int64_t count = std::min(step, rows.count - begin);
        const at::Tensor weight = linear.Rows(rows.begin + begin, count);
        for (const auto& [batch, features, merged] : inputs) {
          at::Tensor part = product.narrow(1, 0, count);
          at::mm_out(part, features, (merged == nullptr ? weight : merged->Rows(rows.begin + begin, count)).t());
          for (size_t i = 0; i < batch->lines.size(); ++i) {
            base[static_cast<size_t>(batch->lines[i])].narrow(0, begin, count).copy_(part.select(0, static_cast<int64_t>(i)));
          }
        }
      }
    }
  }

  // Terms of the stack, bias, and complete adapters' curves, for one batch of entries.
  void AddStack(const Batch& batch, int site, int64_t layer, const BaseLinear& linear, bool by_modality,
                const std::vector<at::Tensor>& base, at::Tensor& out) const {
    const OutRange rows = RowsOf(linear, batch.modality, by_modality);
    const StackProgram& program = *batch.program;
    const RowModality modality{.uniform = batch.modality};
    const auto count = static_cast<int64_t>(batch.lines.size());

    const auto gather = [&](const std::vector<int64_t>& lines) {
      at::Tensor gathered = at::zeros({kTimestepBatch, rows.count}, Options());
      for (int64_t i = 0; i < count; ++i) gathered.select(0, i).copy_(base[static_cast<size_t>(lines[static_cast<size_t>(i)])]);
      return gathered;
    };
    at::Tensor line = gather(batch.base_lines);
    std::vector<std::pair<const SiteProgram*, at::Tensor>> terms;  // And what they are applied to.
    if (const SiteProgram& own = program.sites[static_cast<size_t>(site)]; !own.ops.empty()) terms.emplace_back(&own, batch.features);
    for (size_t i = 0; i < program.features.size(); ++i) {
      const auto found = program.features[i].sites.find(site);
      if (found != program.features[i].sites.end()) terms.emplace_back(&found->second, batch.own_features[i]);
    }
    if (!terms.empty()) {
      // Terms address the whole projection; only this modality's rows of it are used.
      at::Tensor whole = at::zeros({kTimestepBatch, linear.out()}, Options());
      whole.narrow(1, rows.begin, rows.count).copy_(line);
      for (const auto& [site_program, features] : terms) {
        BoundSite(linear, *site_program, at::kFloat).AddTerms(features, modality, whole);
      }
      line = whole.narrow(1, rows.begin, rows.count);
    }
    const at::Tensor bias = linear.bias().narrow(0, rows.begin, rows.count).to(at::kFloat);
    const at::Tensor plain = program.curves.empty() ? at::Tensor() : gather(batch.plain_lines);
    for (const CurveOp& curve : program.curves) {
      const float factor = curve.factors.of[static_cast<size_t>(batch.modality)];
      if (factor == 0) continue;
      const at::Tensor features = Padded(LerpTable(curve.table, batch.timesteps));
      const auto i = static_cast<size_t>(layer);
      const at::Tensor own = at::linear(features, curve.weights[i].narrow(0, rows.begin, rows.count).to(at::kFloat),
                                        curve.biases[i].narrow(0, rows.begin, rows.count).to(at::kFloat));
      line = line.add(own.sub(plain).sub_(bias), factor);
    }
    line = line.add(bias);
    for (int64_t i = 0; i < count; ++i) out.select(0, batch.lines[static_cast<size_t>(i)]).copy_(line.select(0, i));
  }

  const ResidentModel& model_;
  std::map<const StackProgram*, bool> changes_;
  struct BaseLine {
    at::Tensor kept;  // The cache's, of all layers; undefined: a row of its own for each site.
    int64_t row = 0;
  };
  std::vector<BaseLine> base_lines_;  // Base products, shared by entries that differ only in factors.
  std::vector<Batch> base_batches_;   // Those that are to be computed.
  std::vector<Batch> entry_batches_;  // Lines of the result.
  int64_t transient_count_ = 0;
  int64_t entry_count_ = 0;
};

}  // namespace

absl::StatusOr<Modulation> ComputeModulation(const ResidentModel& model, const std::vector<ModulationEntry>& entries,
                                             ModulationCache* cache, const CancellationToken& cancel) {
  H3_CHECK(!entries.empty());
  const OwnerScope owner(Owner::kWorkspace);
  if (cache != nullptr) cache->Begin();
  // What is not computed to its end, for whatever reason, is not kept.
  const absl::Cleanup abandon = [cache] {
    if (cache != nullptr) cache->Abandon();
  };
  const Geometry& g = model.geometry();
  const ModulationComputer computer(model, entries, cache);
  const auto count = static_cast<int64_t>(entries.size());
  Modulation modulation;
  for (int64_t block = 0; block < g.blocks; ++block) {
    H3_RETURN_IF_ERROR(cancel.Check(absl::StrCat("modulation of block ", block)));
    const int site = model.SiteIndex(absl::StrCat("blocks.", block, ".adaln_proj.linear"));
    modulation.blocks.push_back(computer.Project(site, block, true).view({count, 6, g.hidden}));
  }
  modulation.final = computer.Project(model.SiteIndex("final_layer.adaln_proj.linear"), g.blocks, false).view({count, 2, g.hidden});
  if (cache != nullptr) cache->Complete();
  return modulation;
}

}  // namespace h3
