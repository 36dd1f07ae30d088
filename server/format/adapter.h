// Adapter intake: every spelling of an H3 adapter, brought into one canonical form from its header alone, or refused as a
// whole. What each spelling means: h3-format.md section 3. All or nothing: each tensor of the file finds its destination here
// or the file is refused with the full list.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/format/adapter_settings.h"
#include "server/format/checkpoint.h"
#include "server/format/geometry.h"
#include "server/format/request.h"
#include "server/format/safetensors.h"

namespace h3 {

// How rows of a stored lora_B (or of a magnitude, an offset) map to the canonical rows of their range.
enum class RowMap {
  kIdentity,
  kSwapHalves,     // Stored [up; gate], canonical [gate; up].
  kDeinterleave,   // Stored [q0 k0 v0 q1 k1 v1 ...], canonical [q; k; v]; heads from the geometry.
};

// Canonical output rows [begin, begin + count) of a site.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
  bool operator==(const RowRange&) const = default;
};

enum class MagnitudeAxis { kNone, kRows, kColumns };  // DoRA: norms of rows ([out] or [out, 1]) or of columns ([1, in]).

struct LowRank {
  TensorInfo a;  // [rank, in]
  TensorInfo b;  // [rows.count, rank]
  MagnitudeAxis magnitude_axis = MagnitudeAxis::kNone;
  TensorInfo magnitude;  // Where magnitude_axis is set.
};

// delta = kron(w1, w2); each factor whole, or a product of two.
struct Kronecker {
  std::optional<TensorInfo> w1, w1_a, w1_b;
  std::optional<TensorInfo> w2, w2_a, w2_b;
};

// Adds strength * offset to the output (diff_b).
struct Offset {
  TensorInfo offset;
};

// A whole [rows.count, in] difference: as large as the weight, so that only a merged copy can take it (apply=materialized).
struct Difference {
  TensorInfo difference;
};

// What the input of an AdaLN term is, at a timestep t.
enum class AdalnFeatures {
  kBase,      // As the base's own projection: silu(time embedding), or the base's table.
  kGrid,      // The full model's silu(time embedding) on a pruned base, from the silu grid.
  kOwnTable,  // The adapter's own adaln_t_table, whatever the base has.
};

// One thing that an adapter adds at one site. Exactly one of the four is set.
struct AdapterTerm {
  int site = 0;  // Index into Sites(geometry).
  RowRange rows;
  RowMap row_map = RowMap::kIdentity;
  std::optional<LowRank> low_rank;
  std::optional<Kronecker> kronecker;
  std::optional<Offset> offset;
  std::optional<Difference> difference;
  int64_t rank = 0;          // 0 for offsets, differences and whole Kronecker factors.
  double alpha = 0;
  double scale = 1;          // alpha / rank as a rule; strength is not in it.
  bool root_rank = false;    // rsLoRA: the scale is alpha / sqrt(rank).
  std::string scale_source;  // "alpha tensor", "metadata alpha", "default (alpha = rank)", "request", "adapter settings", ...
  AdalnFeatures features = AdalnFeatures::kBase;
};

// A strength-scaled difference on a norm weight (1-D `diff`).
struct NormOffset {
  std::string tensor;  // Canonical name: "blocks.0.norm1.weight".
  TensorInfo offset;
};

// A complete pruned adapter's modulation: its own curve through full projections. m += f (m_adapter - m_base).
struct Curve {
  TensorInfo table;                 // adaln_t_table [rows, width]
  std::vector<TensorInfo> weights;  // adaln_proj.linear.weight of each block, then of the final layer: [.., width].
  std::vector<TensorInfo> biases;
};

struct AdapterManifest {
  std::string format;  // "reference", "kohya", "peft", "diffsynth", "diffusers", "lycoris": for reports.
  std::vector<AdapterTerm> terms;  // In site order.
  std::vector<NormOffset> norm_offsets;
  std::optional<Curve> curve;
  std::optional<TensorInfo> own_table;  // Where a term's features are kOwnTable: [rows, width].
  Partition partition = Partition::kUnknown;  // Declared by the file.
  std::vector<std::string> left_out;  // Modules that leave_out allowed to be dropped.
  std::vector<std::string> ignored_sections;  // "transformer_ref" where the file holds both partitions, and the like.
  std::vector<std::string> warnings;
};

struct IntakeOptions {
  Partition base_partition = Partition::kUnknown;
  bool base_has_grid = false;  // A silu grid (or a full model's time embedder) is there for AdaLN pairs on a pruned base.
  int64_t grid_width = 0;      // Its width: 2688 in the released files.
  bool interleaved_base = false;  // The base stores qkv rows per head.
  AdapterSettings settings;
  std::optional<double> alpha;         // The request's: replaces every alpha, the settings' too.
  std::vector<std::string> leave_out;  // "adaln"
  bool materialized = false;           // Whole differences may be taken.
};

// Reads the bytes of a small tensor (alphas). Errors are passed on.
using TensorReader = std::function<absl::StatusOr<std::string>(const TensorInfo&)>;

// INVALID_ARGUMENT with one of the adapter reasons (UNSUPPORTED_DORA only while DoRA is not supported on that site,
// UNSUPPORTED_ADAPTER_TYPE, SHAPE_MISMATCH, RANK_MISMATCH, MISSING_PAIR, UNKNOWN_MODULE, NO_ADAPTER_TENSORS, AMBIGUOUS_NAMES,
// BAD_SCALE, INCOMPLETE_CURVE), FAILED_PRECONDITION with ADALN_NEEDS_GRID or BASE_MISMATCH; details name the first tensor
// ("tensor"), the shapes ("shape", "expected") and how many are concerned ("count").
absl::StatusOr<AdapterManifest> ReadAdapter(const SafetensorsHeader& header, const TensorReader& read, const Geometry& geometry,
                                            const IntakeOptions& options = {});

struct TermScale {
  SiteKind kind = SiteKind::kQkv;
  int64_t rank = 0;
  double alpha = 0;
  double scale = 1;
  std::string source;
};

// One line for each (module kind, rank, alpha, source) that occurs among the terms: what users are told of an adapter's scale.
std::vector<EffectiveScale> SummariseScales(const std::vector<TermScale>& terms);
std::vector<EffectiveScale> SummariseScales(const AdapterManifest& manifest, const Geometry& geometry);

}  // namespace h3
