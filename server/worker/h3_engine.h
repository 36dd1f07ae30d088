// The Engine over LibTorch: one resident model, its adapters, and what runs and sessions share. worker/engine.h is the contract.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/lora/adapter_store.h"
#include "server/model/resident_model.h"
#include "server/tensor/device.h"
#include "server/vram/ledger.h"
#include "server/worker/engine.h"

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

  const ModelInfo& model() const override { return info_; }
  MemoryReport Memory() const override;
  absl::Status Health() const override ABSL_LOCKS_EXCLUDED(mu_);

  // For runs and sessions, on the device thread.
  const ResidentModel& resident() const { return *resident_; }
  AdapterStore& store() { return *store_; }
  VramLedger& ledger() { return ledger_; }
  void SetLastPeak(ByteCount peak) { last_peak_.store(peak.value()); }
  // After each piece of work: OK, or the base was changed under us. Then Health() keeps the fault and no result may leave.
  absl::Status CheckBase() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  H3Engine(VramLedger& ledger, const EngineOptions& options) : ledger_(ledger), options_(options) {}

  VramLedger& ledger_;
  const EngineOptions options_;
  std::unique_ptr<ResidentModel> resident_;
  std::unique_ptr<AdapterStore> store_;
  ModelInfo info_;
  DeviceCapacity capacity_;
  std::atomic<int64_t> last_peak_{0};
  std::atomic<int64_t> base_mutations_{0};
  mutable absl::Mutex mu_;
  absl::Status fault_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
