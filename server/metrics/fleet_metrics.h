// What a scheduler shows of its workers: the memory of each one's device, as its last heartbeat told it, and its state.
#pragma once

#include <prometheus/collectable.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/vram/memory_report.h"

namespace h3 {

struct WorkerReport {
  std::string worker;              // Its name in the scheduler: stable over restarts.
  std::string state;               // "loading", "ready", "draining", "lost".
  double heard = 0;                // Unix seconds of the last heartbeat; 0: none yet.
  std::optional<MemoryReport> memory;  // None: nothing fresh is known.
  int64_t out_of_memory = 0;       // Allocations that failed though the request had been admitted; with `memory`.
};

// Series h3_worker_*, label `worker`. A worker without fresh memory has no series of bytes: what it held last is not what it holds.
class FleetCollector final : public prometheus::Collectable {
 public:
  explicit FleetCollector(std::function<std::vector<WorkerReport>()> read) : read_(std::move(read)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::function<std::vector<WorkerReport>()> read_;
};

}  // namespace h3
