// The memory of a device as Prometheus sees it: one table of names, helps and labels, from which a worker shows its own device
// (prefix "h3_") and a scheduler those of its workers (prefix "h3_worker_", label `worker`). Two prefixes, so that who scrapes both
// never counts a byte twice.
#pragma once

#include <prometheus/metric_family.h>

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "server/vram/memory_report.h"

namespace h3 {

using Label = prometheus::ClientMetric::Label;

inline constexpr std::array kTierNames = {"device", "host"};  // By Tier.

inline double Bytes(ByteCount bytes) { return static_cast<double>(bytes.value()); }

// Appends one sample to a gauge or a counter.
void AddSample(prometheus::MetricFamily& family, double value, std::vector<Label> labels);

// The families of one scrape. References to families stay good until Take.
class MemoryFamilies {
 public:
  explicit MemoryFamilies(std::string prefix) : prefix_(std::move(prefix)) {}

  // Everything that a report tells of one moment, `labels` in front of each series' own. Of adapters the 50 largest of each tier,
  // the rest as "other". For several devices call it once for each.
  void Show(const MemoryReport& now, const std::vector<Label>& labels);

  // The family of that name behind the prefix, made where it is not there yet.
  prometheus::MetricFamily& Gauge(const char* name, const char* help);
  prometheus::MetricFamily& Counter(const char* name, const char* help);
  // A gauge whose name everybody knows: without the prefix.
  prometheus::MetricFamily& Standard(const char* name, const char* help);

  std::vector<prometheus::MetricFamily> Take() &&;

 private:
  prometheus::MetricFamily& Find(std::string name, const char* help, prometheus::MetricType type);
  void ShowAdapters(const MemoryReport& now, const std::vector<Label>& labels);

  const std::string prefix_;
  std::deque<prometheus::MetricFamily> families_;
};

}  // namespace h3
