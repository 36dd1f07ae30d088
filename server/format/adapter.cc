#include "server/format/adapter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/format/adapter_modules.h"
#include "server/format/adapter_names.h"
#include "server/format/adapter_scale.h"

namespace h3 {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::Status Bad(absl::string_view reason, const TensorInfo& tensor, absl::string_view what, ErrorDetails details = {}) {
  return BadAdapterTensor(reason, tensor, what, std::move(details));
}

absl::Status BadShape(const TensorInfo& tensor, const std::string& expected, absl::string_view hint = "") {
  return Bad(reason::kShapeMismatch, tensor,
             absl::StrCat("has shape ", ShapeText(tensor.shape), ", its module needs ", expected, hint.empty() ? "" : "; ", hint),
             {{"shape", ShapeText(tensor.shape)}, {"expected", expected}});
}

absl::Status CheckFloat(const TensorInfo& tensor) {
  if (IsFloat(tensor.dtype)) return absl::OkStatus();
  return Bad(reason::kUnsupportedAdapterType, tensor,
             absl::StrCat("has type ", DTypeName(tensor.dtype), "; factors must be F32, BF16, F16 or F64 (dequantise them first)"),
             {{"dtype", std::string(DTypeName(tensor.dtype))}});
}

// More than any weight of H3 has rows: nothing is gained beyond, and temporaries are as wide as the rank.
constexpr int64_t kMaxRank = 32768;

bool IsAdaln(SiteKind kind) { return kind == SiteKind::kAdaln || kind == SiteKind::kFinalAdaln; }

// Whether stored fc1 rows are [gate; up], where the file says so itself.
std::optional<bool> GateFirstInMetadata(const std::map<std::string, std::string>& metadata) {
  for (const auto& [key, value] : metadata) {
    const std::string name = absl::AsciiStrToLower(key), text = absl::AsciiStrToLower(value);
    if (absl::StrContains(name, "gate_first")) return text == "true" || text == "1" || text == "yes";
    if (absl::StrContains(name, "fc1_order") || absl::StrContains(name, "ff_order") || absl::StrContains(name, "swiglu_order")) {
      return absl::StartsWith(text, "gate");
    }
  }
  return std::nullopt;
}

class Intake {
 public:
  Intake(const SafetensorsHeader& header, const TensorReader& read, const Geometry& geometry, const IntakeOptions& options)
      : header_(header), read_(read), geometry_(geometry), options_(options), names_(geometry) {}

  absl::StatusOr<AdapterManifest> Run() {
    H3_ASSIGN_OR_RETURN(file_, GroupByModule(header_, names_, geometry_.pruned(), options_.base_partition, options_.settings.partition));
    manifest_.format = file_.format;
    manifest_.partition = file_.partition;
    manifest_.ignored_sections = file_.ignored_sections;
    manifest_.warnings = file_.warnings;
    declared_ = ReadDeclaredScale(header_.metadata, options_.settings.peft_config, file_.section);
    H3_RETURN_IF_ERROR(TakeCurve());
    for (const AdapterModule& module : file_.modules) H3_RETURN_IF_ERROR(TakeModule(module));
    std::stable_sort(manifest_.terms.begin(), manifest_.terms.end(),
                     [](const AdapterTerm& a, const AdapterTerm& b) { return a.site < b.site; });
    H3_RETURN_IF_ERROR(CheckOverlaps());
    WarnOfZeroScales();
    if (manifest_.terms.empty() && manifest_.norm_offsets.empty() && !manifest_.curve.has_value()) {
      return RefuseArgument(reason::kNoAdapterTensors, "nothing of the file is left to apply", {{"left_out", absl::StrCat(manifest_.left_out.size())}});
    }
    return std::move(manifest_);
  }

 private:
  bool AlphaGiven() const { return options_.alpha.has_value() || options_.settings.alpha.has_value(); }

  bool MayLeaveOutAdaln() const {
    return std::find(options_.leave_out.begin(), options_.leave_out.end(), "adaln") != options_.leave_out.end();
  }

  const Site& SiteOf(const Target& target) const { return names_.sites()[static_cast<size_t>(target.site)]; }

  // A complete pruned adapter: its own table and every AdaLN projection whole, or nothing of the kind.
  absl::Status TakeCurve() {
    std::map<int, const AdapterModule*> wholes;
    bool pairs = false;
    for (const AdapterModule& module : file_.modules) {
      const bool adaln = module.target->site >= 0 && IsAdaln(SiteOf(*module.target).kind);
      const TensorInfo* whole = module.Find(Part::kWeight) != nullptr ? module.Find(Part::kWeight) : module.Find(Part::kBias);
      if (whole != nullptr && !adaln) {
        return Bad(reason::kUnsupportedAdapterType, *whole, "a whole weight is no adapter; only a complete adapter's AdaLN projections are taken",
                   {{"type", "full weight"}});
      }
      if (whole != nullptr) wholes[module.target->site] = &module;
      pairs |= adaln && std::any_of(module.parts.begin(), module.parts.end(), [](const auto& part) { return part.first <= Part::kLokrW2B; });
    }
    if (file_.table == nullptr && wholes.empty()) return absl::OkStatus();
    const auto incomplete = [&](absl::string_view what) {
      return RefuseArgument(reason::kIncompleteCurve, absl::StrCat("a complete adapter's modulation needs its table and every AdaLN projection: ", what));
    };
    if (file_.table == nullptr) return incomplete("adaln_t_table is missing");
    const TensorInfo& table = *file_.table;
    H3_RETURN_IF_ERROR(CheckFloat(table));
    if (table.shape.size() != 2 || table.shape[0] < 2 || table.shape[1] < 1) return BadShape(table, "[rows >= 2, width]");
    if (wholes.empty() && pairs) return absl::OkStatus();  // Pairs in the coordinates of their own table: see RouteAdaln.
    if (pairs) {
      return RefuseArgument(reason::kAmbiguousNames, "the file holds both whole AdaLN projections and AdaLN pairs; which of them counts is not said");
    }
    Curve curve{.table = table};
    for (size_t i = 0; i < names_.sites().size(); ++i) {
      const Site& site = names_.sites()[i];
      if (!IsAdaln(site.kind)) continue;
      const auto found = wholes.find(static_cast<int>(i));
      const TensorInfo* weight = found == wholes.end() ? nullptr : found->second->Find(Part::kWeight);
      const TensorInfo* bias = found == wholes.end() ? nullptr : found->second->Find(Part::kBias);
      if (weight == nullptr || bias == nullptr) return incomplete(absl::StrCat(site.name, weight == nullptr ? ".weight" : ".bias", " is missing"));
      H3_RETURN_IF_ERROR(CheckFloat(*weight));
      H3_RETURN_IF_ERROR(CheckFloat(*bias));
      const std::vector<int64_t> expected = {site.out, table.shape[1]};
      if (weight->shape != expected) return BadShape(*weight, ShapeText(expected));
      if (bias->shape != std::vector<int64_t>{site.out}) return BadShape(*bias, ShapeText({site.out}));
      curve.weights.push_back(*weight);
      curve.biases.push_back(*bias);
      if (MayLeaveOutAdaln()) manifest_.left_out.push_back(site.name);
    }
    if (!MayLeaveOutAdaln()) {
      manifest_.curve = std::move(curve);
    }
    return absl::OkStatus();
  }

  // An alpha of 0 is taken at its word, but it is rarely meant. (DoRA still sets the norms of its weight.)
  void WarnOfZeroScales() {
    int64_t zero = 0;
    std::set<std::string> sources;
    for (const AdapterTerm& term : manifest_.terms) {
      const bool dora = term.low_rank.has_value() && term.low_rank->magnitude_axis != MagnitudeAxis::kNone;
      if (term.scale != 0 || dora) continue;
      ++zero;
      sources.insert(term.scale_source);
    }
    if (zero == 0) return;
    const bool all = zero == std::ssize(manifest_.terms) && manifest_.norm_offsets.empty() && !manifest_.curve.has_value();
    manifest_.warnings.push_back(absl::StrCat("alpha is 0 (", absl::StrJoin(sources, ", "), ") for ", zero, " of ",
                                              manifest_.terms.size(), " modules: ",
                                              all ? "the adapter has no effect" : "they have no effect",
                                              "; give alpha= in the request if that is not meant"));
  }

  absl::Status TakeModule(const AdapterModule& module) {
    const Target& target = *module.target;
    if (const TensorInfo* difference = module.Find(Part::kDifference); difference != nullptr) {
      H3_RETURN_IF_ERROR(TakeDifference(module, *difference));
      if (target.site < 0 && module.parts.size() == 1) return absl::OkStatus();
    }
    if (target.site < 0) {
      return Bad(reason::kUnsupportedAdapterType, module.parts.begin()->second,
                 "only a 1-D diff can be applied to a norm weight");
    }
    const Site& site = SiteOf(target);
    if (const TensorInfo* offset = module.Find(Part::kOffset); offset != nullptr) {
      H3_RETURN_IF_ERROR(CheckFloat(*offset));
      if (offset->shape != std::vector<int64_t>{target.rows.count}) return BadShape(*offset, ShapeText({target.rows.count}));
      AdapterTerm term = TermOf(module);
      term.offset = Offset{*offset};
      term.scale_source = "offset";
      manifest_.terms.push_back(std::move(term));
    }
    const TensorInfo* a = module.Find(Part::kA);
    const TensorInfo* b = module.Find(Part::kB);
    const bool lokr = module.Find(Part::kLokrW1) || module.Find(Part::kLokrW1A) || module.Find(Part::kLokrW1B) ||
                      module.Find(Part::kLokrW2) || module.Find(Part::kLokrW2A) || module.Find(Part::kLokrW2B);
    if (lokr && (a != nullptr || b != nullptr)) {
      return Bad(reason::kAmbiguousNames, *(a != nullptr ? a : b), "the module has both low-rank and LoKr factors");
    }
    if (lokr) return TakeKronecker(module, site);
    if (a == nullptr && b == nullptr) {
      for (const Part part : {Part::kAlpha, Part::kMagnitude}) {
        if (const TensorInfo* lonely = module.Find(part); lonely != nullptr) {
          return Bad(reason::kMissingPair, *lonely, "its module has no factors in the file");
        }
      }
      return absl::OkStatus();
    }
    if (a == nullptr || b == nullptr) {
      return Bad(reason::kMissingPair, *(a == nullptr ? b : a), absl::StrCat("its ", a == nullptr ? "lora_A" : "lora_B", " is missing"));
    }
    return TakeLowRank(module, site, *a, *b);
  }

  absl::Status TakeDifference(const AdapterModule& module, const TensorInfo& difference) {
    H3_RETURN_IF_ERROR(CheckFloat(difference));
    const Target& target = *module.target;
    if (target.site < 0) {
      if (difference.shape != std::vector<int64_t>{target.rows.count}) return BadShape(difference, ShapeText({target.rows.count}));
      manifest_.norm_offsets.push_back({target.norm, difference});
      return absl::OkStatus();
    }
    if (!options_.materialized) {
      return Bad(reason::kUnsupportedAdapterType, difference,
                 "a full-weight difference is as large as the weight; use apply=materialized, or extract a low-rank adapter from it",
                 {{"type", "full difference (diff)"}});
    }
    const std::vector<int64_t> expected = {target.rows.count, SiteOf(target).in};
    if (difference.shape != expected) return BadShape(difference, ShapeText(expected));
    AdapterTerm term = TermOf(module);
    term.difference = Difference{difference};
    term.scale_source = "full difference";
    manifest_.terms.push_back(std::move(term));
    return absl::OkStatus();
  }

  AdapterTerm TermOf(const AdapterModule& module) const {
    AdapterTerm term;
    term.site = module.target->site;
    term.rows = module.target->rows;
    term.row_map = module.target->row_map;
    const Site& site = SiteOf(*module.target);
    const bool whole = term.rows.count == site.out;
    if (site.kind == SiteKind::kQkv && whole) {
      const QkvLayout layout = options_.settings.qkv_layout;
      const bool interleaved = layout == QkvLayout::kAuto ? file_.interleaved_qkv : layout == QkvLayout::kInterleaved;
      term.row_map = interleaved ? RowMap::kDeinterleave : RowMap::kIdentity;
    }
    if (site.kind == SiteKind::kFc1) {
      const std::optional<bool>& set = options_.settings.fc1_gate_first;
      const std::optional<bool> gate_first = set.has_value() ? set : GateFirstInMetadata(header_.metadata);
      if (gate_first.has_value()) term.row_map = *gate_first ? RowMap::kIdentity : RowMap::kSwapHalves;
    }
    return term;
  }

  absl::Status SetScale(const AdapterModule& module, int64_t rank, AdapterTerm& term) {
    term.rank = rank;
    term.root_rank = declared_.root_rank;
    const TensorInfo* tensor = module.Find(Part::kAlpha);
    std::optional<double> own;
    if (tensor != nullptr && !AlphaGiven()) {
      H3_ASSIGN_OR_RETURN(own, ReadAlphaTensor(*tensor, read_));
    }
    if (options_.alpha.has_value()) {
      term.alpha = *options_.alpha;
      term.scale_source = "request";
    } else if (options_.settings.alpha.has_value()) {
      term.alpha = *options_.settings.alpha;
      term.scale_source = "adapter settings";
    } else if (own.has_value()) {
      term.alpha = *own;
      term.scale_source = "alpha tensor";
    } else {
      H3_RETURN_IF_ERROR(declared_.problem);
      const std::optional<double> alpha = declared_.AlphaOf(module.name);
      term.alpha = alpha.value_or(static_cast<double>(rank));
      term.scale_source = alpha.has_value() ? declared_.source : "default (alpha = rank)";
      if (alpha.has_value()) H3_RETURN_IF_ERROR(FitDeclaredRank(module, rank, term));
    }
    const double r = static_cast<double>(rank);
    term.scale = term.alpha / (term.root_rank ? std::sqrt(r) : r);
    return absl::OkStatus();
  }

  // A declared alpha is meant for the rank that is declared with it.
  absl::Status FitDeclaredRank(const AdapterModule& module, int64_t rank, AdapterTerm& term) const {
    const std::optional<int64_t> declared = declared_.RankOf(module.name);
    if (!declared.has_value() || *declared == rank) return absl::OkStatus();
    const Site& site = SiteOf(*module.target);
    if (site.kind == SiteKind::kQkv && term.rows.count == site.out && rank == 3 * *declared && !term.root_rank) {
      term.alpha *= 3;  // Three projections of the declared rank, fused: the factors are theirs, and so is the scale.
      return absl::OkStatus();
    }
    return RefuseArgument(reason::kBadScale,
                          absl::StrCat("the metadata declare rank ", *declared, " with alpha ", term.alpha, ", module ", module.name, " has rank ", rank,
                                       " and no alpha of its own; which scale is meant is not said (give alpha= in the request, or `adapters set`)"),
                          {{"tensor", module.name}, {"declared_rank", absl::StrCat(*declared)}, {"rank", absl::StrCat(rank)}});
  }

  absl::Status TakeLowRank(const AdapterModule& module, const Site& site, const TensorInfo& a, const TensorInfo& b) {
    H3_RETURN_IF_ERROR(CheckFloat(a));
    H3_RETURN_IF_ERROR(CheckFloat(b));
    AdapterTerm term = TermOf(module);
    const int64_t rows = term.rows.count;
    if (a.shape.size() != 2 || b.shape.size() != 2) return BadShape(a.shape.size() != 2 ? a : b, "two dimensions");
    if (a.shape[0] < 1) return BadShape(a, "a rank of at least 1");
    int64_t in = site.in;
    if (IsAdaln(site.kind)) {
      H3_ASSIGN_OR_RETURN(const std::optional<int64_t> width, RouteAdaln(site, a, a.shape[1], term));
      if (!width.has_value()) return absl::OkStatus();
      in = *width;
    }
    if (a.shape[1] != in || b.shape[0] != rows) {
      const bool swapped = a.shape[0] == rows && b.shape[1] == in && a.shape[1] == b.shape[0];
      const bool transposed = a.shape[0] == in && b.shape[1] == rows && a.shape[1] == b.shape[0];
      const absl::string_view hint = swapped      ? "lora_A and lora_B seem to have each other's names"
                                     : transposed ? "the factors seem to be stored transposed"
                                                  : "";
      if (a.shape[1] != in) return BadShape(a, absl::StrCat("[rank, ", in, "]"), hint);
      return BadShape(b, absl::StrCat("[", rows, ", rank]"), hint);
    }
    if (a.shape[0] != b.shape[1]) {
      return Bad(reason::kRankMismatch, b, absl::StrCat("has rank ", b.shape[1], ", its lora_A has rank ", a.shape[0]),
                 {{"rank_a", absl::StrCat(a.shape[0])}, {"rank_b", absl::StrCat(b.shape[1])}});
    }
    if (a.shape[0] > kMaxRank) {
      return Bad(reason::kUnsupportedAdapterType, a, absl::StrCat("has rank ", a.shape[0], "; at most ", kMaxRank, " can be applied"),
                 {{"rank", absl::StrCat(a.shape[0])}});
    }
    H3_RETURN_IF_ERROR(SetScale(module, a.shape[0], term));
    LowRank low_rank{.a = a, .b = b};
    if (const TensorInfo* magnitude = module.Find(Part::kMagnitude); magnitude != nullptr) {
      H3_RETURN_IF_ERROR(TakeMagnitude(*magnitude, rows, in, low_rank));
      if (low_rank.magnitude_axis == MagnitudeAxis::kColumns && rows != site.out && options_.interleaved_base) {
        return Bad(reason::kUnsupportedDora, *magnitude,
                   "DoRA by columns on q, k or v alone cannot be applied to a base whose qkv rows are stored per head; convert the base");
      }
      if (IsAdaln(site.kind) && (geometry_.pruned() || term.features != AdalnFeatures::kBase)) {
        return Bad(reason::kUnsupportedDora, *magnitude, "DoRA on the AdaLN projection of a pruned base has no weight to take its norm from");
      }
    }
    term.low_rank = std::move(low_rank);
    manifest_.terms.push_back(std::move(term));
    return absl::OkStatus();
  }

  absl::Status TakeMagnitude(const TensorInfo& magnitude, int64_t rows, int64_t in, LowRank& low_rank) const {
    H3_RETURN_IF_ERROR(CheckFloat(magnitude));
    const std::vector<int64_t>& shape = magnitude.shape;
    if (shape == std::vector<int64_t>{rows} || shape == std::vector<int64_t>{rows, 1}) {
      low_rank.magnitude_axis = MagnitudeAxis::kRows;
    } else if (shape == std::vector<int64_t>{1, in}) {
      low_rank.magnitude_axis = MagnitudeAxis::kColumns;
    } else {
      return BadShape(magnitude, absl::StrCat("[", rows, "], [", rows, ", 1] (rows) or [1, ", in, "] (columns)"));
    }
    low_rank.magnitude = magnitude;
    return absl::OkStatus();
  }

  // To which features an AdaLN term of that input width is applied, and their width. nullopt: left out, as allowed.
  absl::StatusOr<std::optional<int64_t>> RouteAdaln(const Site& site, const TensorInfo& tensor, int64_t width, AdapterTerm& term) {
    if (file_.table != nullptr && width == file_.table->shape[1]) {
      term.features = AdalnFeatures::kOwnTable;
      if (!manifest_.own_table.has_value()) {
        manifest_.own_table = *file_.table;
      }
      return width;
    }
    if (!geometry_.pruned() && width == site.in) return width;
    if (geometry_.pruned() && width != site.in && options_.base_has_grid && width == options_.grid_width) {
      term.features = AdalnFeatures::kGrid;
      return width;
    }
    if (MayLeaveOutAdaln()) {
      manifest_.left_out.push_back(site.name);
      return std::nullopt;
    }
    const ErrorDetails details = {{"tensor", tensor.name}, {"shape", ShapeText(tensor.shape)}};
    if (!geometry_.pruned()) {
      return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                    absl::StrCat("tensor ", tensor.name, ": an AdaLN pair of width ", width, " on a full base of width ", site.in,
                                 "; it is in the coordinates of a pruned base's table (with that adaln_t_table in the file it can be applied)"),
                    details);
    }
    if (width == site.in) {
      // The coordinates are arbitrary up to a linear change, so that fitting proves nothing.
      return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                    absl::StrCat("tensor ", tensor.name, ": an AdaLN pair in table coordinates, and the file holds no adaln_t_table to say "
                                 "which; add the table of the base that it was made for, or allow leave-out=adaln"),
                    details);
    }
    if (options_.base_has_grid) return BadShape(tensor, absl::StrCat("[rank, ", options_.grid_width, "] (the silu grid's width)"));
    return Refuse(absl::StatusCode::kFailedPrecondition, reason::kAdalnNeedsGrid,
                  absl::StrCat("tensor ", tensor.name, ": AdaLN pairs of width ", width, " on a pruned base of width ", site.in,
                               " need the full model's time embedding; start the server with --silu-grid, or allow leave-out=adaln"),
                  details);
  }

  absl::Status TakeKronecker(const AdapterModule& module, const Site& site) {
    Kronecker kronecker;
    int64_t rank = 0;
    int64_t rows = 1, columns = 1;
    int64_t largest = 0;  // Elements of the factors as they are applied: halves as their product.
    const TensorInfo* shown = nullptr;
    const auto factor = [&](Part whole, Part left, Part right, absl::string_view name, std::optional<TensorInfo>& into,
                            std::optional<TensorInfo>& into_a, std::optional<TensorInfo>& into_b) -> absl::Status {
      const TensorInfo* w = module.Find(whole);
      const TensorInfo* l = module.Find(left);
      const TensorInfo* r = module.Find(right);
      for (const TensorInfo* t : {w, l, r}) {
        if (t == nullptr) continue;
        H3_RETURN_IF_ERROR(CheckFloat(*t));
        if (t->shape.size() != 2 || t->shape[0] < 1 || t->shape[1] < 1) return BadShape(*t, "two dimensions of at least 1");
        shown = t;
      }
      // Sizes beyond int64 fit no module.
      const auto grow = [&](int64_t more_rows, int64_t more_columns) {
        int64_t elements = 0;
        if (__builtin_mul_overflow(more_rows, more_columns, &elements)) elements = std::numeric_limits<int64_t>::max() / 16;
        largest = std::max(largest, elements);
        if (__builtin_mul_overflow(rows, more_rows, &rows) || __builtin_mul_overflow(columns, more_columns, &columns)) rows = -1;
      };
      if (w != nullptr && l == nullptr && r == nullptr) {
        into = *w;
        grow(w->shape[0], w->shape[1]);
        return absl::OkStatus();
      }
      if (w != nullptr) return Bad(reason::kAmbiguousNames, *w, "given both whole and in two parts");
      if (l == nullptr || r == nullptr) {
        return RefuseArgument(reason::kMissingPair, absl::StrCat("module ", module.name, ": LoKr factor ", name, " is incomplete"), {{"tensor", module.name}});
      }
      if (l->shape[1] != r->shape[0]) {
        return Bad(reason::kRankMismatch, *r, absl::StrCat("has rank ", r->shape[0], ", its other half has rank ", l->shape[1]));
      }
      rank = l->shape[1];
      into_a = *l;
      into_b = *r;
      grow(l->shape[0], r->shape[1]);
      return absl::OkStatus();
    };
    H3_RETURN_IF_ERROR(factor(Part::kLokrW1, Part::kLokrW1A, Part::kLokrW1B, "w1", kronecker.w1, kronecker.w1_a, kronecker.w1_b));
    H3_RETURN_IF_ERROR(factor(Part::kLokrW2, Part::kLokrW2A, Part::kLokrW2B, "w2", kronecker.w2, kronecker.w2_a, kronecker.w2_b));
    AdapterTerm term = TermOf(module);
    int64_t in = site.in;
    if (IsAdaln(site.kind) && rows == term.rows.count) {
      H3_ASSIGN_OR_RETURN(const std::optional<int64_t> width, RouteAdaln(site, *shown, columns, term));
      if (!width.has_value()) return absl::OkStatus();
      in = *width;
    }
    if (rows != term.rows.count || columns != in) {
      return RefuseArgument(reason::kShapeMismatch,
                            absl::StrCat("module ", module.name, ": the Kronecker product is [", rows, ", ", columns, "], the module [",
                                         term.rows.count, ", ", in, "]"),
                            {{"tensor", shown->name}, {"shape", ShapeText({rows, columns})}, {"expected", ShapeText({term.rows.count, in})}});
    }
    if (const TensorInfo* magnitude = module.Find(Part::kMagnitude); magnitude != nullptr) {
      return Bad(reason::kUnsupportedDora, *magnitude, "DoRA over LoKr factors cannot be applied");
    }
    if (!options_.materialized && 2 * largest > rows * columns) {
      return Bad(reason::kUnsupportedAdapterType, *shown,
                 "a LoKr with one factor about as large as the weight is a full difference; use apply=materialized, or extract a low-rank "
                 "adapter from it",
                 {{"type", "full difference (LoKr)"}});
    }
    if (rank > 0) {
      H3_RETURN_IF_ERROR(SetScale(module, rank, term));
    } else {
      if (const TensorInfo* alpha = module.Find(Part::kAlpha); alpha != nullptr) H3_RETURN_IF_ERROR(ReadAlphaTensor(*alpha, read_).status());
      term.scale_source = "whole factors (scale 1)";
    }
    term.kronecker = std::move(kronecker);
    manifest_.terms.push_back(std::move(term));
    return absl::OkStatus();
  }

  // Two spellings of one module in one file: which of them counts is not said.
  absl::Status CheckOverlaps() const {
    for (size_t i = 1; i < manifest_.terms.size(); ++i) {
      for (size_t j = i; j-- > 0 && manifest_.terms[j].site == manifest_.terms[i].site;) {
        const AdapterTerm& first = manifest_.terms[j];
        const AdapterTerm& second = manifest_.terms[i];
        if (first.offset.has_value() != second.offset.has_value()) continue;
        if (first.rows.begin < second.rows.begin + second.rows.count && second.rows.begin < first.rows.begin + first.rows.count) {
          const std::string& name = names_.sites()[static_cast<size_t>(second.site)].name;
          return RefuseArgument(reason::kAmbiguousNames, absl::StrCat("two names in the file lead to ", name), {{"tensor", name}});
        }
      }
    }
    return absl::OkStatus();
  }

  const SafetensorsHeader& header_;
  const TensorReader& read_;
  const Geometry& geometry_;
  const IntakeOptions& options_;
  const ModuleNames names_;
  AdapterModules file_;
  DeclaredScale declared_;
  AdapterManifest manifest_;
};

}  // namespace

absl::StatusOr<AdapterManifest> ReadAdapter(const SafetensorsHeader& header, const TensorReader& read, const Geometry& geometry,
                                            const IntakeOptions& options) {
  return Intake(header, read, geometry, options).Run();
}

std::vector<EffectiveScale> SummariseScales(const std::vector<TermScale>& terms) {
  std::map<std::tuple<absl::string_view, int64_t, double, double, std::string>, int64_t> lines;
  for (const TermScale& term : terms) ++lines[{SiteKindName(term.kind), term.rank, term.alpha, term.scale, term.source}];
  std::vector<EffectiveScale> scales;
  for (const auto& [key, modules] : lines) {
    const auto& [kind, rank, alpha, scale, source] = key;
    scales.push_back({std::string(kind), modules, rank, alpha, scale, source});
  }
  return scales;
}

std::vector<EffectiveScale> SummariseScales(const AdapterManifest& manifest, const Geometry& geometry) {
  const std::vector<Site> sites = Sites(geometry);
  std::vector<TermScale> terms;
  for (const AdapterTerm& term : manifest.terms) {
    terms.push_back({sites[static_cast<size_t>(term.site)].kind, term.rank, term.alpha, term.scale, term.scale_source});
  }
  return SummariseScales(terms);
}

}  // namespace h3
