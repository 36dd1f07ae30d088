// What a worker counts, and what it knows of its memory at the moment of a scrape.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/vram/memory_report.h"

namespace h3 {

// The class of a request by its packed rows, the label `size` of h3_denoise_step_seconds: "xs" below 8,192 rows, "s" below 24,576 (5 s
// at 480p), "m" below 65,536 (5 s at 720p, 15 s at 480p), "l" below 131,072 (5 s at 1080p, 15 s at 720p), "xl".
absl::string_view SizeClass(double rows);

// What all steps of one request share.
struct StepKind {
  std::string task;     // "t2va", "fl2va", "ref2va".
  double rows = 0;      // Packed.
  size_t adapters = 0;  // In its stack.
};

// Every series that is known beforehand starts at 0. Thread-safe. Callers give the labels' words that are listed with each method, and
// nothing that comes from a client.
class WorkerMetrics {
 public:
  explicit WorkerMetrics(prometheus::Registry& registry);

  // "ok": an evaluation is done, and took so long; "cancelled", "failed": it was not finished.
  void CountStep(const StepKind& kind, double seconds);
  void CountUnfinishedStep(const std::string& task, const std::string& outcome);
  // A request's or a session's stack: how many adapters, with which strengths, and the sum of their ranks.
  void ObserveStack(const std::vector<double>& strengths);
  void ObserveEffectiveRank(double rank);
  // `code`: name of a gRPC code.
  void CountRequest(const std::string& code);

  // `source`: "disk", "host".
  void CountAdapterLoad(const std::string& source, double seconds, ByteCount bytes);
  // `kind`: "activate", "deactivate", "strength", "reorder", "replace"; `residency`, where the slowest adapter came from: "device",
  // "host", "disk".
  void CountSwap(const std::string& kind, const std::string& residency, double seconds, ByteCount avoided_write);
  void CountRefusedSwap(const std::string& kind);
  // `phase`: "load", "prepare", "denoise", "result".
  void CountOutOfMemory(const std::string& phase);
  int64_t out_of_memory() const;  // All phases.
  // `result`: "ok", "changed".
  void CountVerification(const std::string& result);
  // What the device is, once it is known; once.
  void SetDevice(const std::string& device, const std::string& name);

  // From the moment that a cancel was seen until its run or session had left the device.
  prometheus::Histogram& cancel_latency_seconds;

 private:
  prometheus::Family<prometheus::Histogram>& step_seconds_;
  prometheus::Family<prometheus::Counter>& steps_;
  prometheus::Histogram& stack_depth_;
  prometheus::Histogram& effective_rank_;
  prometheus::Histogram& strength_;
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Histogram>& load_seconds_;
  prometheus::Family<prometheus::Counter>& load_bytes_;
  prometheus::Family<prometheus::Counter>& swaps_;
  prometheus::Family<prometheus::Histogram>& swap_seconds_;
  prometheus::Family<prometheus::Counter>& avoided_write_bytes_;
  prometheus::Family<prometheus::Counter>& out_of_memory_;
  prometheus::Family<prometheus::Counter>& verifications_;
  prometheus::Family<prometheus::Gauge>& device_info_;
};

// Gauges that are read when Prometheus asks, all from one report, not when they change. At most 50 adapters of each tier by size, the
// rest as "other".
class MemoryCollector final : public prometheus::Collectable {
 public:
  explicit MemoryCollector(std::function<MemoryReport()> read) : read_(std::move(read)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::function<MemoryReport()> read_;
};

}  // namespace h3
