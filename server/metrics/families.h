// What the metrics of both processes are made of: families that are filled at a scrape, families that are registered once, and the
// label values that both know.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <array>
#include <deque>
#include <string>
#include <vector>

namespace h3 {

using Label = prometheus::ClientMetric::Label;

inline constexpr std::array kTasks = {"t2va", "fl2va", "ref2va"};
// gRPC codes that a call can end with.
inline constexpr std::array kCodes = {
    "OK",      "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
    "ABORTED", "INTERNAL",  "UNAVAILABLE"};

inline prometheus::Family<prometheus::Counter>& Counters(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
inline prometheus::Family<prometheus::Histogram>& Histograms(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

// Appends one sample to a gauge or a counter.
void AddSample(prometheus::MetricFamily& family, double value, std::vector<Label> labels = {});

// The families of one scrape, in the order in which they were first asked for. References to them stay good until Take.
class Families {
 public:
  explicit Families(std::string prefix) : prefix_(std::move(prefix)) {}

  // The family of that name behind the prefix, made where it is not there yet.
  prometheus::MetricFamily& Gauge(const char* name, const char* help);
  prometheus::MetricFamily& Counter(const char* name, const char* help);
  // A gauge whose name everybody knows: without the prefix.
  prometheus::MetricFamily& Standard(const char* name, const char* help);

  std::vector<prometheus::MetricFamily> Take() &&;

 private:
  prometheus::MetricFamily& Find(std::string name, const char* help, prometheus::MetricType type);

  const std::string prefix_;
  std::deque<prometheus::MetricFamily> families_;
};

}  // namespace h3
