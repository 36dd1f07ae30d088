// Counts what an engine tells of itself.
#pragma once

#include "server/metrics/worker_metrics.h"
#include "server/worker/engine.h"

namespace h3 {

// Borrows the metrics. Thread-safe.
class MetricsObserver final : public EngineObserver {
 public:
  explicit MetricsObserver(WorkerMetrics& metrics) : metrics_(metrics) {}

  void AdapterLoaded(AdapterSource source, absl::Duration took, ByteCount bytes) override;
  void StackInPlace(StackChange change, AdapterSource slowest, absl::Duration took, ByteCount avoided_write) override;
  void StackRefused(StackChange change) override;
  void OutOfMemory(absl::string_view phase) override;
  void BaseVerified(bool unchanged) override;

 private:
  WorkerMetrics& metrics_;
};

}  // namespace h3
