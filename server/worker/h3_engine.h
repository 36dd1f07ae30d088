// The Engine over LibTorch: one resident model, its adapters, and what runs and sessions share. worker/engine.h is the contract.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/format/plan.h"
#include "server/lora/adapter_store.h"
#include "server/lora/stack.h"
#include "server/model/modulation_cache.h"
#include "server/model/resident_model.h"
#include "server/tensor/device.h"
#include "server/vram/admission.h"
#include "server/vram/ledger.h"
#include "server/worker/engine.h"
#include "server/worker/stack_change.h"

namespace h3 {

class H3Engine final : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<H3Engine>> Create(const EngineOptions& options);

  absl::StatusOr<std::unique_ptr<Generation>> StartGeneration(GenerationSpec spec) override;
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(Conditions conditions, std::vector<std::pair<float, float>> announced,
                                                       const CancellationToken& cancel) override;
  absl::StatusOr<ResolvedAdapter> LoadAdapter(const StackEntry& entry) override;
  absl::StatusOr<AdapterMeasure> MeasureAdapter(const StackEntry& entry) override;
  absl::StatusOr<ByteCount> UnloadAdapter(const std::string& digest) override;
  absl::Status PrefetchAdapter(const StackEntry& entry) override { return store_->Prefetch(entry); }
  void AuditBase(absl::Duration most) override ABSL_LOCKS_EXCLUDED(mu_);

  const ModelInfo& model() const override { return info_; }
  MemoryReport Memory() const override;
  absl::Status Health() const override ABSL_LOCKS_EXCLUDED(mu_);

  // For runs and sessions, on the device thread.
  const ResidentModel& resident() const { return *resident_; }
  AdapterStore& store() { return *store_; }
  ModulationCache& modulations() { return *modulations_; }

  // Memory that a request was promised.
  struct Admitted {
    Reservation reservation;
    ByteCount in_place;      // Of it, what will be counted elsewhere once the request is prepared: Settle it then.
    ByteCount planned_peak;  // Bound on the sum of all owners while it runs.
  };
  // Plans a request with that stack and reserves what it takes; what is reusable goes as far as it is in the way. `evaluations`: 0 for
  // a session. VRAM_EXCEEDED as Admission::Reserve.
  absl::StatusOr<Admitted> Admit(const Stack& stack, const Layout& layout, int64_t evaluations);
  // A request's stack was built, or refused (null): tells the observer what changed, and how long it took.
  void OnStack(const std::vector<StackEntry>& entries, const Stack* stack, absl::Duration took);
  // Passes `status` on; tells the observer where an allocation failed though its request was admitted.
  absl::Status Observed(absl::string_view phase, absl::Status status);
  VramLedger& ledger() { return ledger_; }
  void SetLastPeak(ByteCount peak) { last_peak_.store(peak.value()); }
  // After each piece of work: OK, or the base was changed under us. Then Health() keeps the fault and no result may leave.
  absl::Status CheckBase() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  H3Engine(VramLedger& ledger, const EngineOptions& options) : ledger_(ledger), options_(options) {}

  // [any] What the device holds beside requests; `own`: bytes of pinned adapters that belong to who asks.
  Occupancy Holding(ByteCount own = ByteCount(0)) const;
  // Frees what is reusable until `bytes` are spare; false: it was not enough.
  bool MakeSpare(ByteCount bytes, ByteCount own);
  absl::Status MakeRoomForAdapter(const std::string& name, ByteCount needed, ByteCount beside);
  // `status` of a check of the base: passed on as what ends this worker.
  absl::Status Faulted(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  VramLedger& ledger_;
  const EngineOptions options_;
  std::unique_ptr<ResidentModel> resident_;
  std::unique_ptr<AdapterStore> store_;
  std::unique_ptr<ModulationCache> modulations_;
  std::unique_ptr<Admission> admission_;
  PlanOptions plan_options_;
  RanStack last_stack_;
  ModelInfo info_;
  std::atomic<int64_t> last_peak_{0};
  std::atomic<int64_t> base_mutations_{0};
  mutable absl::Mutex mu_;
  absl::Status fault_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
