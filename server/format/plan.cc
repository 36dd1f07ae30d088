#include "server/format/plan.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/tiling.h"

namespace h3 {
namespace {

constexpr int64_t kFloat = 4;
constexpr int64_t kIndex = 8;

// Scratch of a CPU product of 16-bit types, a thread: measured up to 198 KiB.
constexpr int64_t kGemmScratch = int64_t{200} << 10;

// A weight is looked at in chunks of rows for norms, auto-strength and merging; the float32 chunk, its squares and a product.
constexpr int64_t kWeightPasses = 3;

// What a stack makes a site hold while it is bound and applied.
struct SiteCost {
  int64_t scratch = 0;  // As long as it is bound.
  int64_t fixed = 0;    // While it is applied, whatever the rows.
  int64_t per_row = 0;
};

class Planner {
 public:
  Planner(const PlanBase& base, const PlanOptions& options, const Layout& layout, int64_t evaluations, const std::vector<PlannedEntry>& stack)
      : base_(base),
        g_(base.form.geometry),
        e_(DTypeBytes(base.form.compute)),
        options_(options),
        layout_(layout),
        session_(evaluations == 0),
        evaluations_(std::max<int64_t>(1, evaluations)),
        stack_(stack),
        sites_(Sites(g_)) {
    Count();
    for (size_t i = 0; i < sites_.size(); ++i) index_[sites_[i].name] = static_cast<int>(i);
    for (const PlannedEntry& entry : stack_) {
      norms_ |= entry.shape->norm_elements > 0;
      curve_ |= entry.shape->curve;
      auto_strength_ |= entry.entry->auto_strength.has_value();
      for (const TermShape& term : entry.shape->terms) dora_ |= IsDora(term);
    }
  }

  RequestPlan Plan() {
    RequestPlan plan;
    plan.rows = rows_;
    plan.row_tile = Tile(rows_);
    const int64_t conditions = condition_video_ * VideoRow() + condition_audio_ * AudioRow();
    const int64_t given = layout_.text_tokens * g_.text_width * kFloat + conditions;
    const int64_t context = rows_ * kIndex + 2 * rows_ * 3 * g_.rope_frequencies * kFloat;
    const int64_t sampled = session_ ? 0 : video_ * VideoRow() + audio_ * AudioRow();
    const int64_t programs = Programs();
    const int64_t text_streams = DistinctFactors(/*only_text=*/true) * layout_.text_tokens * g_.hidden * e_;
    const int64_t before_modulation = given + context + sampled + programs + text_streams;
    const int64_t lines = ModulationLines();
    plan.modulation_points = evaluations_ * 3 + 2;
    const int64_t held = before_modulation + lines * LineBytes();
    plan.held = ByteCount(held);

    const int64_t all_rows = video_ * VideoRow() + audio_ * AudioRow();
    const auto phase = [&](const char* name, int64_t activations, int64_t workspace) {
      plan.phases.push_back({name, ByteCount(activations), ByteCount(workspace)});
    };
    // Tensors are checked to be finite on arrival (7 bytes an element beside the 4) and patchified through a copy of each; noise
    // lies beside its rows.
    phase("start", given + context + sampled, std::max(3 * all_rows + 2 * conditions, 2 * layout_.text_tokens * g_.text_width * kFloat) + StackWork());
    TextPhase(given + context + sampled + programs + text_streams, phase);
    ModulationPhase(before_modulation + lines * LineBytes(), lines, phase);
    ForwardPhases(held, phase);
    // What a session's evaluation is given and gives, beside what it holds.
    if (!session_) phase("result", held, 3 * all_rows);

    int64_t caches = 0;
    if (dora_ || auto_strength_) caches = NormVectors();
    plan.caches = ByteCount(caches);
    plan.materialized = ByteCount(Materialized());
    std::set<const AdapterShape*> distinct;
    for (const PlannedEntry& entry : stack_) {
      if (distinct.insert(entry.shape).second) plan.adapters += entry.shape->bytes;
    }
    return plan;
  }

 private:
  static bool IsDora(const TermShape& term) { return term.kind == TermKind::kDoraRows || term.kind == TermKind::kDoraColumns; }
  static bool Uniform(const StackEntry& entry) { return entry.video == entry.text && entry.text == entry.audio; }

  void Count() {
    const auto visual = [](int64_t frames, int64_t height, int64_t width) { return frames * (height / 2) * (width / 2); };
    for (size_t i = 0; i < layout_.keyframes.size(); ++i) condition_video_ += visual(1, layout_.latent_height, layout_.latent_width);
    for (const Reference& reference : layout_.references) {
      if (reference.kind != ReferenceKind::kAudio) condition_video_ += visual(std::max<int64_t>(1, reference.latent_frames), reference.latent_height, reference.latent_width);
      condition_audio_ += 2 * reference.audio_latents;
    }
    video_ = condition_video_ + visual(layout_.latent_frames, layout_.latent_height, layout_.latent_width);
    audio_ = condition_audio_ + 2 * layout_.audio_latents;
    rows_ = layout_.text_tokens + video_ + audio_;
  }

  int64_t VideoRow() const { return 4 * g_.video_channels * kFloat; }
  int64_t AudioRow() const { return g_.audio_channels * kFloat; }
  int64_t LineBytes() const { return ModulationLineBytes(g_.blocks, g_.hidden); }
  int64_t Tile(int64_t rows) const { return RowTile({g_.hidden, g_.inner(), g_.ffn, e_}, options_.workspace.value(), rows); }
  int Index(const std::string& name) const {
    const auto found = index_.find(name);
    H3_CHECK(found != index_.end());
    return found->second;
  }
  bool Narrow() const { return e_ < kFloat; }
  int64_t Gemm(int64_t element) const { return element < kFloat ? options_.threads * kGemmScratch : 0; }
  // A CPU kernel over two types converts its operand first.
  int64_t Converted(int64_t elements) const { return Narrow() && options_.threads > 0 ? elements * kFloat : 0; }

  // Sets of effective strengths that occur in the run.
  int64_t DistinctFactors(bool only_text) const {
    std::set<std::vector<double>> sets;
    for (int64_t i = 0; i < evaluations_; ++i) {
      std::vector<double> factors;
      for (const PlannedEntry& planned : stack_) {
        const std::vector<double>& steps = planned.entry->per_evaluation;
        if (steps.empty() || (only_text && !TouchesText(*planned.shape))) continue;
        factors.push_back(steps[std::min(static_cast<size_t>(i), steps.size() - 1)]);
      }
      sets.insert(std::move(factors));
    }
    return static_cast<int64_t>(sets.size());
  }

  bool TouchesText(const AdapterShape& shape) const {
    return shape.text_norms || std::any_of(shape.terms.begin(), shape.terms.end(),
                                           [&](const TermShape& term) { return IsTextSite(sites_[static_cast<size_t>(term.site)]); });
  }

  // Vectors that programs own: gains of DoRA, differences of norms.
  int64_t Programs() const {
    int64_t bytes = 0;
    for (const PlannedEntry& planned : stack_) {
      bytes += 3 * kFloat * planned.shape->norm_elements;
      for (const TermShape& term : planned.shape->terms) {
        if (IsDora(term)) bytes += 2 * 3 * kFloat * Axis(term);
      }
    }
    return bytes * DistinctFactors(/*only_text=*/false);
  }
  int64_t Axis(const TermShape& term) const {
    return term.kind == TermKind::kDoraColumns ? sites_[static_cast<size_t>(term.site)].in : term.rows.count;
  }

  // n0 and p of every DoRA term; p of each term before it. Auto-strength takes both of every low-rank term.
  int64_t NormVectors() const {
    int64_t bytes = 0;
    std::map<int, int64_t> terms;
    for (const PlannedEntry& planned : stack_) {
      for (const TermShape& term : planned.shape->terms) {
        const int64_t before = terms[term.site]++;
        if (IsDora(term)) bytes += (2 + before) * kFloat * Axis(term);
      }
    }
    return bytes;
  }

  // Work on weights before the run: norms of DoRA and auto-strength, merged copies.
  int64_t StackWork() const {
    int64_t work = 0;
    for (const PlannedEntry& planned : stack_) {
      const bool merged = planned.entry->apply == Apply::kMaterialized;
      for (const TermShape& term : planned.shape->terms) {
        if (!IsDora(term) && !merged && !auto_strength_) continue;
        const Site& site = sites_[static_cast<size_t>(term.site)];
        const int64_t chunk = std::min(WidenedRows(site.in), (site.out + 4) / 5) * site.in * kFloat;
        const int64_t factors = (site.in + term.rows.count) * std::max<int64_t>(term.rank, 1) * kFloat;
        work = std::max(work, kWeightPasses * chunk + 6 * factors + 12 * kIndex * std::max(site.in, site.out));
      }
    }
    return work;
  }

  int64_t Materialized() const {
    std::set<int> merged;
    for (const PlannedEntry& planned : stack_) {
      if (planned.entry->apply != Apply::kMaterialized) continue;
      for (const TermShape& term : planned.shape->terms) {
        if (term.kind != TermKind::kOffset && !term.own_features) merged.insert(term.site);
      }
    }
    int64_t bytes = 0;
    for (const int site : merged) bytes += sites_[static_cast<size_t>(site)].out * sites_[static_cast<size_t>(site)].in * base_.site_bytes[static_cast<size_t>(site)];
    return bytes;
  }

  // `element`: of x and y. `tagged`: rows of several modalities go through together.
  SiteCost CostOf(int site, int64_t element, bool tagged, bool features = false) const {
    const Site& s = sites_[static_cast<size_t>(site)];
    struct Group {
      int64_t terms = 0, ranks = 0, count = 0, converted = 0;
      bool uniform = true;
    };
    // A gain of DoRA depends on the factors of every adapter before it.
    const bool by_modality = !std::all_of(stack_.begin(), stack_.end(), [](const PlannedEntry& planned) { return Uniform(*planned.entry); });
    std::map<std::pair<int64_t, int64_t>, Group> groups;
    std::set<int64_t> borders = {0, s.out};
    SiteCost cost;
    int64_t kept_inputs = 0, largest = 0;
    for (const PlannedEntry& planned : stack_) {
      if (planned.entry->apply == Apply::kMaterialized) continue;
      const bool uniform = Uniform(*planned.entry);
      for (const TermShape& term : planned.shape->terms) {
        if (term.site != site || term.own_features != features) continue;
        const bool rows_differ = tagged && !uniform;
        switch (term.kind) {
          case TermKind::kLowRank: {
            Group& group = groups[{term.rows.begin, term.rows.count}];
            ++group.terms;
            group.ranks += term.rank;
            group.count = term.rows.count;
            group.uniform &= uniform;
            if (term.element_bytes != element) group.converted += (s.in + term.rows.count) * term.rank * element;
            break;
          }
          case TermKind::kDoraRows:
            cost.fixed = std::max(cost.fixed, term.rows.count * term.rank * (2 * kFloat + element) + s.in * term.rank * element);
            largest = std::max(largest, std::max(Converted(2 * term.rows.count) + (rows_differ ? kFloat * term.rows.count : 0),
                                                 element * term.rank + (tagged && by_modality ? (element + 2 * kFloat) * term.rows.count + Converted(2 * term.rows.count) : 0)));
            break;
          case TermKind::kDoraColumns:
            borders.insert({term.rows.begin, term.rows.begin + term.rows.count});
            cost.fixed = std::max(cost.fixed, (term.rows.count + s.in) * term.rank * element);
            kept_inputs += element * s.in;
            largest = std::max(largest, kFloat * s.in * (tagged ? 2 : 1) + element * s.in + element * term.rank + Converted(s.in));
            break;
          case TermKind::kKronecker:
            cost.fixed = std::max(cost.fixed, element * (s.in + s.out));  // Factors in the compute type are far smaller.
            largest = std::max(largest, element * (2 * term.kronecker_inner + 2 * term.kronecker_rows +
                                                   (term.reordered ? term.kronecker_rows + 1 + term.rows.count : 0)) + Converted(term.kronecker_rows));
            break;
          case TermKind::kOffset:
            cost.fixed = std::max(cost.fixed, 4 * kFloat * term.rows.count);
            largest = std::max(largest, (tagged ? kFloat * term.rows.count : 0) + Converted(term.rows.count));
            break;
          case TermKind::kDifference: break;  // Merged copies only.
        }
      }
    }
    const auto segments = static_cast<int64_t>(borders.size()) - 1;
    for (const auto& [range, group] : groups) {
      cost.scratch += group.converted;
      if (group.terms > 1 || !group.uniform) cost.scratch += (segments * s.in + group.count) * group.ranks * element + 6 * kFloat * group.ranks;
      largest = std::max(largest, group.ranks * (element + (tagged && !group.uniform ? kFloat + (element < kFloat ? kFloat : 0) : 0)));
    }
    cost.per_row = kept_inputs + largest;
    return cost;
  }

  // A row's float32 norm, its modulation and its conversion to the compute type.
  int64_t NormedRow(bool modulated) const {
    const int64_t row = kFloat * g_.hidden;
    const int64_t own = norms_ ? row : 0;  // The weight by modality.
    return std::max({own + row + Converted(g_.hidden) + 4 * kFloat, modulated ? 2 * row : 0, row + (Narrow() ? e_ * g_.hidden : 0)});
  }
  int64_t ResidualRow(bool modulated) const { return modulated ? kFloat * g_.hidden + Converted(g_.hidden) : 0; }

  // The phases of one block over `rows` rows; `held` activations beside them. Calls phase(name, activations, workspace).
  template <typename F>
  void BlockPhases(const std::string& block, int64_t rows, bool packed, int64_t held, F&& phase) const {
    const int64_t tile = Tile(rows);
    const int64_t x = rows * g_.hidden * e_, qkv = rows * 3 * g_.inner() * e_;
    const int64_t normed = e_ * g_.hidden, inner = g_.inner();
    const int64_t rotated = packed ? kFloat * g_.heads * 3 * g_.rope_frequencies : 0;
    {
      const SiteCost cost = CostOf(Index(absl::StrCat(block, ".attn.qkv_proj")), e_, packed);
      const int64_t head_norm = kFloat * inner + std::max(Converted(inner) + 3 * kFloat * g_.heads, rotated) + (norms_ ? kFloat * g_.head_dim : 0);
      const int64_t row = std::max({NormedRow(packed), normed + cost.per_row, normed + head_norm});
      phase("qkv", held + x + qkv, cost.scratch + cost.fixed + tile * row + Gemm(e_));
    }
    {
      const int64_t heads = HeadGroup(options_.workspace.value(), rows, g_.head_dim, e_, g_.heads);
      int64_t scratch = heads * rows * kFloat;  // Log-sum-exp.
      if (options_.threads > 0) {
        // ATen's flash attention: blocks of q and k by the number of rows.
        const int64_t q = rows >= 768 ? 256 : rows >= 192 ? 64 : 32, k = std::min<int64_t>(512, rows);
        scratch += options_.threads * (kFloat * (q * k + 2 * q + q * g_.head_dim) + (Narrow() ? e_ * q * k : 0));
        if (options_.packs_attention && Narrow()) scratch += 2 * heads * (rows + 64) * g_.head_dim * e_;
      }
      phase("attention", held + x + qkv, heads * rows * g_.head_dim * e_ + scratch);
    }
    {
      const SiteCost cost = CostOf(Index(absl::StrCat(block, ".attn.out_proj")), e_, packed);
      const int64_t attended = base_.form.interleaved_qkv ? e_ * inner : 0;
      const int64_t row = attended + e_ * g_.hidden + std::max(cost.per_row, ResidualRow(packed));
      phase("attention output", held + x + qkv, cost.scratch + cost.fixed + tile * row + Gemm(e_));
    }
    const SiteCost fc1 = CostOf(Index(absl::StrCat(block, ".mlp.fc1")), e_, packed), fc2 = CostOf(Index(absl::StrCat(block, ".mlp.fc2")), e_, packed);
    const int64_t both = 2 * e_ * g_.ffn;
    const int64_t row = std::max({NormedRow(packed), normed + both + fc1.per_row, both + e_ * g_.hidden + std::max(fc2.per_row, ResidualRow(packed))});
    phase("mlp", held + x, fc1.scratch + fc2.scratch + std::max(fc1.fixed, fc2.fixed) + tile * row + Gemm(e_));
  }

  // Keeps the largest of each name: blocks differ by what the stack adds to them.
  template <typename F>
  void LargestOfBlocks(const char* prefix, int64_t blocks, int64_t rows, bool packed, int64_t held, F&& phase) const {
    std::vector<PhaseUse> largest;
    for (int64_t block = 0; block < blocks; ++block) {
      size_t i = 0;
      BlockPhases(absl::StrCat(prefix, block), rows, packed, held, [&](const char* name, int64_t activations, int64_t workspace) {
        const PhaseUse use{name, ByteCount(activations), ByteCount(workspace)};
        if (i == largest.size()) largest.push_back(use);
        if (use.total() > largest[i].total()) largest[i] = use;
        ++i;
      });
    }
    for (const PhaseUse& use : largest) phase(use.name, use.activations, use.workspace);
  }

  template <typename F>
  void TextPhase(int64_t held, F&& phase) const {
    const int64_t rows = layout_.text_tokens;
    const int site = Index("condition_proj");
    const int64_t element = base_.site_bytes[static_cast<size_t>(site)];
    const SiteCost cost = CostOf(site, element, false);
    const int64_t x = rows * g_.hidden * e_;
    int64_t work = rows * (element * g_.hidden + std::max(cost.per_row, x / std::max<int64_t>(1, rows)) + (element < kFloat ? element * g_.text_width : 0)) +
                   cost.scratch + cost.fixed + Gemm(element);
    int64_t activations = held;
    LargestOfBlocks("token_refiner.blocks.", g_.refiner_blocks, rows, false, held,
                    [&](const std::string&, ByteCount a, ByteCount w) {
                      if (a + w > ByteCount(activations + work)) activations = a.value(), work = w.value();
                    });
    work = std::max(work, x + rows * (NormedRow(false) + e_ * g_.hidden) + held - activations);
    phase("text stream", activations, std::max(work, StackWork()));
  }

  int64_t PointsOfAnEvaluation() const { return 3 + (condition_video_ > 0 ? 1 : 0) + (condition_audio_ > 0 ? 1 : 0); }

  // Lines of the modulations that are held together.
  int64_t ModulationLines() const {
    const int64_t most = std::max(std::max<int64_t>(1, kModulationGroupBytes / LineBytes()), PointsOfAnEvaluation());
    const int64_t programs = DistinctFactors(/*only_text=*/false);
    const int64_t constant = programs * ((condition_video_ > 0 ? 1 : 0) + (condition_audio_ > 0 ? 1 : 0));
    return std::min(most, evaluations_ * 3 + constant);
  }

  template <typename F>
  void ModulationPhase(int64_t activations, int64_t lines, F&& phase) const {
    const int site = Index("blocks.0.adaln_proj.linear");
    const Site& s = sites_[static_cast<size_t>(site)];
    const int64_t stored = base_.site_bytes[static_cast<size_t>(site)], columns = 6 * g_.hidden;
    const int64_t step = std::min(columns, WidenedRows(s.in));
    int64_t work = lines * columns * kFloat                  // Base lines of one site.
                   + kTimestepBatch * step * kFloat;         // A product.
    if (stored < kFloat || base_.adaln_on_host) work += step * s.in * kFloat;
    if (base_.adaln_on_host) work += step * s.in * stored;   // Staging.
    // Features of base lines and of entries, and of the stack's own; batches are padded, by modality and program.
    const int64_t batches = 2 * (lines / kTimestepBatch + 3 * DistinctFactors(false));
    int64_t own = 0;
    for (const PlannedEntry& planned : stack_) {
      for (const TermShape& term : planned.shape->terms) {
        if (term.own_features) own = std::max(own, sites_[static_cast<size_t>(term.site)].in);
      }
    }
    work += batches * kTimestepBatch * (s.in + kOwnFeatureWidth * (own > 0 ? 1 : 0) + g_.time_hidden + g_.time_input) * kFloat;
    // Terms of the stack on one batch: this modality's rows, then the whole projection.
    int64_t terms = 2 * kTimestepBatch * columns * kFloat + columns * kFloat;
    for (const bool features : {false, true}) {
      for (int64_t block = 0; block < g_.blocks; ++block) {
        const SiteCost cost = CostOf(Index(absl::StrCat("blocks.", block, ".adaln_proj.linear")), kFloat, false, features);
        if (cost.per_row + cost.fixed + cost.scratch == 0) continue;
        terms = std::max(terms, kTimestepBatch * (3 * columns * 2 * kFloat + cost.per_row) + cost.scratch + cost.fixed + columns * kFloat);
      }
    }
    if (curve_) terms += kTimestepBatch * columns * kFloat * 4 + columns * (kCurveWidth + 1) * kFloat;
    phase("modulation", activations, std::max(work + terms, StackWork()));
  }

  template <typename F>
  void ForwardPhases(int64_t held, F&& phase) const {
    // A session brings the rows of each evaluation with it, patchified and joined to the conditions.
    const int64_t brought = session_ ? 3 * (video_ * VideoRow() + audio_ * AudioRow()) : 0;
    const int64_t own = held + brought + rows_ * kIndex;
    const int64_t x = rows_ * g_.hidden * e_;
    const int64_t tile = Tile(rows_);
    LargestOfBlocks("blocks.", g_.blocks, rows_, true, own, [&](const std::string& name, ByteCount a, ByteCount w) { phase(name.c_str(), a.value(), w.value()); });
    const int64_t target_video = session_ ? video_ : video_ - condition_video_, target_audio = session_ ? audio_ : audio_ - condition_audio_;
    const SiteCost out = CostOf(Index("final_layer.video_out"), kFloat, false), patch = CostOf(Index("video_patch_proj"), kFloat, false);
    const int64_t velocity = target_video * VideoRow() + target_audio * AudioRow();
    const int64_t head_row = std::max(NormedRow(true), kFloat * g_.hidden + out.per_row);
    const int64_t embed_row = kFloat * g_.hidden + patch.per_row;
    phase("head", own + x + velocity, std::max(out.scratch + out.fixed + std::min(tile, std::max(video_, audio_)) * head_row,
                                               patch.scratch + patch.fixed + std::min(tile, std::max(video_, audio_)) * embed_row));
    // Velocities, and the denoised rows of one stream; or a session's answers, checked and copied.
    phase("sampler", own + velocity, 2 * velocity);
  }

  // The silu grid of a full model, and the table of a complete adapter: of the released sizes, where no header says.
  static constexpr int64_t kOwnFeatureWidth = 2688;
  static constexpr int64_t kCurveWidth = 8;

  const PlanBase& base_;
  const Geometry& g_;
  const int64_t e_;
  const PlanOptions& options_;
  const Layout& layout_;
  const bool session_;
  const int64_t evaluations_;
  const std::vector<PlannedEntry>& stack_;
  const std::vector<Site> sites_;
  std::map<std::string, int> index_;
  int64_t rows_ = 0, video_ = 0, audio_ = 0, condition_video_ = 0, condition_audio_ = 0;
  bool norms_ = false, curve_ = false, dora_ = false, auto_strength_ = false;
};

}  // namespace

const PhaseUse& RequestPlan::largest() const {
  return *std::max_element(phases.begin(), phases.end(), [](const PhaseUse& a, const PhaseUse& b) { return a.total() < b.total(); });
}

RequestPlan PlanRequest(const PlanBase& base, const PlanOptions& options, const Layout& layout, int64_t evaluations,
                        const std::vector<PlannedEntry>& stack) {
  return Planner(base, options, layout, evaluations, stack).Plan();
}

bool IsAdalnWeight(absl::string_view name) { return absl::EndsWith(name, "adaln_proj.linear.weight"); }

DType HeldType(absl::string_view name, const CheckpointTensor& tensor, const Geometry& geometry, std::optional<DType> wanted) {
  if (!wanted.has_value()) return tensor.dtype;
  // float32 in the released files, and whatever --dtype says: they are small, or everything depends on them.
  const bool stays = absl::StartsWith(name, "video_patch_proj") || absl::StartsWith(name, "audio_patch_proj") ||
                     absl::StartsWith(name, "time_embedder") || absl::StartsWith(name, "final_layer.video_out") ||
                     absl::StartsWith(name, "final_layer.audio_out") || name == "adaln_t_table" ||
                     (geometry.pruned() && absl::StrContains(name, "adaln_proj"));
  return stays ? DType::kF32 : *wanted;
}

PlanBase PlanBaseOf(const Checkpoint& checkpoint, std::optional<DType> dtype, bool adaln_on_host) {
  const auto held = [&](const std::string& name) {
    const auto tensor = checkpoint.tensors.find(name);
    H3_CHECK(tensor != checkpoint.tensors.end());
    return HeldType(name, tensor->second, checkpoint.geometry, dtype);
  };
  PlanBase base{.form = {checkpoint.geometry, held("blocks.0.attn.qkv_proj.weight"), checkpoint.qkv_layout == QkvLayout::kInterleaved},
                .adaln_on_host = adaln_on_host};
  for (const Site& site : Sites(checkpoint.geometry)) base.site_bytes.push_back(DTypeBytes(held(site.name + ".weight")));
  return base;
}

BaseBytes BaseBytesOf(const Checkpoint& checkpoint, std::optional<DType> dtype, bool adaln_on_host) {
  BaseBytes bytes;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    int64_t elements = 1;
    for (const int64_t size : tensor.shape) elements *= size;
    const bool host = adaln_on_host && IsAdalnWeight(name);
    // What stays in mapped host memory keeps its stored type.
    (host ? bytes.host : bytes.device) += ByteCount(elements * DTypeBytes(host ? tensor.dtype : HeldType(name, tensor, checkpoint.geometry, dtype)));
  }
  return bytes;
}

}  // namespace h3
