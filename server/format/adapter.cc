#include "server/format/adapter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/format/adapter_names.h"
#include "server/format/adapter_scale.h"

namespace h3 {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

// The parts of one module, as one spelling of its name gives them.
struct Module {
  std::string name;  // As the file spells it, without prefix.
  const Target* target = nullptr;
  std::map<Part, const TensorInfo*> parts;

  const TensorInfo* Find(Part part) const {
    const auto found = parts.find(part);
    return found == parts.end() ? nullptr : found->second;
  }
};

absl::Status Bad(absl::string_view reason, const TensorInfo& tensor, absl::string_view what, ErrorDetails details = {}) {
  details["tensor"] = tensor.name;
  return RefuseArgument(reason, absl::StrCat("tensor ", tensor.name, ": ", what), std::move(details));
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

bool IsAdaln(SiteKind kind) { return kind == SiteKind::kAdaln || kind == SiteKind::kFinalAdaln; }

// True where a trainer's metadata say in words which partition the adapter is for.
Partition PartitionInMetadata(const std::map<std::string, std::string>& metadata) {
  bool fl2va = false, ref2va = false;
  for (const auto& [key, value] : metadata) {
    const std::string name = absl::AsciiStrToLower(key), text = absl::AsciiStrToLower(value);
    if (!absl::StrContains(name, "partition") && !absl::StrContains(name, "base_model") && !absl::StrContains(name, "architecture")) continue;
    fl2va |= absl::StrContains(text, "fl2va");
    ref2va |= absl::StrContains(text, "ref2va");
  }
  return fl2va == ref2va ? Partition::kUnknown : fl2va ? Partition::kFl2va : Partition::kRef2va;
}

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
    H3_RETURN_IF_ERROR(ParseNames());
    H3_RETURN_IF_ERROR(ChoosePartition());
    H3_RETURN_IF_ERROR(GroupByModule());
    H3_ASSIGN_OR_RETURN(declared_, ReadDeclaredScale(header_.metadata, options_.peft_config, section_.empty() ? "transformer" : section_));
    H3_RETURN_IF_ERROR(TakeCurve());
    for (const Module& module : modules_) H3_RETURN_IF_ERROR(TakeModule(module));
    H3_RETURN_IF_ERROR(CheckDeclaredRank());
    std::stable_sort(manifest_.terms.begin(), manifest_.terms.end(),
                     [](const AdapterTerm& a, const AdapterTerm& b) { return a.site < b.site; });
    H3_RETURN_IF_ERROR(CheckOverlaps());
    NameFormat();
    if (manifest_.terms.empty() && manifest_.norm_offsets.empty() && !manifest_.curve.has_value()) {
      return RefuseArgument(reason::kNoAdapterTensors, "nothing of the file is left to apply", {{"left_out", absl::StrCat(manifest_.left_out.size())}});
    }
    return std::move(manifest_);
  }

 private:
  struct Named {
    const TensorInfo* tensor;
    ParsedName name;
  };

  // Tensor names -> parts of modules; the kinds that cannot be applied are refused here.
  absl::Status ParseNames() {
    const TensorInfo* stranger = nullptr;
    for (const TensorInfo& tensor : header_.tensors) {
      std::optional<ParsedName> name = ParseTensorName(tensor.name);
      if (!name.has_value()) {
        if (stranger == nullptr) stranger = &tensor;
        continue;
      }
      if (name->part == Part::kUnsupported) {
        return Bad(reason::kUnsupportedAdapterType, tensor, absl::StrCat("adapters of the kind ", name->unsupported, " cannot be applied at run time"),
                   {{"type", std::string(name->unsupported)}});
      }
      named_.push_back({&tensor, std::move(*name)});
    }
    const bool any = std::any_of(named_.begin(), named_.end(), [](const Named& n) { return n.name.part != Part::kWeight && n.name.part != Part::kBias; });
    if (!any) {
      return RefuseArgument(reason::kNoAdapterTensors,
                            absl::StrCat("none of the file's ", header_.tensors.size(), " tensors is part of an adapter",
                                         header_.tensors.empty() ? "" : absl::StrCat(" (the first is ", header_.tensors.front().name, ")")));
    }
    if (stranger != nullptr) {
      return Bad(reason::kUnknownModule, *stranger, "is no known part of an adapter; nothing may be dropped, so the file is refused");
    }
    return absl::OkStatus();
  }

  // A file may hold a section for each partition: this base's is taken, the other reported.
  absl::Status ChoosePartition() {
    const auto has = [&](absl::string_view section) {
      return std::any_of(named_.begin(), named_.end(), [&](const Named& n) { return n.name.section == section; });
    };
    const bool ref = has("transformer_ref"), plain = has("transformer") || has("");
    manifest_.partition = PartitionInMetadata(header_.metadata);
    if (ref && plain) {
      section_ = options_.base_partition == Partition::kRef2va ? "transformer_ref" : "transformer";
      const std::string other = section_ == "transformer" ? "transformer_ref" : "transformer";
      std::erase_if(named_, [&](const Named& n) { return (n.name.section == "transformer_ref") != (section_ == "transformer_ref"); });
      manifest_.ignored_sections.push_back(other);
      manifest_.warnings.push_back(absl::StrCat("the file holds both partitions; ", section_, " is taken, ", other, " ignored",
                                                options_.base_partition == Partition::kUnknown ? " (the base's partition is unknown)" : ""));
      manifest_.partition = section_ == "transformer_ref" ? Partition::kRef2va : Partition::kFl2va;
    } else if (ref) {
      section_ = "transformer_ref";
      manifest_.partition = Partition::kRef2va;
    }
    const Partition declared = manifest_.partition, base = options_.base_partition;
    if (declared != Partition::kUnknown && base != Partition::kUnknown && declared != base) {
      return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                    absl::StrCat("the adapter is for the ", PartitionName(declared), " partition, this base is ", PartitionName(base)),
                    {{"adapter_partition", std::string(PartitionName(declared))}, {"base_partition", std::string(PartitionName(base))}});
    }
    if (declared != Partition::kUnknown && base == Partition::kUnknown) {
      manifest_.warnings.push_back(absl::StrCat("the adapter is for the ", PartitionName(declared), " partition; the base's is unknown"));
    }
    return absl::OkStatus();
  }

  absl::Status GroupByModule() {
    std::map<std::pair<Naming, std::string>, size_t> index;
    std::vector<const TensorInfo*> unknown;
    for (const Named& named : named_) {
      const ParsedName& name = named.name;
      if (name.part == Part::kTable) {
        if (table_ != nullptr) return Bad(reason::kAmbiguousNames, *named.tensor, "a second adaln_t_table");
        table_ = named.tensor;
        continue;
      }
      const Target* target = names_.Find(name);
      if (target == nullptr) {
        if (geometry_.pruned() && absl::StrContains(name.module, "time_embedder")) {
          return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                        absl::StrCat("tensor ", named.tensor->name, ": a pruned base has no time embedder to adapt; use a full base"),
                        {{"tensor", named.tensor->name}});
        }
        unknown.push_back(named.tensor);
        continue;
      }
      const auto [found, fresh] = index.try_emplace({name.naming, name.module}, modules_.size());
      if (fresh) modules_.push_back({.name = name.module, .target = target});
      if (!modules_[found->second].parts.emplace(name.part, named.tensor).second) {
        return Bad(reason::kAmbiguousNames, *named.tensor, absl::StrCat("module ", name.module, " has this part twice"));
      }
    }
    if (!unknown.empty()) {
      std::vector<std::string> shown;
      for (size_t i = 0; i < std::min<size_t>(3, unknown.size()); ++i) shown.push_back(unknown[i]->name);
      return RefuseArgument(reason::kUnknownModule,
                            absl::StrCat(unknown.size(), " of ", header_.tensors.size(), " tensors name no module of this model (",
                                         geometry_.blocks, " blocks): ", absl::StrJoin(shown, ", ")),
                            {{"tensor", unknown.front()->name}, {"count", absl::StrCat(unknown.size())}});
    }
    return absl::OkStatus();
  }

  bool MayLeaveOutAdaln() const {
    return std::find(options_.leave_out.begin(), options_.leave_out.end(), "adaln") != options_.leave_out.end();
  }

  const Site& SiteOf(const Target& target) const { return names_.sites()[static_cast<size_t>(target.site)]; }

  // A complete pruned adapter: its own table and every AdaLN projection whole, or nothing of the kind.
  absl::Status TakeCurve() {
    std::map<int, const Module*> wholes;
    bool pairs = false;
    for (const Module& module : modules_) {
      const bool adaln = module.target->site >= 0 && IsAdaln(SiteOf(*module.target).kind);
      const TensorInfo* whole = module.Find(Part::kWeight) != nullptr ? module.Find(Part::kWeight) : module.Find(Part::kBias);
      if (whole != nullptr && !adaln) {
        return Bad(reason::kUnsupportedAdapterType, *whole, "a whole weight is no adapter; only a complete adapter's AdaLN projections are taken",
                   {{"type", "full weight"}});
      }
      if (whole != nullptr) wholes[module.target->site] = &module;
      pairs |= adaln && (module.Find(Part::kA) != nullptr || module.Find(Part::kB) != nullptr);
    }
    if (table_ == nullptr && wholes.empty()) return absl::OkStatus();
    if (table_ != nullptr && wholes.empty() && pairs) return absl::OkStatus();  // Pairs in the coordinates of their own table.
    const auto incomplete = [&](absl::string_view what) {
      return RefuseArgument(reason::kIncompleteCurve, absl::StrCat("a complete adapter's modulation needs its table and every AdaLN projection: ", what));
    };
    if (table_ == nullptr) return incomplete("adaln_t_table is missing");
    if (pairs) {
      return RefuseArgument(reason::kAmbiguousNames, "the file holds both whole AdaLN projections and AdaLN pairs; which of them counts is not said");
    }
    H3_RETURN_IF_ERROR(CheckFloat(*table_));
    if (table_->shape.size() != 2 || table_->shape[0] < 2 || table_->shape[1] < 1) return BadShape(*table_, "[rows >= 2, width]");
    Curve curve{.table = *table_};
    for (size_t i = 0; i < names_.sites().size(); ++i) {
      const Site& site = names_.sites()[i];
      if (!IsAdaln(site.kind)) continue;
      const auto found = wholes.find(static_cast<int>(i));
      const TensorInfo* weight = found == wholes.end() ? nullptr : found->second->Find(Part::kWeight);
      const TensorInfo* bias = found == wholes.end() ? nullptr : found->second->Find(Part::kBias);
      if (weight == nullptr || bias == nullptr) return incomplete(absl::StrCat(site.name, weight == nullptr ? ".weight" : ".bias", " is missing"));
      H3_RETURN_IF_ERROR(CheckFloat(*weight));
      H3_RETURN_IF_ERROR(CheckFloat(*bias));
      const std::vector<int64_t> expected = {site.out, table_->shape[1]};
      if (weight->shape != expected) return BadShape(*weight, ShapeText(expected));
      if (bias->shape != std::vector<int64_t>{site.out}) return BadShape(*bias, ShapeText({site.out}));
      curve.weights.push_back(*weight);
      curve.biases.push_back(*bias);
      if (MayLeaveOutAdaln()) manifest_.left_out.push_back(site.name);
    }
    if (!MayLeaveOutAdaln()) {
      manifest_.device_bytes += 4 * table_->shape[0] * table_->shape[1];
      for (const std::vector<TensorInfo>* list : {&curve.weights, &curve.biases}) {
        for (const TensorInfo& info : *list) manifest_.device_bytes += info.bytes;
      }
      manifest_.curve = std::move(curve);
    }
    return absl::OkStatus();
  }

  absl::Status TakeModule(const Module& module) {
    const Target& target = *module.target;
    if (const TensorInfo* difference = module.Find(Part::kDifference); difference != nullptr) {
      H3_RETURN_IF_ERROR(TakeDifference(module, *difference));
      if (target.site < 0 && module.parts.size() == 1) return absl::OkStatus();
    }
    if (target.site < 0) {
      return Bad(reason::kUnsupportedAdapterType, *module.parts.begin()->second, "only a 1-D diff can be applied to a norm weight");
    }
    const Site& site = SiteOf(target);
    if (const TensorInfo* offset = module.Find(Part::kOffset); offset != nullptr) {
      H3_RETURN_IF_ERROR(CheckFloat(*offset));
      if (offset->shape != std::vector<int64_t>{target.rows.count}) return BadShape(*offset, ShapeText({target.rows.count}));
      AdapterTerm term = TermOf(module);
      term.offset = Offset{*offset};
      term.scale_source = "offset";
      manifest_.device_bytes += 4 * target.rows.count;
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

  absl::Status TakeDifference(const Module& module, const TensorInfo& difference) {
    if (module.target->site >= 0) {
      return Bad(reason::kUnsupportedAdapterType, difference,
                 "a full-weight difference is as large as the weight; extract a low-rank adapter from it", {{"type", "full difference (diff)"}});
    }
    H3_RETURN_IF_ERROR(CheckFloat(difference));
    if (difference.shape != std::vector<int64_t>{module.target->rows.count}) return BadShape(difference, ShapeText({module.target->rows.count}));
    manifest_.device_bytes += 4 * module.target->rows.count;
    manifest_.norm_offsets.push_back({module.target->norm, difference});
    return absl::OkStatus();
  }

  AdapterTerm TermOf(const Module& module) const {
    AdapterTerm term;
    term.site = module.target->site;
    term.rows = module.target->rows;
    term.row_map = module.target->row_map;
    const Site& site = SiteOf(*module.target);
    const bool whole = term.rows.count == site.out;
    if (site.kind == SiteKind::kQkv && whole) {
      const bool interleaved = options_.qkv_layout.has_value() && *options_.qkv_layout != QkvLayout::kAuto
                                   ? *options_.qkv_layout == QkvLayout::kInterleaved
                                   : IsDiffSynth();
      term.row_map = interleaved ? RowMap::kDeinterleave : RowMap::kIdentity;
    }
    if (site.kind == SiteKind::kFc1) {
      const std::optional<bool> gate_first =
          options_.fc1_gate_first.has_value() ? options_.fc1_gate_first : GateFirstInMetadata(header_.metadata);
      if (gate_first.has_value()) term.row_map = *gate_first ? RowMap::kIdentity : RowMap::kSwapHalves;
    }
    return term;
  }

  // DiffSynth writes peft's infix over the reference names, and its qkv rows are per head.
  bool IsDiffSynth() const {
    return std::any_of(named_.begin(), named_.end(), [&](const Named& n) {
      return n.name.default_infix && !n.name.peft_prefix && n.name.section.empty() && names_.Find(n.name) != nullptr && !names_.Find(n.name)->diffusers;
    });
  }

  absl::Status SetScale(const Module& module, int64_t rank, AdapterTerm& term) {
    term.rank = rank;
    term.root_rank = declared_.root_rank;
    const TensorInfo* tensor = module.Find(Part::kAlpha);
    std::optional<double> own;
    if (tensor != nullptr) {
      H3_ASSIGN_OR_RETURN(own, ReadAlphaTensor(*tensor, read_));
    }
    if (options_.alpha.has_value()) {
      term.alpha = *options_.alpha;
      term.scale_source = "request";
    } else if (own.has_value()) {
      term.alpha = *own;
      term.scale_source = "alpha tensor";
    } else if (const auto declared = declared_.AlphaOf(module.name); declared.has_value()) {
      term.alpha = *declared;
      term.scale_source = declared_.source;
    } else {
      term.alpha = static_cast<double>(rank);
      term.scale_source = "default (alpha = rank)";
    }
    const double r = static_cast<double>(rank);
    term.scale = term.alpha / (term.root_rank ? std::sqrt(r) : r);
    ranks_.insert(rank);
    declared_ranks_met_ |= declared_.RankOf(module.name) == rank;
    return absl::OkStatus();
  }

  // A declared rank that no module has means that the file is not what its metadata say.
  absl::Status CheckDeclaredRank() const {
    if (!declared_.rank.has_value() || ranks_.empty() || declared_ranks_met_ || declared_.alpha == std::nullopt) return absl::OkStatus();
    // Fused projections of a converted file have three times the declared rank, or the declared rank is theirs.
    for (const int64_t rank : ranks_) {
      if (*declared_.rank == 3 * rank || rank == 3 * *declared_.rank) return absl::OkStatus();
    }
    return RefuseArgument(reason::kBadScale,
                          absl::StrCat("the metadata declare rank ", *declared_.rank, ", the factors have rank ", absl::StrJoin(ranks_, ", "),
                                       "; alpha cannot be trusted (give alpha= in the request)"),
                          {{"declared_rank", absl::StrCat(*declared_.rank)}});
  }

  absl::Status TakeLowRank(const Module& module, const Site& site, const TensorInfo& a, const TensorInfo& b) {
    H3_RETURN_IF_ERROR(CheckFloat(a));
    H3_RETURN_IF_ERROR(CheckFloat(b));
    AdapterTerm term = TermOf(module);
    const int64_t rows = term.rows.count;
    if (a.shape.size() != 2 || b.shape.size() != 2) return BadShape(a.shape.size() != 2 ? a : b, "two dimensions");
    if (a.shape[0] < 1) return BadShape(a, "a rank of at least 1");
    int64_t in = site.in;
    if (IsAdaln(site.kind) && a.shape[1] != site.in) {
      H3_ASSIGN_OR_RETURN(const bool taken, RouteAdaln(site, a, in, term));
      if (!taken) return absl::OkStatus();
    } else if (IsAdaln(site.kind) && geometry_.pruned()) {
      return TableCoordinates(site, a);
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
    H3_RETURN_IF_ERROR(SetScale(module, a.shape[0], term));
    LowRank low_rank{.a = a, .b = b};
    if (const TensorInfo* magnitude = module.Find(Part::kMagnitude); magnitude != nullptr) {
      H3_RETURN_IF_ERROR(TakeMagnitude(*magnitude, rows, in, low_rank));
      if (low_rank.magnitude_axis == MagnitudeAxis::kColumns && rows != site.out) {
        return Bad(reason::kUnsupportedDora, *magnitude, "DoRA by columns on a part of a fused projection cannot be applied");
      }
      if (IsAdaln(site.kind) && geometry_.pruned()) {
        return Bad(reason::kUnsupportedDora, *magnitude, "DoRA on the AdaLN projection of a pruned base has no weight to take its norm from");
      }
    }
    manifest_.device_bytes += a.bytes + b.bytes + low_rank.magnitude.bytes;
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

  // An AdaLN pair whose width is not the base's. `in` becomes the width that it is applied at. False: left out, as allowed.
  absl::StatusOr<bool> RouteAdaln(const Site& site, const TensorInfo& a, int64_t& in, AdapterTerm& term) {
    if (!geometry_.pruned()) {
      return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                    absl::StrCat("tensor ", a.name, ": an AdaLN pair of width ", a.shape[1], " on a full base of width ", site.in,
                                 "; it is in the coordinates of a pruned base's table"),
                    {{"tensor", a.name}, {"shape", ShapeText(a.shape)}, {"expected", absl::StrCat("[rank, ", site.in, "]")}});
    }
    if (options_.base_has_grid) {
      if (a.shape[1] != options_.grid_width) return BadShape(a, absl::StrCat("[rank, ", options_.grid_width, "] (the silu grid's width)"));
      in = options_.grid_width;
      term.through_grid = true;
      return true;
    }
    if (MayLeaveOutAdaln()) {
      manifest_.left_out.push_back(site.name);
      return false;
    }
    return Refuse(absl::StatusCode::kFailedPrecondition, reason::kAdalnNeedsGrid,
                  absl::StrCat("tensor ", a.name, ": AdaLN pairs of width ", a.shape[1], " on a pruned base of width ", site.in,
                               " need the full model's time embedding; start the server with --silu-grid, or allow leave-out=adaln"),
                  {{"tensor", a.name}, {"shape", ShapeText(a.shape)}, {"expected", absl::StrCat("[rank, ", site.in, "]")}});
  }

  // A pair that fits the table's width: the eight coordinates are arbitrary up to a linear change, so that fitting proves nothing.
  absl::Status TableCoordinates(const Site& site, const TensorInfo& a) {
    if (MayLeaveOutAdaln()) {
      manifest_.left_out.push_back(site.name);
      return absl::OkStatus();
    }
    return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                  absl::StrCat("tensor ", a.name, ": an AdaLN pair in table coordinates; nothing proves that they are this base's (allow leave-out=adaln to drop it)"),
                  {{"tensor", a.name}});
  }

  absl::Status TakeKronecker(const Module& module, const Site& site) {
    Kronecker kronecker;
    int64_t rank = 0;
    int64_t rows = 1, columns = 1;
    const TensorInfo* shown = nullptr;
    const auto factor = [&](Part whole, Part left, Part right, absl::string_view name, std::optional<TensorInfo>& into,
                            std::optional<TensorInfo>& into_a, std::optional<TensorInfo>& into_b) -> absl::Status {
      const TensorInfo* w = module.Find(whole);
      const TensorInfo* l = module.Find(left);
      const TensorInfo* r = module.Find(right);
      for (const TensorInfo* t : {w, l, r}) {
        if (t == nullptr) continue;
        H3_RETURN_IF_ERROR(CheckFloat(*t));
        if (t->shape.size() != 2) return BadShape(*t, "two dimensions");
        manifest_.device_bytes += t->bytes;
        shown = t;
      }
      if (w != nullptr && l == nullptr && r == nullptr) {
        into = *w;
        rows *= w->shape[0];
        columns *= w->shape[1];
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
      rows *= l->shape[0];
      columns *= r->shape[1];
      return absl::OkStatus();
    };
    H3_RETURN_IF_ERROR(factor(Part::kLokrW1, Part::kLokrW1A, Part::kLokrW1B, "w1", kronecker.w1, kronecker.w1_a, kronecker.w1_b));
    H3_RETURN_IF_ERROR(factor(Part::kLokrW2, Part::kLokrW2A, Part::kLokrW2B, "w2", kronecker.w2, kronecker.w2_a, kronecker.w2_b));
    AdapterTerm term = TermOf(module);
    if (rows != term.rows.count || columns != site.in) {
      return RefuseArgument(reason::kShapeMismatch,
                            absl::StrCat("module ", module.name, ": the Kronecker product is [", rows, ", ", columns, "], the module [",
                                         term.rows.count, ", ", site.in, "]"),
                            {{"tensor", shown->name}, {"shape", ShapeText({rows, columns})}, {"expected", ShapeText({term.rows.count, site.in})}});
    }
    if (const TensorInfo* magnitude = module.Find(Part::kMagnitude); magnitude != nullptr) {
      return Bad(reason::kUnsupportedDora, *magnitude, "DoRA over LoKr factors cannot be applied");
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

  void NameFormat() {
    bool peft = false, lycoris = false, flat = false, diffusers = false;
    for (const Named& n : named_) {
      peft |= n.name.peft_prefix;
      lycoris |= n.name.lycoris_prefix;
      flat |= n.name.naming == Naming::kFlattened;
      const Target* target = names_.Find(n.name);
      diffusers |= target != nullptr && target->diffusers;
    }
    manifest_.format = lycoris ? "lycoris" : peft ? "peft" : diffusers ? "diffusers" : flat ? "kohya" : IsDiffSynth() ? "diffsynth" : "reference";
  }

  const SafetensorsHeader& header_;
  const TensorReader& read_;
  const Geometry& geometry_;
  const IntakeOptions& options_;
  const ModuleNames names_;
  std::vector<Named> named_;
  std::vector<Module> modules_;
  const TensorInfo* table_ = nullptr;
  std::string section_;
  DeclaredScale declared_;
  std::set<int64_t> ranks_;
  bool declared_ranks_met_ = false;
  AdapterManifest manifest_;
};

}  // namespace

absl::StatusOr<AdapterManifest> ReadAdapter(const SafetensorsHeader& header, const TensorReader& read, const Geometry& geometry,
                                            const IntakeOptions& options) {
  return Intake(header, read, geometry, options).Run();
}

std::vector<EffectiveScale> SummariseScales(const AdapterManifest& manifest, const Geometry& geometry) {
  const std::vector<Site> sites = Sites(geometry);
  std::map<std::tuple<std::string, int64_t, double, double, std::string>, int64_t> lines;
  for (const AdapterTerm& term : manifest.terms) {
    ++lines[{std::string(SiteKindName(sites[static_cast<size_t>(term.site)].kind)), term.rank, term.alpha, term.scale, term.scale_source}];
  }
  std::vector<EffectiveScale> scales;
  for (const auto& [key, modules] : lines) {
    const auto& [kind, rank, alpha, scale, source] = key;
    scales.push_back({kind, modules, rank, alpha, scale, source});
  }
  return scales;
}

}  // namespace h3
