#include "client/cli/plan_command.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/cli/adapter_file.h"
#include "client/cli/exit_code.h"
#include "client/cli/lora_spec.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/base/text.h"
#include "server/format/plan.h"

namespace h3::ctl {
namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

constexpr int64_t kMaxRows = 1'000'000;

absl::StatusOr<ByteCount> BytesOf(absl::string_view flag, const std::string& text) {
  absl::StatusOr<ByteCount> bytes = ParseBytes(text);
  if (!bytes.ok()) return UsageError(absl::StrCat("--", flag, " ", text, ": not a number of bytes such as 80GiB"));
  return bytes;
}

std::optional<DType> TypeOf(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  return std::nullopt;
}

// Pixels and frames to latents: h3-format.md, "Sizes".
absl::StatusOr<Layout> LayoutOf(const PlanFlags& flags) {
  const std::vector<std::string> parts = absl::StrSplit(flags.video, 'x');
  int64_t width = 0, height = 0, frames = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &width) || !absl::SimpleAtoi(parts[1], &height) || !absl::SimpleAtoi(parts[2], &frames))
    return UsageError(absl::StrCat("--video ", flags.video, " is not WIDTHxHEIGHTxFRAMES, such as 1280x704x124"));
  if (width <= 0 || height <= 0 || width % 32 != 0 || height % 32 != 0)
    return UsageError(absl::StrCat("--video ", flags.video, ": width and height are multiples of 32, such as ", std::max<int64_t>(32, width / 32 * 32), "x",
                                   std::max<int64_t>(32, height / 32 * 32)));
  if (frames < 5 || frames % 17 != 5) {
    const int64_t below = std::max<int64_t>(5, (frames - 5) / 17 * 17 + 5);
    return UsageError(absl::StrCat("--video ", flags.video, ": frames are 17k+5, such as ", below, " or ", below + 17));
  }
  Layout layout{.text_tokens = flags.text_tokens,
                .latent_frames = frames / 17 * 5 + 2,
                .latent_height = height / 16,
                .latent_width = width / 16,
                .audio_latents = (frames * 40 + 23) / 24};
  H3_RETURN_IF_ERROR(CheckLayout(layout, kMaxRows));
  return layout;
}

struct Adapter {
  std::string file;
  StackEntry entry;
  int64_t weights = 0, largest_rank = 0;
  AdapterShape shape;
};

absl::StatusOr<AdapterManifest> ReadManifest(const StackEntry& entry, const Checkpoint& checkpoint, const PlanBase& base) {
  IntakeOptions options;
  options.base_partition = checkpoint.partition;
  options.interleaved_base = base.form.interleaved_qkv;
  options.alpha = entry.alpha;
  options.leave_out = entry.leave_out;
  options.materialized = entry.apply == Apply::kMaterialized;
  H3_ASSIGN_OR_RETURN(const AdapterFile file, AdapterFile::Open(entry.adapter));
  return file.Read(checkpoint.geometry, options);
}

absl::StatusOr<Adapter> ReadSpec(const std::string& text, const Checkpoint& checkpoint, const PlanBase& base) {
  H3_ASSIGN_OR_RETURN(const v1::StackEntry spec, ParseLoraSpec(text));
  Adapter adapter{.file = spec.adapter()};
  StackEntry& entry = adapter.entry;
  entry.adapter = spec.adapter();
  entry.strength = spec.strength();
  const v1::ModalityFactors& factors = spec.factors();
  if (factors.has_video()) entry.video = factors.video();
  if (factors.has_text()) entry.text = factors.text();
  if (factors.has_audio()) entry.audio = factors.audio();
  entry.per_evaluation.assign(spec.per_evaluation().begin(), spec.per_evaluation().end());
  if (spec.has_auto_strength()) entry.auto_strength.emplace();
  if (spec.has_alpha()) entry.alpha = spec.alpha();
  entry.leave_out.assign(spec.leave_out().begin(), spec.leave_out().end());
  if (spec.apply() == v1::APPLY_MATERIALIZED) entry.apply = Apply::kMaterialized;
  absl::StatusOr<AdapterManifest> manifest = ReadManifest(entry, checkpoint, base);
  if (!manifest.ok()) return Annotate(manifest.status(), adapter.file);
  adapter.shape = ShapeOf(*manifest, base.form);
  for (const TermShape& term : adapter.shape.terms) adapter.largest_rank = std::max(adapter.largest_rank, term.rank);
  return adapter;
}

// What merging costs for one kind of weight.
struct Merged {
  int64_t weights = 0;
  int64_t bytes = 0;
};

struct Plan {
  BaseBytes base;
  RequestPlan request;
  std::map<std::string, Merged> merged;  // By kind of module.
  int64_t merged_bytes = 0;
  ByteCount needed, device, margin;
  bool fits = true;
};

Json ToJson(const PlanFlags& flags, const std::vector<Adapter>& adapters, const Plan& plan) {
  const PhaseUse& largest = plan.request.largest();
  Json list = Json::array(), targets = Json::array(), phases = Json::array();
  for (const Adapter& adapter : adapters) {
    list.push_back({{"file", adapter.file},
                    {"strength", adapter.entry.strength},
                    {"weights", adapter.weights},
                    {"rank", adapter.largest_rank},
                    {"bytes", adapter.shape.bytes.value()}});
  }
  for (const auto& [kind, merged] : plan.merged) targets.push_back({{"module_kind", kind}, {"weights", merged.weights}, {"bytes", merged.bytes}});
  for (const PhaseUse& phase : plan.request.phases)
    phases.push_back({{"phase", phase.name}, {"activation_bytes", phase.activations.value()}, {"workspace_bytes", phase.workspace.value()}});
  Json json = {{"base_bytes", plan.base.device.value()},
               {"host_base_bytes", plan.base.host.value()},
               {"adapter_bytes", plan.request.adapters.value()},
               {"materialized_extra_bytes", plan.merged_bytes},
               {"materialized_resident_bytes", std::llround(static_cast<double>(plan.merged_bytes) * flags.resident)},
               {"activation_peak_bytes", largest.activations.value()},
               {"workspace_bytes", largest.workspace.value()},
               {"caches_bytes", plan.request.caches.value()},
               {"materialized_bytes", plan.request.materialized.value()},
               {"total_peak_bytes", plan.needed.value()}};
  if (plan.device > ByteCount(0)) {
    json["device_bytes"] = plan.device.value();
    json["margin_bytes"] = plan.margin.value();
  }
  json.update({{"fits", plan.fits},
               {"rows", plan.request.rows},
               {"row_tile", plan.request.row_tile},
               {"largest_phase", largest.name},
               {"adapters", std::move(list)},
               {"materialized_targets", std::move(targets)},
               {"phases", std::move(phases)}});
  return json;
}

std::string Text(const PlanFlags& flags, const std::vector<Adapter>& adapters, const Plan& plan) {
  const RequestPlan& request = plan.request;
  const PhaseUse& largest = request.largest();
  const auto line = [](std::string name, ByteCount bytes) {
    return std::vector<std::string>{std::move(name), Human(bytes), Grouped(static_cast<uint64_t>(bytes.value()))};
  };
  Rows rows = {{"ON THE DEVICE", "", "BYTES"}, line("base", plan.base.device), line("adapters", request.adapters)};
  if (request.materialized > ByteCount(0)) rows.push_back(line("merged copies (apply=materialized)", request.materialized));
  if (request.caches > ByteCount(0)) rows.push_back(line("norms for DoRA and auto-strength", request.caches));
  rows.push_back(line(absl::StrCat("activations (", largest.name, ")"), largest.activations));
  rows.push_back(line("workspace", largest.workspace));
  rows.push_back(line("= at most", plan.needed));
  std::string text = absl::StrCat(Grouped(static_cast<uint64_t>(request.rows)), " packed rows, in tiles of ", Grouped(static_cast<uint64_t>(request.row_tile)), "\n\n", Table(rows, {1, 2}));
  if (plan.base.host > ByteCount(0)) absl::StrAppend(&text, "In mapped host memory: ", Human(plan.base.host), " of AdaLN weights\n");
  if (plan.device > ByteCount(0)) {
    const ByteCount usable = plan.device - plan.margin;
    absl::StrAppend(&text, plan.fits ? "Fits " : "Does not fit ", Human(plan.device), ", of which ", Human(plan.margin), " are kept free: ",
                    plan.fits ? Human(usable - plan.needed) : Human(plan.needed - usable), plan.fits ? " to spare" : " too much", "\n");
  }
  if (!adapters.empty()) {
    Rows table = {{"ADAPTER", "STRENGTH", "WEIGHTS", "RANK", "", "BYTES"}};
    for (const Adapter& adapter : adapters) {
      const ByteCount bytes = adapter.shape.bytes;
      table.push_back({adapter.file, absl::StrCat(adapter.entry.strength), absl::StrCat(adapter.weights), absl::StrCat(adapter.largest_rank), Human(bytes),
                       Grouped(static_cast<uint64_t>(bytes.value()))});
    }
    absl::StrAppend(&text, "\n", Table(table, {1, 2, 3, 4, 5}));
    Rows merged = {{"A MERGING RUNTIME WOULD ALSO HOLD", "WEIGHTS", "", "BYTES"}};
    const auto add = [&](const std::string& name, int64_t weights, int64_t bytes) {
      merged.push_back({name, absl::StrCat(weights), Human(ByteCount(bytes)), Grouped(static_cast<uint64_t>(bytes))});
    };
    int64_t weights = 0;
    for (const auto& [kind, of] : plan.merged) add(kind, of.weights, of.bytes), weights += of.weights;
    add("= in all", weights, plan.merged_bytes);
    absl::StrAppend(&text, "\n", Table(merged, {1, 2, 3}));
    if (flags.resident < 1) {
      absl::StrAppend(&text, "With ", absl::StrFormat("%g", 100 * flags.resident), " % of the weights on the device: ",
                      Human(ByteCount(std::llround(static_cast<double>(plan.merged_bytes) * flags.resident))), "\n");
    }
  }
  return text;
}

}  // namespace

absl::Status RunPlan(const PlanFlags& flags, bool json, std::ostream& out) {
  H3_ASSIGN_OR_RETURN(const Layout layout, LayoutOf(flags));
  H3_ASSIGN_OR_RETURN(const ByteCount workspace, BytesOf("workspace", flags.workspace));
  Plan plan;
  if (!flags.device_memory.empty()) {
    H3_ASSIGN_OR_RETURN(plan.device, BytesOf("device-memory", flags.device_memory));
    plan.margin = AcceleratorMargin(plan.device);
  }
  const absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(flags.model);
  if (!checkpoint.ok()) return Annotate(checkpoint.status(), flags.model);
  const std::optional<DType> dtype = TypeOf(flags.dtype);
  const bool on_host = flags.adaln_residency == "host";
  const PlanBase base = PlanBaseOf(*checkpoint, dtype, on_host);
  plan.base = BaseBytesOf(*checkpoint, dtype, on_host);

  const std::vector<Site> sites = Sites(checkpoint->geometry);
  std::vector<Adapter> adapters;
  adapters.reserve(flags.lora.size());
  for (const std::string& spec : flags.lora) {
    H3_ASSIGN_OR_RETURN(Adapter adapter, ReadSpec(spec, *checkpoint, base));
    adapter.weights = static_cast<int64_t>(MergedTargets({&adapter.shape}, sites, base.site_bytes).size());
    adapters.push_back(std::move(adapter));
  }
  std::vector<PlannedEntry> stack;
  std::vector<const AdapterShape*> shapes;
  std::map<std::pair<std::string, std::vector<std::string>>, const AdapterShape*> distinct;
  for (const Adapter& adapter : adapters) {
    const AdapterShape* shape = distinct.try_emplace({adapter.file, adapter.entry.leave_out}, &adapter.shape).first->second;
    stack.push_back({shape, &adapter.entry});
    shapes.push_back(shape);
  }
  for (const MergedTarget& target : MergedTargets(shapes, sites, base.site_bytes)) {
    Merged& of = plan.merged[std::string(SiteKindName(sites[static_cast<size_t>(target.site)].kind))];
    ++of.weights;
    of.bytes += target.bytes.value();
    plan.merged_bytes += target.bytes.value();
  }
  plan.request = PlanRequest(base, {.workspace = workspace}, layout, flags.evaluations, stack);
  plan.needed = plan.base.device + plan.request.adapters + plan.request.peak();
  plan.fits = plan.device == ByteCount(0) || plan.needed + plan.margin <= plan.device;
  out << (json ? ToJson(flags, adapters, plan).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n" : Text(flags, adapters, plan)) << std::flush;
  return absl::OkStatus();
}

}  // namespace h3::ctl
