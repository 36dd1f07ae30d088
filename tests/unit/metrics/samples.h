// What a collector or a registry shows, for tests.
#pragma once

#include <gtest/gtest.h>
#include <prometheus/metric_family.h>

#include <map>
#include <string>
#include <vector>

namespace h3 {

// Samples of one family by the value of a label, or by those of two with a space between: the value, or a histogram's count. A family
// with more labels: samples that share these are added up.
inline std::map<std::string, double> Samples(const std::vector<prometheus::MetricFamily>& families, const std::string& name,
                                             const std::string& first, const std::string& second = "") {
  std::map<std::string, double> samples;
  std::map<std::string, int> series;
  for (const prometheus::MetricFamily& family : families) {
    if (family.name != name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string key, of_first, of_second;
      for (const auto& label : metric.label) {
        key += label.name + "=" + label.value + "\n";
        if (label.name == first) of_first = label.value;
        if (label.name == second) of_second = label.value;
      }
      EXPECT_EQ(++series[key], 1) << name << " repeats the series " << key << ", which Prometheus takes for an error";
      samples[second.empty() ? of_first : of_first + " " + of_second] +=
          family.type == prometheus::MetricType::Counter     ? metric.counter.value
          : family.type == prometheus::MetricType::Histogram ? static_cast<double>(metric.histogram.sample_count)
                                                             : metric.gauge.value;
    }
  }
  return samples;
}

}  // namespace h3
