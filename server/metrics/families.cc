#include "server/metrics/families.h"

#include <algorithm>
#include <utility>

namespace h3 {

void AddSample(prometheus::MetricFamily& family, double value, std::vector<Label> labels) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  (family.type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  family.metric.push_back(std::move(metric));
}

prometheus::MetricFamily& Families::Gauge(const char* name, const char* help) {
  return Find(prefix_ + name, help, prometheus::MetricType::Gauge);
}
prometheus::MetricFamily& Families::Counter(const char* name, const char* help) {
  return Find(prefix_ + name, help, prometheus::MetricType::Counter);
}
prometheus::MetricFamily& Families::Standard(const char* name, const char* help) {
  return Find(name, help, prometheus::MetricType::Gauge);
}

prometheus::MetricFamily& Families::Find(std::string name, const char* help, prometheus::MetricType type) {
  const auto found = std::find_if(families_.begin(), families_.end(), [&](const auto& family) { return family.name == name; });
  if (found != families_.end()) return *found;
  prometheus::MetricFamily family;
  family.name = std::move(name);
  family.help = help;
  family.type = type;
  return families_.emplace_back(std::move(family));
}

std::vector<prometheus::MetricFamily> Families::Take() && {
  return {std::make_move_iterator(families_.begin()), std::make_move_iterator(families_.end())};
}

}  // namespace h3
