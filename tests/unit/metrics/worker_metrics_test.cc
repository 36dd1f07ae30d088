#include "server/metrics/worker_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace h3 {
namespace {

// Samples of one family: the value of `label` -> value.
std::map<std::string, double> Samples(const std::vector<prometheus::MetricFamily>& families, const std::string& name,
                                      const std::string& label) {
  std::map<std::string, double> samples;
  for (const prometheus::MetricFamily& family : families) {
    if (family.name != name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string key;
      for (const auto& l : metric.label) {
        if (l.name == label) key = l.value;
      }
      EXPECT_TRUE(
          samples.emplace(key, family.type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value)
              .second)
          << name << " repeats the series " << key << ", which Prometheus takes for an error";
    }
  }
  return samples;
}

MemoryGauges SomeMemory() {
  MemoryGauges gauges{.device = "cpu", .total = GiB(1), .free = MiB(100)};
  for (int i = 0; i < kOwners; ++i) {
    gauges.ledger.owners[static_cast<size_t>(i)] = MiB(i + 1);
    gauges.ledger.used += MiB(i + 1);
  }
  return gauges;
}

TEST(MemoryCollectorTest, OwnersSumToWhatIsUsed) {
  const auto families = MemoryCollector(SomeMemory).Collect();
  double sum = 0;
  const auto owners = Samples(families, "h3_vram_bytes", "owner");
  EXPECT_EQ(owners.size(), static_cast<size_t>(kOwners));
  for (const auto& [owner, bytes] : owners) sum += bytes;
  EXPECT_EQ(sum, static_cast<double>(SomeMemory().ledger.used.value()));
  EXPECT_EQ(owners.at("base_weights"), static_cast<double>(MiB(1).value()));
  EXPECT_EQ(owners.at("unattributed"), static_cast<double>(MiB(10).value()));
}

TEST(MemoryCollectorTest, ReadsAtTheMomentOfTheScrape) {
  MemoryGauges now = SomeMemory();
  const MemoryCollector collector([&] { return now; });
  now.free = MiB(7);
  EXPECT_EQ(Samples(collector.Collect(), "h3_vram_device_free_bytes", "device").at("cpu"), static_cast<double>(MiB(7).value()));
  now.free = MiB(8);
  now.base_mutations = 2;
  EXPECT_EQ(Samples(collector.Collect(), "h3_vram_device_free_bytes", "device").at("cpu"), static_cast<double>(MiB(8).value()));
  EXPECT_EQ(Samples(collector.Collect(), "h3_base_weight_mutations_total", "device").at("cpu"), 2);
}

TEST(MemoryCollectorTest, AnAdapterThatIsGoneLeavesNoSeries) {
  MemoryGauges now = SomeMemory();
  const MemoryCollector collector([&] { return now; });
  now.adapters = {{"style", MiB(1)}};
  EXPECT_EQ(Samples(collector.Collect(), "h3_adapter_bytes", "adapter").count("style"), 1u);
  now.adapters.clear();
  EXPECT_EQ(Samples(collector.Collect(), "h3_adapter_bytes", "adapter").count("style"), 0u);
}

TEST(MemoryCollectorTest, ListsTheLargestAdaptersAndTheRestAsOther) {
  MemoryGauges now = SomeMemory();
  for (int i = 1; i <= 60; ++i) now.adapters.push_back({absl::StrCat("a", i), MiB(i)});
  const auto families = MemoryCollector([&] { return now; }).Collect();
  const auto adapters = Samples(families, "h3_adapter_bytes", "adapter");
  EXPECT_EQ(adapters.size(), 51u);
  EXPECT_EQ(adapters.count("a60"), 1u);
  EXPECT_EQ(adapters.count("a10"), 0u);
  EXPECT_EQ(adapters.at("other"), static_cast<double>(MiB(55).value()));  // 1 + ... + 10
  EXPECT_EQ(Samples(families, "h3_adapters_resident", "tier").at("device"), 60);
}

TEST(MemoryCollectorTest, TwoContentsOfOneNameShareASeries) {
  MemoryGauges now = SomeMemory();
  now.adapters = {{"style", MiB(1)}, {"style", MiB(2)}, {"other", MiB(4)}};
  const auto families = MemoryCollector([&] { return now; }).Collect();
  const auto adapters = Samples(families, "h3_adapter_bytes", "adapter");
  EXPECT_EQ(adapters.at("style"), static_cast<double>(MiB(3).value()));
  EXPECT_EQ(adapters.at("other"), static_cast<double>(MiB(4).value()));
  EXPECT_EQ(Samples(families, "h3_adapters_resident", "tier").at("device"), 3);
}

TEST(WorkerMetricsTest, EverySeriesIsThereBeforeTheFirstRequest) {
  prometheus::Registry registry;
  WorkerMetrics metrics(registry);
  const auto families = registry.Collect();
  const auto requests = Samples(families, "h3_worker_requests_total", "code");
  for (const char* code : {"OK", "CANCELLED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})
    EXPECT_EQ(requests.at(code), 0) << code;
  EXPECT_EQ(Samples(families, "h3_denoise_steps_total", "").at(""), 0);
  metrics.CountRequest("CANCELLED");
  EXPECT_EQ(Samples(registry.Collect(), "h3_worker_requests_total", "code").at("CANCELLED"), 1);
}

}  // namespace
}  // namespace h3
