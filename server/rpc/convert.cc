#include "server/rpc/convert.h"

#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

absl::Status BadRequest(absl::string_view what, absl::string_view field) {
  return RefuseArgument(reason::kBadRequest, what, {{"field", std::string(field)}});
}

DType FromProto(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32: return DType::kF32;
    case v1::DTYPE_BF16: return DType::kBF16;
    case v1::DTYPE_F16: return DType::kF16;
    case v1::DTYPE_F64: return DType::kF64;
    case v1::DTYPE_I64: return DType::kI64;
    default: H3_CHECK(false); return DType::kF32;
  }
}

}  // namespace

absl::StatusOr<Layout> FromProto(const v1::Layout& proto) {
  Layout layout;
  for (const int keyframe : proto.keyframes()) {
    if (keyframe != v1::KEYFRAME_FIRST && keyframe != v1::KEYFRAME_LAST) {
      return RefuseArgument(reason::kBadLayout, "layout: a keyframe is neither first nor last", {{"field", "layout.keyframes"}});
    }
    layout.keyframes.push_back(keyframe == v1::KEYFRAME_FIRST ? Keyframe::kFirst : Keyframe::kLast);
  }
  for (int i = 0; i < proto.references_size(); ++i) {
    const v1::Reference& from = proto.references(i);
    Reference reference{.latent_frames = from.latent_frames(),
                        .latent_height = from.latent_height(),
                        .latent_width = from.latent_width(),
                        .audio_latents = from.audio_latents()};
    switch (from.kind()) {
      case v1::REFERENCE_KIND_IMAGE: reference.kind = ReferenceKind::kImage; break;
      case v1::REFERENCE_KIND_VIDEO: reference.kind = ReferenceKind::kVideo; break;
      case v1::REFERENCE_KIND_AUDIO: reference.kind = ReferenceKind::kAudio; break;
      default:
        return RefuseArgument(reason::kBadLayout, absl::StrCat("layout: references[", i, "] has no kind"),
                              {{"field", absl::StrCat("layout.references[", i, "].kind")}});
    }
    layout.references.push_back(reference);
  }
  layout.text_tokens = proto.text_tokens();
  layout.latent_frames = proto.latent_frames();
  layout.latent_height = proto.latent_height();
  layout.latent_width = proto.latent_width();
  layout.audio_latents = proto.audio_latents();
  return layout;
}

absl::StatusOr<std::vector<StackEntry>> FromProto(const google::protobuf::RepeatedPtrField<v1::StackEntry>& stack) {
  constexpr int kMaxStack = 256;
  if (stack.size() > kMaxStack) return BadRequest(absl::StrCat("a stack of ", stack.size(), "; at most ", kMaxStack, " adapters"), "stack");
  std::vector<StackEntry> entries;
  for (int i = 0; i < stack.size(); ++i) {
    const v1::StackEntry& from = stack.Get(i);
    if (!from.has_strength()) {
      return RefuseArgument(reason::kBadStrength, absl::StrCat("stack[", i, "] (", from.adapter(), ") has no strength"),
                            {{"field", absl::StrCat("stack[", i, "].strength")}});
    }
    StackEntry entry{.adapter = from.adapter(), .digest = from.digest(), .strength = from.strength()};
    if (from.factors().has_video()) entry.video = from.factors().video();
    if (from.factors().has_text()) entry.text = from.factors().text();
    if (from.factors().has_audio()) entry.audio = from.factors().audio();
    entry.per_evaluation.assign(from.per_evaluation().begin(), from.per_evaluation().end());
    if (from.has_auto_strength()) {
      AutoStrength bounds;
      if (from.auto_strength().has_floor()) bounds.floor = from.auto_strength().floor();
      if (from.auto_strength().has_ceiling()) bounds.ceiling = from.auto_strength().ceiling();
      entry.auto_strength = bounds;
    }
    if (from.has_alpha()) entry.alpha = from.alpha();
    for (const std::string& part : from.leave_out()) {
      if (part != "adaln") {
        return BadRequest(absl::StrCat("stack[", i, "]: only \"adaln\" can be left out, not \"", part, "\""), absl::StrCat("stack[", i, "].leave_out"));
      }
      if (entry.leave_out.empty()) entry.leave_out.push_back(part);
    }
    switch (from.apply()) {
      case v1::APPLY_UNSPECIFIED:
      case v1::APPLY_BYPASS: entry.apply = Apply::kBypass; break;
      case v1::APPLY_MATERIALIZED: entry.apply = Apply::kMaterialized; break;
      default: return BadRequest(absl::StrCat("stack[", i, "] has an unknown way to apply"), absl::StrCat("stack[", i, "].apply"));
    }
    H3_ASSIGN_OR_RETURN(entry.settings, FromProto(from.settings()));
    entries.push_back(std::move(entry));
  }
  return entries;
}

absl::StatusOr<Schedule> ScheduleFromProto(const v1::Sampling& sampling) {
  if (sampling.start_case() == v1::Sampling::START_NOT_SET || (sampling.has_noise_from_request() && !sampling.noise_from_request())) {
    return BadRequest("sampling needs a seed or noise_from_request", "sampling.start");
  }
  ScheduleSpec spec{.evaluations = sampling.evaluations()};
  switch (sampling.schedule()) {
    case v1::SCHEDULE_UNSPECIFIED:
    case v1::SCHEDULE_OFFICIAL: break;
    case v1::SCHEDULE_NORMAL: spec.kind = ScheduleKind::kNormal; break;
    default: return BadRequest("an unknown schedule", "sampling.schedule");
  }
  if (sampling.has_video_shift()) spec.video_shift = sampling.video_shift();
  if (sampling.has_audio_shift()) spec.audio_shift = sampling.audio_shift();
  spec.video_sigmas.assign(sampling.video_sigmas().begin(), sampling.video_sigmas().end());
  spec.audio_sigmas.assign(sampling.audio_sigmas().begin(), sampling.audio_sigmas().end());
  return MakeSchedule(spec);
}

absl::StatusOr<std::pair<float, float>> TimestepsFromProto(const v1::Evaluation& evaluation) {
  const double video_shift = evaluation.has_video_shift() ? evaluation.video_shift() : kDefaultVideoShift;
  const double audio_shift = evaluation.has_audio_shift() ? evaluation.audio_shift() : kDefaultAudioShift;
  for (const double shift : {video_shift, audio_shift}) {
    if (!std::isfinite(shift) || shift <= 0) return BadRequest(absl::StrCat("shift ", shift, " is not positive"), "evaluation.shift");
  }
  double video = 0, audio = 0;
  switch (evaluation.point_case()) {
    case v1::Evaluation::kTimesteps:
      video = evaluation.timesteps().video();
      audio = evaluation.timesteps().audio();
      break;
    case v1::Evaluation::kSigma:
      // As a sampler's own float32 sigma: t is 1 - sigma in float32.
      video = 1.0f - static_cast<float>(evaluation.sigma());
      audio = 1.0f - static_cast<float>(ShiftSigma(UnshiftSigma(evaluation.sigma(), video_shift), audio_shift));
      break;
    case v1::Evaluation::kBaseSigma:
      video = 1.0 - ShiftSigma(evaluation.base_sigma(), video_shift);
      audio = 1.0 - ShiftSigma(evaluation.base_sigma(), audio_shift);
      break;
    case v1::Evaluation::POINT_NOT_SET: return BadRequest("an evaluation needs timesteps, sigma or base_sigma", "evaluation.point");
  }
  for (const double t : {video, audio}) {
    if (!(t >= 0 && t <= 1)) return BadRequest(absl::StrCat("timestep ", t, " is outside 0 .. 1"), "evaluation.point");
  }
  return std::pair(static_cast<float>(video), static_cast<float>(audio));
}

std::vector<HostTensor> ToHostTensors(absl::Span<const v1::TensorSpec> specs, std::vector<std::string> data) {
  H3_CHECK(specs.size() == data.size());
  std::vector<HostTensor> tensors;
  for (size_t i = 0; i < specs.size(); ++i) {
    tensors.push_back({specs[i].name(), FromProto(specs[i].dtype()), {specs[i].shape().begin(), specs[i].shape().end()}, std::move(data[i])});
  }
  return tensors;
}

v1::TensorSpec SpecOf(const HostTensor& tensor) {
  H3_CHECK(tensor.dtype == DType::kF32);
  v1::TensorSpec spec;
  spec.set_name(tensor.name);
  spec.set_dtype(v1::DTYPE_F32);
  for (const int64_t size : tensor.shape) spec.add_shape(size);
  spec.set_bytes(tensor.data.size());
  return spec;
}

v1::Task ToProto(Task task) {
  switch (task) {
    case Task::kT2va: return v1::TASK_T2VA;
    case Task::kFl2va: return v1::TASK_FL2VA;
    case Task::kRef2va: return v1::TASK_REF2VA;
  }
  return v1::TASK_UNSPECIFIED;
}

v1::Partition ToProto(Partition partition) {
  switch (partition) {
    case Partition::kUnknown: return v1::PARTITION_UNSPECIFIED;
    case Partition::kFl2va: return v1::PARTITION_FL2VA;
    case Partition::kRef2va: return v1::PARTITION_REF2VA;
  }
  return v1::PARTITION_UNSPECIFIED;
}

Partition FromProto(v1::Partition partition) {
  return partition == v1::PARTITION_FL2VA ? Partition::kFl2va : partition == v1::PARTITION_REF2VA ? Partition::kRef2va : Partition::kUnknown;
}

v1::Geometry ToProto(const Geometry& g) {
  v1::Geometry proto;
  proto.set_hidden(g.hidden);
  proto.set_blocks(g.blocks);
  proto.set_refiner_blocks(g.refiner_blocks);
  proto.set_heads(g.heads);
  proto.set_head_dim(g.head_dim);
  proto.set_ffn(g.ffn);
  proto.set_video_channels(g.video_channels);
  proto.set_audio_channels(g.audio_channels);
  proto.set_text_width(g.text_width);
  proto.set_time_input(g.time_input);
  proto.set_time_hidden(g.time_hidden);
  proto.set_adaln_width(g.adaln_width);
  proto.set_curve_rows(g.curve_rows);
  proto.set_rope_frequencies(g.rope_frequencies);
  return proto;
}

Geometry FromProto(const v1::Geometry& p) {
  return {.hidden = p.hidden(),
          .blocks = p.blocks(),
          .refiner_blocks = p.refiner_blocks(),
          .heads = p.heads(),
          .head_dim = p.head_dim(),
          .ffn = p.ffn(),
          .video_channels = p.video_channels(),
          .audio_channels = p.audio_channels(),
          .text_width = p.text_width(),
          .time_input = p.time_input(),
          .time_hidden = p.time_hidden(),
          .adaln_width = p.adaln_width(),
          .curve_rows = p.curve_rows(),
          .rope_frequencies = p.rope_frequencies()};
}

v1::PlanFacts ToProto(const PlanBase& base, const PlanOptions& options) {
  v1::PlanFacts facts;
  facts.set_workspace_bytes(static_cast<uint64_t>(options.workspace.value()));
  facts.set_threads(static_cast<uint32_t>(options.threads));
  facts.set_packs_attention(options.packs_attention);
  facts.set_adaln_on_host(base.adaln_on_host);
  const std::vector<Site> sites = Sites(base.form.geometry);
  for (size_t i = 0; i < sites.size(); ++i) {
    uint32_t& bytes = (*facts.mutable_element_bytes())[std::string(SiteKindName(sites[i].kind))];
    bytes = std::max(bytes, static_cast<uint32_t>(base.site_bytes[i]));
  }
  return facts;
}

PlanBase PlanBaseFromProto(const v1::Model& model) {
  const v1::PlanFacts& facts = model.plan();
  PlanBase base{.form = {.geometry = FromProto(model.geometry()),
                         .compute = model.dtype() == "float32" ? DType::kF32 : model.dtype() == "float16" ? DType::kF16 : DType::kBF16,
                         .interleaved_qkv = model.qkv_layout() == QkvLayoutName(QkvLayout::kInterleaved)},
                .adaln_on_host = facts.adaln_on_host()};
  for (const Site& site : Sites(base.form.geometry)) {
    const auto bytes = facts.element_bytes().find(std::string(SiteKindName(site.kind)));
    base.site_bytes.push_back(bytes == facts.element_bytes().end() ? 4 : bytes->second);
  }
  return base;
}

PlanOptions PlanOptionsFromProto(const v1::Model& model) {
  const v1::PlanFacts& facts = model.plan();
  return {.workspace = ByteCount(static_cast<int64_t>(facts.workspace_bytes())),
          .threads = facts.threads(),
          .packs_attention = facts.packs_attention()};
}

namespace {

// The owners of a message, in the ledger's order.
struct OwnerField {
  Owner owner;
  uint64_t (v1::MemoryOwners::*get)() const;
  void (v1::MemoryOwners::*set)(uint64_t);
};
constexpr OwnerField kOwnerFields[] = {
    {Owner::kBaseWeights, &v1::MemoryOwners::base_weights, &v1::MemoryOwners::set_base_weights},
    {Owner::kAdapters, &v1::MemoryOwners::adapters, &v1::MemoryOwners::set_adapters},
    {Owner::kMaterialized, &v1::MemoryOwners::materialized, &v1::MemoryOwners::set_materialized},
    {Owner::kCaches, &v1::MemoryOwners::caches, &v1::MemoryOwners::set_caches},
    {Owner::kActivations, &v1::MemoryOwners::activations, &v1::MemoryOwners::set_activations},
    {Owner::kWorkspace, &v1::MemoryOwners::workspace, &v1::MemoryOwners::set_workspace},
    {Owner::kStaging, &v1::MemoryOwners::staging, &v1::MemoryOwners::set_staging},
    {Owner::kRuntimeContext, &v1::MemoryOwners::runtime_context, &v1::MemoryOwners::set_runtime_context},
    {Owner::kAllocatorCache, &v1::MemoryOwners::allocator_cache, &v1::MemoryOwners::set_allocator_cache},
    {Owner::kUnattributed, &v1::MemoryOwners::unattributed, &v1::MemoryOwners::set_unattributed},
};
static_assert(std::size(kOwnerFields) == kOwners);

uint64_t ToWire(ByteCount bytes) { return static_cast<uint64_t>(bytes.value()); }
ByteCount FromWire(uint64_t bytes) { return ByteCount(static_cast<int64_t>(bytes)); }

}  // namespace

v1::DeviceMemory ToProto(const MemoryReport& report) {
  v1::DeviceMemory memory;
  memory.set_device(report.device);
  memory.set_total_bytes(ToWire(report.total));
  memory.set_free_bytes(ToWire(report.free));
  memory.set_used_bytes(ToWire(report.ledger.used));
  memory.set_headroom_bytes(ToWire(report.headroom));
  memory.set_reserved_bytes(ToWire(report.reserved));
  memory.set_reusable_bytes(ToWire(report.reusable));
  memory.set_margin_bytes(ToWire(report.margin));
  memory.set_peak_bytes(ToWire(report.last_request_peak));
  for (const OwnerField& field : kOwnerFields) (memory.mutable_owners()->*field.set)(ToWire(report.ledger.of(field.owner)));
  ByteCount host_adapters;
  for (const AdapterResidency& adapter : report.adapters) {
    v1::AdapterMemory& line = *memory.add_adapters();
    line.set_name(adapter.name);
    line.set_digest(adapter.digest);
    line.set_bytes(ToWire(adapter.bytes));
    line.set_pins(static_cast<uint32_t>(adapter.pins));
    line.set_tier(adapter.tier == Tier::kDevice ? "device" : "host");
    if (adapter.tier == Tier::kHost) host_adapters += adapter.bytes;
  }
  v1::AllocatorMemory& allocator = *memory.mutable_allocator();
  allocator.set_allocated_bytes(ToWire(report.allocator.allocated));
  allocator.set_reserved_bytes(ToWire(report.allocator.reserved));
  allocator.set_active_bytes(ToWire(report.allocator.active));
  allocator.set_inactive_split_bytes(ToWire(report.allocator.inactive_split));
  allocator.set_retries(static_cast<uint64_t>(report.allocator.retries));
  v1::HostMemory& host = *memory.mutable_host();
  host.set_resident_bytes(ToWire(report.host.resident));
  host.set_anonymous_bytes(ToWire(report.host.anonymous));
  host.set_file_bytes(ToWire(report.host.file));
  host.set_mapped_weights_bytes(ToWire(report.host_weights));
  host.set_adapters_bytes(ToWire(host_adapters));
  memory.set_avoided_resident_bytes(ToWire(report.avoided_resident));
  memory.set_base_mutations(static_cast<uint64_t>(report.base_mutations));
  if (report.adapter_budget.has_value()) memory.set_adapter_budget_bytes(ToWire(*report.adapter_budget));
  memory.set_modulation_budget_bytes(ToWire(report.modulation_budget));
  memory.set_host_adapter_budget_bytes(ToWire(report.host_adapter_budget));
  return memory;
}

MemoryReport FromProto(const v1::DeviceMemory& memory) {
  MemoryReport report{.device = memory.device(),
                      .total = FromWire(memory.total_bytes()),
                      .free = FromWire(memory.free_bytes()),
                      .headroom = FromWire(memory.headroom_bytes()),
                      .reserved = FromWire(memory.reserved_bytes()),
                      .reusable = FromWire(memory.reusable_bytes()),
                      .margin = FromWire(memory.margin_bytes())};
  for (const OwnerField& field : kOwnerFields)
    report.ledger.owners[static_cast<size_t>(field.owner)] = FromWire((memory.owners().*field.get)());
  report.ledger.used = FromWire(memory.used_bytes());
  report.last_request_peak = FromWire(memory.peak_bytes());
  for (const v1::AdapterMemory& adapter : memory.adapters()) {
    report.adapters.push_back({adapter.name(), adapter.digest(), FromWire(adapter.bytes()), static_cast<int64_t>(adapter.pins()),
                               adapter.tier() == "host" ? Tier::kHost : Tier::kDevice});
  }
  const v1::AllocatorMemory& allocator = memory.allocator();
  report.allocator = {FromWire(allocator.allocated_bytes()), FromWire(allocator.reserved_bytes()), FromWire(allocator.active_bytes()),
                      FromWire(allocator.inactive_split_bytes()), static_cast<int64_t>(allocator.retries())};
  const v1::HostMemory& host = memory.host();
  report.host = {FromWire(host.resident_bytes()), FromWire(host.anonymous_bytes()), FromWire(host.file_bytes())};
  report.host_weights = FromWire(host.mapped_weights_bytes());
  report.avoided_resident = FromWire(memory.avoided_resident_bytes());
  report.base_mutations = static_cast<int64_t>(memory.base_mutations());
  if (memory.has_adapter_budget_bytes()) report.adapter_budget = FromWire(memory.adapter_budget_bytes());
  report.modulation_budget = FromWire(memory.modulation_budget_bytes());
  report.host_adapter_budget = FromWire(memory.host_adapter_budget_bytes());
  return report;
}

v1::EffectiveScale ToProto(const EffectiveScale& scale) {
  v1::EffectiveScale proto;
  proto.set_module_kind(scale.module_kind);
  proto.set_modules(static_cast<uint32_t>(scale.modules));
  proto.set_rank(static_cast<uint32_t>(scale.rank));
  proto.set_alpha(scale.alpha);
  proto.set_scale(scale.scale);
  proto.set_source(scale.source);
  return proto;
}

v1::ResolvedAdapter ToProto(const ResolvedAdapter& adapter) {
  v1::ResolvedAdapter proto;
  proto.set_adapter(adapter.adapter);
  proto.set_digest(adapter.digest);
  proto.set_strength(adapter.strength);
  for (const EffectiveScale& scale : adapter.scales) *proto.add_scales() = ToProto(scale);
  proto.set_bytes(static_cast<uint64_t>(adapter.bytes.value()));
  proto.set_modules(static_cast<uint32_t>(adapter.modules));
  for (const std::string& name : adapter.left_out) proto.add_left_out(name);
  for (const std::string& warning : adapter.warnings) proto.add_warnings(warning);
  proto.mutable_factors()->set_video(adapter.video);
  proto.mutable_factors()->set_text(adapter.text);
  proto.mutable_factors()->set_audio(adapter.audio);
  proto.mutable_per_evaluation()->Add(adapter.per_evaluation.begin(), adapter.per_evaluation.end());
  proto.set_apply(adapter.apply == Apply::kMaterialized ? v1::APPLY_MATERIALIZED : v1::APPLY_BYPASS);
  for (const StrengthRatio& ratio : adapter.auto_strength_ratios) {
    v1::StrengthRatio& line = *proto.add_auto_strength_ratios();
    line.set_module(ratio.module);
    line.set_ratio(ratio.ratio);
  }
  return proto;
}

v1::AdapterSettings ToProto(const AdapterSettings& settings) {
  v1::AdapterSettings proto;
  if (settings.alpha.has_value()) proto.set_alpha(*settings.alpha);
  switch (settings.qkv_layout) {
    case QkvLayout::kAuto: break;
    case QkvLayout::kStacked: proto.set_qkv_layout(v1::QKV_LAYOUT_STACKED); break;
    case QkvLayout::kInterleaved: proto.set_qkv_layout(v1::QKV_LAYOUT_INTERLEAVED); break;
  }
  if (settings.fc1_gate_first.has_value()) {
    proto.set_fc1_order(*settings.fc1_gate_first ? v1::FC1_ORDER_GATE_FIRST : v1::FC1_ORDER_UP_FIRST);
  }
  proto.set_partition(ToProto(settings.partition));
  proto.set_peft_config(settings.peft_config);
  return proto;
}

absl::StatusOr<AdapterSettings> FromProto(const v1::AdapterSettings& proto) {
  AdapterSettings settings;
  if (proto.has_alpha()) {
    if (!std::isfinite(proto.alpha()) || proto.alpha() < 0) {
      return RefuseArgument(reason::kBadScale, absl::StrCat("alpha ", proto.alpha(), " is not a finite number >= 0"), {{"field", "settings.alpha"}});
    }
    settings.alpha = proto.alpha();
  }
  switch (proto.qkv_layout()) {
    case v1::QKV_LAYOUT_UNSPECIFIED: break;
    case v1::QKV_LAYOUT_STACKED: settings.qkv_layout = QkvLayout::kStacked; break;
    case v1::QKV_LAYOUT_INTERLEAVED: settings.qkv_layout = QkvLayout::kInterleaved; break;
    default: return BadRequest("an unknown row order of qkv", "settings.qkv_layout");
  }
  switch (proto.fc1_order()) {
    case v1::FC1_ORDER_UNSPECIFIED: break;
    case v1::FC1_ORDER_GATE_FIRST: settings.fc1_gate_first = true; break;
    case v1::FC1_ORDER_UP_FIRST: settings.fc1_gate_first = false; break;
    default: return BadRequest("an unknown row order of fc1", "settings.fc1_order");
  }
  if (!v1::Partition_IsValid(proto.partition())) return BadRequest("an unknown partition", "settings.partition");
  settings.partition = FromProto(proto.partition());
  settings.peft_config = proto.peft_config();
  return settings;
}

}  // namespace h3
