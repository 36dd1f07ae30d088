// What a worker counts, and what it knows of its memory at the moment of a scrape.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/vram/ledger.h"

namespace h3 {

// Children are kept as references and start at 0. Thread-safe.
class WorkerMetrics {
 public:
  explicit WorkerMetrics(prometheus::Registry& registry);

  prometheus::Counter& denoise_steps;
  prometheus::Histogram& step_seconds;
  prometheus::Histogram& stack_depth;

  // `code`: name of a gRPC code.
  void CountRequest(const std::string& code);

 private:
  prometheus::Family<prometheus::Counter>& requests_;
};

struct AdapterGauge {
  std::string name;
  ByteCount bytes;
};

// One moment of a device's memory.
struct MemoryGauges {
  std::string device;
  ByteCount total, free;
  LedgerSnapshot ledger;
  ByteCount last_request_peak;
  ByteCount avoided_resident;
  int64_t base_mutations = 0;
  std::vector<AdapterGauge> adapters;
  std::optional<ByteCount> adapter_budget;
  int64_t adapter_hits = 0, adapter_misses = 0, adapter_evictions = 0;
};

// Gauges that are read when Prometheus asks, not when they change. At most 50 adapters by size, the rest as "other".
class MemoryCollector final : public prometheus::Collectable {
 public:
  explicit MemoryCollector(std::function<MemoryGauges()> read) : read_(std::move(read)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::function<MemoryGauges()> read_;
};

}  // namespace h3
