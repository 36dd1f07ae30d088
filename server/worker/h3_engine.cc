#include "server/worker/h3_engine.h"

#include <c10/core/InferenceMode.h>

#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/lora/adapter_strength.h"
#include "server/lora/stack.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/counting_allocator.h"
#include "server/tensor/device.h"
#include "server/worker/runs.h"

namespace h3 {
namespace {

absl::StatusOr<std::optional<c10::ScalarType>> ParseDtype(const std::string& name) {
  if (name == "auto") return std::nullopt;
  if (name == "float32") return c10::ScalarType::Float;
  if (name == "bfloat16") return c10::ScalarType::BFloat16;
  if (name == "float16") return c10::ScalarType::Half;
  return RefuseArgument(reason::kBadRequest, absl::StrCat("dtype ", name, " is none of auto, float32, bfloat16, float16"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<H3Engine>> H3Engine::Create(const EngineOptions& options) {
  InstallMappedFileGuard();
  VramLedger& ledger = InstallCountingAllocator();
  H3_ASSIGN_OR_RETURN(const c10::Device device, ParseDevice(options.device));
  H3_ASSIGN_OR_RETURN(const auto dtype, ParseDtype(options.dtype));
  H3_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(options.model, options.checkpoint));
  auto engine = std::unique_ptr<H3Engine>(new H3Engine(ledger, options));
  H3_ASSIGN_OR_RETURN(engine->resident_,
                      ResidentModel::Load(checkpoint, ledger,
                                          {.device = device, .copy_weights = options.copy_weights, .dtype = dtype, .silu_grid = options.silu_grid}));
  const ResidentModel& model = *engine->resident_;
  engine->store_ = std::make_unique<AdapterStore>(
      model, AdapterStoreOptions{.directory = options.adapters, .blobs = options.blobs, .idle_merged = options.idle_merged, .budget = options.adapter_memory});
  // On the CPU nobody but us keeps to --device-memory.
  if (device.is_cpu()) SetAllocationLimit(options.device_memory);
  H3_ASSIGN_OR_RETURN(engine->capacity_, ProbeDevice(device, ledger.Snapshot().used, options.device_memory));
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
                   .grid_width = model.silu_grid().has_value() ? model.silu_grid()->width : 0,
                   .warnings = model.silu_grid().has_value() ? model.silu_grid()->warnings : std::vector<std::string>()};
  return engine;
}

absl::StatusOr<std::unique_ptr<Generation>> H3Engine::StartGeneration(GenerationSpec spec) {
  H3_RETURN_IF_ERROR(Health());
  return MakeGeneration(*this, std::move(spec));
}

absl::StatusOr<std::unique_ptr<Session>> H3Engine::OpenSession(Conditions conditions,
                                                               std::vector<std::pair<float, float>> announced,
                                                               const CancellationToken& cancel) {
  H3_RETURN_IF_ERROR(Health());
  return MakeSession(*this, std::move(conditions), std::move(announced), cancel);
}

absl::StatusOr<ResolvedAdapter> H3Engine::LoadAdapter(const StackEntry& entry) {
  const c10::InferenceMode inference;
  H3_ASSIGN_OR_RETURN(const auto stack, Stack::Build(*resident_, *store_, absl::MakeConstSpan(&entry, 1)));
  return stack->resolved().front();
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

MemoryReport H3Engine::Memory() const {
  MemoryReport report;
  report.device = info_.device;
  report.ledger = ledger_.Snapshot();
  report.total = capacity_.total;
  if (const auto now = ProbeDevice(resident_->device(), report.ledger.used, options_.device_memory); now.ok()) report.free = now->free;
  report.last_request_peak = ByteCount(last_peak_.load());
  for (const StoredAdapter& adapter : store_->List()) {
    report.adapters.push_back({adapter.name, adapter.digest, adapter.bytes, adapter.pins});
  }
  report.avoided_resident = store_->PinnedMergedBytes();
  report.base_mutations = base_mutations_.load();
  report.adapter_budget = store_->budget();
  const AdapterStoreStats stats = store_->Stats();
  report.adapter_hits = stats.hits;
  report.adapter_misses = stats.misses;
  report.adapter_evictions = stats.evictions;
  return report;
}

absl::Status H3Engine::Health() const {
  absl::MutexLock lock(&mu_);
  return fault_;
}

absl::Status H3Engine::CheckBase() {
  const absl::Status status = resident_->weights().CheckUnchanged();
  if (status.ok()) return status;
  base_mutations_.fetch_add(1);
  absl::MutexLock lock(&mu_);
  if (fault_.ok()) fault_ = status;
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                absl::StrCat("the worker leaves: ", status.message()));
}

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options) { return H3Engine::Create(options); }

}  // namespace h3
