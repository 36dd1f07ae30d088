#include "client/cli/inspect_command.h"

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/adapter_file.h"
#include "client/cli/exit_code.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"
#include "server/base/status_macros.h"
#include "server/format/adapter.h"
#include "server/format/adapter_shape.h"
#include "server/format/checkpoint.h"
#include "server/format/plan.h"

namespace h3::ctl {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string Size(int64_t bytes) { return Human(ByteCount(bytes)); }

struct Histogram {
  struct Line {
    int64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::map<std::string, Line> by_type;

  void Add(DType dtype, const std::vector<int64_t>& shape) {
    Line& line = by_type[std::string(DTypeName(dtype))];
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    ++line.tensors;
    line.elements += elements;
    line.bytes += elements * DTypeBytes(dtype);
  }
  Json ToJson() const {
    Json json = Json::object();
    for (const auto& [name, line] : by_type) {
      json[name] = {{"tensors", line.tensors}, {"elements", line.elements}, {"bytes", line.bytes}};
    }
    return json;
  }
  std::string Text() const {
    std::vector<std::vector<std::string>> rows = {{"TYPE", "TENSORS", "ELEMENTS", "BYTES"}};
    for (const auto& [name, line] : by_type) {
      rows.push_back({name, absl::StrCat(line.tensors), Grouped(static_cast<uint64_t>(line.elements)), Size(line.bytes)});
    }
    return Table(rows, {1, 2, 3});
  }
};

absl::Status InspectCheckpoint(const std::string& path, bool json, std::ostream& out) {
  H3_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(path));
  const Geometry& g = checkpoint.geometry;
  Histogram types;
  for (const auto& [name, tensor] : checkpoint.tensors) types.Add(tensor.dtype, tensor.shape);
  int64_t parameters = 0;
  for (const auto& [name, line] : types.by_type) parameters += line.elements;
  const std::vector<std::pair<const char*, int64_t>> sizes = {{"hidden", g.hidden},
                                                              {"blocks", g.blocks},
                                                              {"refiner_blocks", g.refiner_blocks},
                                                              {"heads", g.heads},
                                                              {"head_dim", g.head_dim},
                                                              {"ffn", g.ffn},
                                                              {"video_channels", g.video_channels},
                                                              {"audio_channels", g.audio_channels},
                                                              {"text_width", g.text_width},
                                                              {"time_input", g.time_input},
                                                              {"time_hidden", g.time_hidden},
                                                              {"adaln_width", g.adaln_width},
                                                              {"curve_rows", g.curve_rows},
                                                              {"rope_frequencies", g.rope_frequencies}};
  if (json) {
    Json geometry = Json::object();
    for (const auto& [name, size] : sizes) geometry[name] = size;
    out << Json{{"kind", "checkpoint"},
                {"name", checkpoint.name},
                {"container", std::string(ContainerName(checkpoint.container))},
                {"files", checkpoint.files.size()},
                {"qkv_layout", std::string(QkvLayoutName(checkpoint.qkv_layout))},
                {"partition", std::string(PartitionName(checkpoint.partition))},
                {"pruned", g.pruned()},
                {"geometry", geometry},
                {"parameters", parameters},
                {"bytes", checkpoint.TotalBytes()},
                {"dtypes", types.ToJson()}}
               .dump()
        << std::endl;
    return absl::OkStatus();
  }
  out << "H3 checkpoint " << checkpoint.name << ": " << (g.pruned() ? "pruned" : "full") << ", "
      << ContainerName(checkpoint.container) << " (" << checkpoint.files.size() << " files), qkv "
      << QkvLayoutName(checkpoint.qkv_layout) << ", partition " << PartitionName(checkpoint.partition) << "\n"
      << Grouped(static_cast<uint64_t>(parameters)) << " parameters, " << Size(checkpoint.TotalBytes()) << "\n\n"
      << types.Text() << "\n";
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, size] : sizes) rows.push_back({name, absl::StrCat(size)});
  out << Table(rows, {1}) << std::flush;
  return absl::OkStatus();
}

struct Measured {
  AdapterManifest manifest;
  BaseForm base;
  std::string name;  // What it was measured against.
};

absl::StatusOr<Measured> Measure(const AdapterFile& file, const std::string& model) {
  if (!model.empty()) {
    absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(model);
    if (!checkpoint.ok()) return Annotate(checkpoint.status(), model);
    H3_ASSIGN_OR_RETURN(AdapterManifest manifest, file.Read(checkpoint->geometry));
    return Measured{std::move(manifest), PlanBaseOf(*checkpoint, std::nullopt, false).form, checkpoint->name};
  }
  absl::Status refusal;
  for (const bool pruned : {false, true}) {
    const BaseForm released = {.geometry = ReleasedGeometry(pruned)};
    absl::StatusOr<AdapterManifest> manifest = file.Read(released.geometry);
    if (manifest.ok()) return Measured{*std::move(manifest), released, pruned ? "the released pruned H3" : "the released H3"};
    if (refusal.ok()) refusal = manifest.status();
  }
  return Annotate(refusal, "measured against the released H3 (--model CHECKPOINT measures against another)");
}

std::string TermType(const AdapterTerm& term) {
  if (term.offset.has_value()) return "offset";
  if (term.kronecker.has_value()) return "kronecker";
  switch (term.low_rank->magnitude_axis) {
    case MagnitudeAxis::kRows:
      return "dora rows";
    case MagnitudeAxis::kColumns:
      return "dora columns";
    case MagnitudeAxis::kNone:
      break;
  }
  return term.features == AdalnFeatures::kGrid ? "low rank, through the grid" : "low rank";
}

std::map<std::string, int64_t> CountTypes(const AdapterManifest& manifest) {
  std::map<std::string, int64_t> types;
  for (const AdapterTerm& term : manifest.terms) ++types[TermType(term)];
  return types;
}

absl::Status InspectAdapter(const AdapterFile& file, const std::string& model, bool json, std::ostream& out) {
  H3_ASSIGN_OR_RETURN(const Measured measured, Measure(file, model));
  const AdapterManifest& manifest = measured.manifest;
  const ByteCount device_bytes = ShapeOf(manifest, measured.base).bytes;
  Histogram types;
  for (const TensorInfo& tensor : file.header().tensors) types.Add(tensor.dtype, tensor.shape);
  const std::vector<EffectiveScale> scales = SummariseScales(manifest, measured.base.geometry);
  const std::map<std::string, int64_t> terms = CountTypes(manifest);
  if (json) {
    Json modules = Json::array();
    for (const EffectiveScale& scale : scales) {
      modules.push_back({{"module_kind", scale.module_kind},
                         {"modules", scale.modules},
                         {"rank", scale.rank},
                         {"alpha", scale.alpha},
                         {"scale", scale.scale},
                         {"source", scale.source}});
    }
    out << Json{{"kind", "adapter"},
                {"format", manifest.format},
                {"measured_against", measured.name},
                {"partition", std::string(PartitionName(manifest.partition))},
                {"tensors", file.header().tensors.size()},
                {"file_bytes", file.header().file_bytes},
                {"device_bytes", device_bytes.value()},
                {"terms", terms},
                {"scales", modules},
                {"norm_offsets", manifest.norm_offsets.size()},
                {"complete_curve", manifest.curve.has_value()},
                {"ignored_sections", manifest.ignored_sections},
                {"warnings", manifest.warnings},
                {"dtypes", types.ToJson()}}
               .dump(-1, ' ', false, Json::error_handler_t::replace)
        << std::endl;
    return absl::OkStatus();
  }
  out << "adapter in " << manifest.format << " spelling, measured against " << measured.name << ", partition "
      << PartitionName(manifest.partition) << "\n"
      << file.header().tensors.size() << " tensors, " << Size(file.header().file_bytes) << " on the disk, "
      << Human(device_bytes) << " on a device\n\n";
  std::vector<std::vector<std::string>> rows = {{"MODULES", "KIND", "RANK", "ALPHA", "SCALE", "FROM"}};
  for (const EffectiveScale& scale : scales) {
    rows.push_back({absl::StrCat(scale.modules), scale.module_kind, absl::StrCat(scale.rank), absl::StrCat(scale.alpha),
                    absl::StrCat(scale.scale), scale.source});
  }
  out << Table(rows, {0, 2, 3, 4}) << "\n" << types.Text() << "\n";
  for (const auto& [type, count] : terms) out << count << " terms: " << type << "\n";
  if (!manifest.norm_offsets.empty()) out << manifest.norm_offsets.size() << " norm weights are offset\n";
  if (manifest.curve.has_value()) {
    out << "complete modulation of its own\n";
  }
  if (!manifest.ignored_sections.empty())
    out << "other sections of the file: " << absl::StrJoin(manifest.ignored_sections, ", ") << "\n";
  for (const std::string& warning : manifest.warnings) out << "warning: " << warning << "\n";
  out << std::flush;
  return absl::OkStatus();
}

}  // namespace

absl::Status RunInspect(const InspectFlags& flags, bool json, std::ostream& out) {
  std::error_code ignored;
  const bool peft = fs::exists(fs::path(flags.path) / "adapter_config.json", ignored);
  if (fs::is_directory(flags.path, ignored) && !peft) return Annotate(InspectCheckpoint(flags.path, json, out), flags.path);
  absl::StatusOr<AdapterFile> file = AdapterFile::Open(flags.path);
  if (!file.ok()) return Annotate(file.status(), flags.path);
  for (const TensorInfo& tensor : file->header().tensors) {
    if (absl::EndsWith(tensor.name, "video_patch_proj.weight"))
      return Annotate(InspectCheckpoint(flags.path, json, out), flags.path);
  }
  return Annotate(InspectAdapter(*file, flags.model, json, out), flags.path);
}

}  // namespace h3::ctl
