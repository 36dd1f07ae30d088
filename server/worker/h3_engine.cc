#include "server/worker/h3_engine.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/base/tiling.h"
#include "server/lora/adapter_strength.h"
#include "server/lora/stack.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/counting_allocator.h"
#include "server/tensor/device.h"
#include "server/worker/runs.h"

namespace h3 {
namespace {

absl::StatusOr<std::optional<DType>> ParseDtype(const std::string& name) {
  if (name == "auto") return std::nullopt;
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  return RefuseArgument(reason::kBadRequest, absl::StrCat("dtype ", name, " is none of auto, float32, bfloat16, float16"));
}

// The CPU's allocator counts to the byte.
ByteCount MarginOf(c10::Device device, ByteCount total) { return device.is_cpu() ? ByteCount(0) : AcceleratorMargin(total); }

PlanOptions PlanOptionsOf(c10::Device device, ByteCount workspace) {
  PlanOptions options{.workspace = workspace};
  if (device.is_cpu()) {
    options.threads = at::get_num_threads();
    options.packs_attention = at::native::cpublas::could_pack(at::kBFloat16);
  }
  return options;
}

// A stack that is in place, as merged weights would depend on it.
RanStack RanStackOf(const ResidentModel& model, const Stack& stack) {
  RanStack ran;
  const std::vector<PlannedEntry> planned = stack.planned();
  for (size_t i = 0; i < planned.size(); ++i) {
    const StackEntry& entry = *planned[i].entry;
    RanAdapter adapter{.digest = stack.resolved()[i].digest,
                       .strength = {entry.strength, entry.video, entry.text, entry.audio, AlphaOf(entry).value_or(-1)}};
    adapter.strength.insert(adapter.strength.end(), entry.per_evaluation.begin(), entry.per_evaluation.end());
    for (const MergedTarget& target : MergedTargets({planned[i].shape}, model.sites(), model.plan_base().site_bytes)) {
      adapter.targets[target.site] = target.bytes;
    }
    ran.push_back(std::move(adapter));
  }
  return ran;
}

}  // namespace

absl::StatusOr<std::unique_ptr<H3Engine>> H3Engine::Create(const EngineOptions& options) {
  InstallMappedFileGuard();
  H3_ASSIGN_OR_RETURN(const c10::Device device, ParseDevice(options.device));
  VramLedger& ledger = LedgerOf(device);
  H3_ASSIGN_OR_RETURN(const auto dtype, ParseDtype(options.dtype));
  H3_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(options.model, options.checkpoint));
  auto engine = std::unique_ptr<H3Engine>(new H3Engine(ledger, options));
  H3_ASSIGN_OR_RETURN(const DeviceCapacity capacity, ProbeDevice(device, ledger.Snapshot().used, options.device_memory));
  engine->admission_ = std::make_unique<Admission>(capacity.total, MarginOf(device, capacity.total));
  // What will not fit is not loaded first.
  const BaseBytes weights = BaseBytesOf(checkpoint, dtype, options.adaln_on_host);
  H3_RETURN_IF_ERROR(engine->admission_->Check(absl::StrCat("the model ", checkpoint.name), {.held = weights.device},
                                               {.fixed = ledger.Snapshot().used}));
  H3_ASSIGN_OR_RETURN(engine->resident_, ResidentModel::Load(checkpoint, ledger,
                                                             {.device = device,
                                                              .copy_weights = options.copy_weights,
                                                              .dtype = dtype,
                                                              .adaln_on_host = options.adaln_on_host,
                                                              .silu_grid = options.silu_grid,
                                                              .workspace_bytes = options.workspace.value()}));
  const ResidentModel& model = *engine->resident_;
  H3Engine* self = engine.get();
  engine->store_ = std::make_unique<AdapterStore>(
      model, AdapterStoreOptions{.directory = options.adapters,
                                 .blobs = options.blobs,
                                 .idle_merged = options.idle_merged,
                                 .budget = options.adapter_memory,
                                 .host_budget = options.host_adapter_memory,
                                 .make_room = [self](const std::string& name, ByteCount needed, ByteCount beside) {
                                   return self->MakeRoomForAdapter(name, needed, beside);
                                 },
                                 .on_load = [self](AdapterSource from, absl::Duration took, ByteCount bytes) {
                                   if (self->options_.observer != nullptr) self->options_.observer->AdapterLoaded(from, took, bytes);
                                 }});
  engine->modulations_ = std::make_unique<ModulationCache>(options.modulation_cache);
  engine->plan_options_ = PlanOptionsOf(device, options.workspace);
  // On the CPU nobody but us keeps to --device-memory.
  if (device.is_cpu()) SetAllocationLimit(options.device_memory);
  engine->info_ = {.fingerprint = model.fingerprint(),
                   .name = checkpoint.name,
                   .container = checkpoint.container,
                   .qkv_layout = checkpoint.qkv_layout,
                   .partition = checkpoint.partition,
                   .geometry = checkpoint.geometry,
                   .dtype = ScalarTypeName(model.compute()),
                   .device = device.str(),
                   .parameters = model.weights().parameters(),
                   .weight_bytes = model.weights().bytes(),
                   .host_weight_bytes = model.weights().host_bytes(),
                   .plan_base = model.plan_base(),
                   .plan_options = engine->plan_options_,
                   .grid_width = model.silu_grid().has_value() ? model.silu_grid()->width : 0,
                   .warnings = model.silu_grid().has_value() ? model.silu_grid()->warnings : std::vector<std::string>()};
  return engine;
}

absl::StatusOr<std::unique_ptr<Generation>> H3Engine::StartGeneration(GenerationSpec spec) {
  H3_RETURN_IF_ERROR(Health());
  auto run = MakeGeneration(*this, std::move(spec));
  Observed("load", run.status()).IgnoreError();
  return run;
}

absl::StatusOr<std::unique_ptr<Session>> H3Engine::OpenSession(Conditions conditions,
                                                               std::vector<std::pair<float, float>> announced,
                                                               const CancellationToken& cancel) {
  H3_RETURN_IF_ERROR(Health());
  auto session = MakeSession(*this, std::move(conditions), std::move(announced), cancel);
  Observed("prepare", session.status()).IgnoreError();
  return session;
}

absl::StatusOr<ResolvedAdapter> H3Engine::LoadAdapter(const StackEntry& entry) {
  const c10::InferenceMode inference;
  auto resolved = CatchTorch("adapter", [&]() -> absl::StatusOr<ResolvedAdapter> {
    H3_ASSIGN_OR_RETURN(const auto stack, Stack::Build(*resident_, *store_, absl::MakeConstSpan(&entry, 1)));
    return stack->resolved().front();
  });
  Observed("load", resolved.status()).IgnoreError();
  return resolved;
}

absl::StatusOr<AdapterMeasure> H3Engine::MeasureAdapter(const StackEntry& entry) {
  const c10::InferenceMode inference;
  return CatchTorch(absl::StrCat("adapter ", entry.adapter), [&]() -> absl::StatusOr<AdapterMeasure> {
    H3_ASSIGN_OR_RETURN(const auto adapter, store_->Read(entry));
    std::vector<double> scales;
    for (const ResidentTerm& term : adapter->terms) scales.push_back(ScaleOf(term, entry.settings.alpha));
    NormCache cache;
    struct Sum {
      int64_t modules = 0;
      double delta = 0, weight = 0;
      double ratio() const { return weight > 0 ? std::sqrt(delta / weight) : 0; }
    };
    std::map<SiteKind, Sum> kinds;
    Sum all;
    for (const auto& [site, norm] : DeltaNorms(*resident_, *adapter, cache, scales)) {
      if (!norm.on_base) continue;
      const double weight = SquaredNorm(resident_->linear(site));
      for (Sum* sum : {&all, &kinds[resident_->sites()[static_cast<size_t>(site)].kind]}) {
        ++sum->modules;
        sum->delta += norm.square;
        sum->weight += weight;
      }
    }
    AdapterMeasure measure{.resolved = Resolve(*resident_, *adapter, entry), .relative_strength = all.ratio()};
    for (const auto& [kind, sum] : kinds) measure.kinds.push_back({std::string(SiteKindName(kind)), sum.modules, sum.ratio()});
    return measure;
  });
}

absl::StatusOr<ByteCount> H3Engine::UnloadAdapter(const std::string& digest) { return store_->Unload(digest); }

Occupancy H3Engine::Holding(ByteCount own) const {
  const LedgerSnapshot now = ledger_.Snapshot();
  const ByteCount idle_adapters = store_->IdleBytes(), idle_merged = store_->merged().idle_bytes(), modulations = modulations_->bytes();
  Occupancy holding{.own = own, .reusable = idle_adapters + idle_merged + modulations};
  // Norms stay as long as their adapters, those of the base for good.
  holding.fixed = now.of(Owner::kBaseWeights) + now.of(Owner::kRuntimeContext) + now.of(Owner::kUnattributed) + now.of(Owner::kCaches) - modulations;
  holding.others = now.of(Owner::kAdapters) - idle_adapters - own + now.of(Owner::kMaterialized) - idle_merged;
  return holding;
}

bool H3Engine::MakeSpare(ByteCount bytes, ByteCount own) {
  for (;;) {
    const ByteCount spare = admission_->Spare(Holding(own));
    if (spare >= bytes) return true;
    // What is cheapest to make again goes first.
    if (const ByteCount kept = modulations_->bytes(); kept > ByteCount(0)) {
      modulations_->Limit(std::max(ByteCount(0), kept - (bytes - spare)));
      if (modulations_->bytes() < kept) continue;
    }
    if (store_->merged().idle_bytes() > ByteCount(0)) {
      store_->merged().Drop("");
      continue;
    }
    if (!store_->EvictIdle()) return false;
  }
}

absl::Status H3Engine::MakeRoomForAdapter(const std::string& name, ByteCount needed, ByteCount beside) {
  H3_RETURN_IF_ERROR(admission_->Check(absl::StrCat("adapter ", name), {.held = needed}, Holding(beside)));
  MakeSpare(needed, beside);
  return absl::OkStatus();
}

absl::StatusOr<H3Engine::Admitted> H3Engine::Admit(const Stack& stack, const Layout& layout, int64_t evaluations) {
  const RequestPlan plan = PlanRequest(resident_->plan_base(), plan_options_, layout, evaluations, stack.planned());
  Admitted admitted{.in_place = plan.caches + plan.materialized};
  MemoryDemand demand{.held = plan.held + admitted.in_place};
  demand.transient = std::max(ByteCount(0), plan.largest().total() - plan.held);
  const ByteCount own = stack.AdapterBytes();
  H3_ASSIGN_OR_RETURN(admitted.reservation, admission_->Reserve(evaluations > 0 ? "the request" : "the session", demand, Holding(own)));
  MakeSpare(ByteCount(0), own);
  // Modulations are cached in what is left over.
  const Occupancy holding = Holding(own);
  const ByteCount spare = std::max(ByteCount(0), admission_->Spare(holding));
  modulations_->Limit(modulations_->bytes() + spare);
  const ByteCount more_modulations = std::min(spare, std::max(ByteCount(0), modulations_->budget() - modulations_->bytes()));
  const int64_t line = ModulationLineBytes(info_.geometry.blocks, info_.geometry.hidden);
  const ByteCount lines(std::min(more_modulations.value(), line * plan.modulation_points));
  admitted.planned_peak = holding.fixed + own + holding.others + holding.reusable + lines + admission_->reserved();
  return admitted;
}

void H3Engine::OnStack(const std::vector<StackEntry>& entries, const Stack* stack, absl::Duration took) {
  EngineObserver* const observer = options_.observer;
  if (stack == nullptr) {
    RanStack wanted;
    for (const StackEntry& entry : entries) wanted.push_back({.digest = entry.digest, .strength = {entry.strength}});
    if (observer != nullptr) observer->StackRefused(CompareStacks(last_stack_, wanted));
    return;
  }
  RanStack now = RanStackOf(*resident_, *stack);
  if (observer != nullptr) observer->StackInPlace(CompareStacks(last_stack_, now), stack->slowest_source(), took, MergedWrites(last_stack_, now));
  last_stack_ = std::move(now);
}

absl::Status H3Engine::Observed(absl::string_view phase, absl::Status status) {
  if (options_.observer != nullptr && DetailsOf(status).contains(kFailedAllocation)) options_.observer->OutOfMemory(phase);
  return status;
}

MemoryReport H3Engine::Memory() const {
  MemoryReport report;
  report.device = info_.device;
  report.ledger = ledger_.Snapshot();
  report.total = admission_->total();
  report.margin = admission_->margin();
  const c10::Device device = resident_->device();
  if (const auto now = ProbeDevice(device, report.ledger.used, options_.device_memory); now.ok()) report.free = now->free;
  const Occupancy holding = Holding();
  report.headroom = admission_->Headroom(holding);
  report.reserved = admission_->reserved();
  report.reusable = holding.reusable;
  report.allocator = ProbeAllocator(device);
  // What the allocator keeps of the device without a tensor in it.
  const ByteCount cached = report.allocator.reserved - report.allocator.allocated;
  report.ledger.owners[static_cast<size_t>(Owner::kAllocatorCache)] = cached;
  report.ledger.used += cached;
  report.host = ProbeHost();
  report.host_weights = resident_->weights().host_bytes();
  report.last_request_peak = ByteCount(last_peak_.load());
  report.adapters = store_->List();
  report.avoided_resident = store_->PinnedMergedBytes();
  report.base_mutations = base_mutations_.load();
  report.adapter_budget = store_->budget();
  report.host_adapter_budget = store_->host().budget();
  report.modulation_budget = modulations_->budget();
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) report.adapters_by_tier[static_cast<int>(tier)] = store_->Counters(tier);
  return report;
}

absl::Status H3Engine::Health() const {
  absl::MutexLock lock(&mu_);
  return fault_;
}

absl::Status H3Engine::CheckBase() { return Faulted(resident_->weights().CheckUnchanged()); }

void H3Engine::AuditBase(absl::Duration most) {
  const c10::InferenceMode inference;
  const absl::Time end = absl::Now() + most;
  do {
    bool through = false;
    const absl::Status status = CatchTorch("audit", [&]() -> absl::Status {
      H3_ASSIGN_OR_RETURN(through, resident_->AuditPiece());
      return absl::OkStatus();
    });
    // A check that ran out of memory has found nothing.
    if (!status.ok() && !absl::IsDataLoss(status)) return;
    if (options_.observer != nullptr && (through || !status.ok())) options_.observer->BaseVerified(status.ok());
    if (!Faulted(status).ok()) return;
  } while (absl::Now() < end);
}

absl::Status H3Engine::Faulted(const absl::Status& status) {
  if (status.ok()) return status;
  base_mutations_.fetch_add(1);
  absl::MutexLock lock(&mu_);
  if (fault_.ok()) fault_ = status;
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                absl::StrCat("the worker leaves: ", status.message()));
}

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options) { return H3Engine::Create(options); }

}  // namespace h3
