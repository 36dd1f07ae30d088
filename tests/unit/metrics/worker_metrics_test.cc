#include "server/metrics/worker_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/unit/metrics/samples.h"

namespace h3 {
namespace {

using ::testing::HasSubstr;

double Value(ByteCount bytes) { return static_cast<double>(bytes.value()); }

MemoryReport SomeMemory() {
  MemoryReport report{.device = "cpu", .total = GiB(1), .free = MiB(100)};
  for (int i = 0; i < kOwners; ++i) {
    report.ledger.owners[static_cast<size_t>(i)] = MiB(i + 1);
    report.ledger.used += MiB(i + 1);
  }
  return report;
}

AdapterResidency Adapter(const std::string& name, ByteCount bytes, Tier tier = Tier::kDevice, int64_t pins = 0) {
  return {.name = name, .digest = "", .bytes = bytes, .pins = pins, .tier = tier};
}

TEST(MemoryCollectorTest, OwnersSumToWhatIsUsed) {
  const auto families = MemoryCollector(SomeMemory).Collect();
  double sum = 0;
  const auto owners = Samples(families, "h3_vram_bytes", "owner");
  EXPECT_EQ(owners.size(), static_cast<size_t>(kOwners));
  for (const auto& [owner, bytes] : owners) sum += bytes;
  EXPECT_EQ(sum, Value(SomeMemory().ledger.used));
  EXPECT_EQ(owners.at("base_weights"), Value(MiB(1)));
  EXPECT_EQ(owners.at("unattributed"), Value(MiB(10)));
}

TEST(MemoryCollectorTest, EverySeriesThatIsKnownIsThereInAnEmptyWorker) {
  const auto families = MemoryCollector([] { return MemoryReport{.device = "cpu"}; }).Collect();
  for (const char* name :
       {"h3_vram_device_total_bytes", "h3_vram_device_free_bytes", "h3_vram_headroom_bytes", "h3_vram_admission_reserved_bytes",
        "h3_vram_reusable_bytes", "h3_vram_margin_bytes", "h3_vram_peak_bytes", "h3_allocator_allocated_bytes", "h3_allocator_reserved_bytes",
        "h3_allocator_active_bytes", "h3_allocator_inactive_split_bytes", "h3_allocator_retries_total", "h3_host_weights_bytes",
        "h3_base_weight_mutations_total", "h3_rematerialization_avoided_resident_bytes"}) {
    EXPECT_EQ(Samples(families, name, "device"), (std::map<std::string, double>{{"cpu", 0}})) << name;
  }
  for (const char* name : {"h3_adapter_bytes", "h3_adapters_resident", "h3_adapter_evictions_total"})
    EXPECT_EQ(Samples(families, name, "tier"), (std::map<std::string, double>{{"device", 0}, {"host", 0}})) << name;
  EXPECT_EQ(Samples(families, "h3_adapter_cache_lookups_total", "tier", "result").size(), 4u);
  EXPECT_EQ(Samples(families, "h3_host_resident_bytes", "kind"), (std::map<std::string, double>{{"anonymous", 0}, {"file", 0}}));
  EXPECT_EQ(Samples(families, "h3_adapter_leases", "").at(""), 0);
  EXPECT_EQ(Samples(families, "process_resident_memory_bytes", "").at(""), 0);
}

TEST(MemoryCollectorTest, ReadsAtTheMomentOfTheScrape) {
  MemoryReport now = SomeMemory();
  int reads = 0;
  const MemoryCollector collector([&] {
    ++reads;
    return now;
  });
  now.free = MiB(7);
  EXPECT_EQ(Samples(collector.Collect(), "h3_vram_device_free_bytes", "device").at("cpu"), Value(MiB(7)));
  now.free = MiB(8);
  now.headroom = MiB(5);
  now.base_mutations = 2;
  const auto families = collector.Collect();
  EXPECT_EQ(Samples(families, "h3_vram_device_free_bytes", "device").at("cpu"), Value(MiB(8)));
  EXPECT_EQ(Samples(families, "h3_vram_headroom_bytes", "device").at("cpu"), Value(MiB(5)));
  EXPECT_EQ(Samples(families, "h3_base_weight_mutations_total", "device").at("cpu"), 2);
  EXPECT_EQ(reads, 2) << "one report a scrape: its numbers belong together";
}

TEST(MemoryCollectorTest, ABudgetWithoutALimitHasNoSeries) {
  MemoryReport now = SomeMemory();
  now.modulation_budget = MiB(3);
  now.host_adapter_budget = MiB(4);
  const MemoryCollector collector([&] { return now; });
  EXPECT_EQ(Samples(collector.Collect(), "h3_vram_budget_bytes", "pool"),
            (std::map<std::string, double>{{"modulations", Value(MiB(3))}, {"host_adapters", Value(MiB(4))}}));
  now.adapter_budget = ByteCount(0);
  EXPECT_EQ(Samples(collector.Collect(), "h3_vram_budget_bytes", "pool").at("adapters"), 0);
}

TEST(MemoryCollectorTest, AnAdapterThatIsGoneLeavesNoSeries) {
  MemoryReport now = SomeMemory();
  const MemoryCollector collector([&] { return now; });
  now.adapters = {Adapter("style", MiB(1))};
  EXPECT_EQ(Samples(collector.Collect(), "h3_adapter_bytes", "adapter", "tier").count("style device"), 1u);
  now.adapters.clear();
  EXPECT_EQ(Samples(collector.Collect(), "h3_adapter_bytes", "adapter", "tier").count("style device"), 0u);
}

TEST(MemoryCollectorTest, TiersAreCountedApart) {
  MemoryReport now = SomeMemory();
  now.adapters = {Adapter("style", MiB(1), Tier::kDevice, 2), Adapter("style", MiB(3), Tier::kHost), Adapter("turbo", MiB(5), Tier::kDevice, 1)};
  now.adapters_by_tier[static_cast<int>(Tier::kDevice)] = {.hits = 7, .misses = 3, .evictions = 2};
  now.adapters_by_tier[static_cast<int>(Tier::kHost)] = {.hits = 1, .misses = 2, .evictions = 0};
  const auto families = MemoryCollector([&] { return now; }).Collect();
  const auto bytes = Samples(families, "h3_adapter_bytes", "adapter", "tier");
  EXPECT_EQ(bytes.at("style device"), Value(MiB(1)));
  EXPECT_EQ(bytes.at("style host"), Value(MiB(3)));
  EXPECT_EQ(Samples(families, "h3_adapters_resident", "tier"), (std::map<std::string, double>{{"device", 2}, {"host", 1}}));
  const auto lookups = Samples(families, "h3_adapter_cache_lookups_total", "tier", "result");
  EXPECT_EQ(lookups.at("device hit"), 7);
  EXPECT_EQ(lookups.at("device miss"), 3);
  EXPECT_EQ(lookups.at("host miss"), 2);
  EXPECT_EQ(Samples(families, "h3_adapter_evictions_total", "tier").at("device"), 2);
  EXPECT_EQ(Samples(families, "h3_adapter_leases", "").at(""), 3);
}

TEST(MemoryCollectorTest, ListsTheLargestAdaptersOfEachTierAndTheRestAsOther) {
  MemoryReport now = SomeMemory();
  for (int i = 1; i <= 60; ++i) now.adapters.push_back(Adapter(absl::StrCat("a", i), MiB(i)));
  for (int i = 1; i <= 52; ++i) now.adapters.push_back(Adapter(absl::StrCat("a", i), MiB(100 + i), Tier::kHost));
  const auto families = MemoryCollector([&] { return now; }).Collect();
  const auto adapters = Samples(families, "h3_adapter_bytes", "adapter", "tier");
  EXPECT_EQ(adapters.size(), 51u + 51u);
  EXPECT_EQ(adapters.count("a60 device"), 1u);
  EXPECT_EQ(adapters.count("a10 device"), 0u);
  EXPECT_EQ(adapters.count("a3 host"), 1u);
  EXPECT_EQ(adapters.count("a2 host"), 0u);
  EXPECT_EQ(adapters.at("other device"), Value(MiB(55)));  // 1 + ... + 10
  EXPECT_EQ(adapters.at("other host"), Value(MiB(203)));   // 101 + 102
  EXPECT_EQ(Samples(families, "h3_adapters_resident", "tier"), (std::map<std::string, double>{{"device", 60}, {"host", 52}}));
}

TEST(MemoryCollectorTest, TwoContentsOfOneNameShareASeries) {
  MemoryReport now = SomeMemory();
  now.adapters = {Adapter("style", MiB(1)), Adapter("style", MiB(2)), Adapter("other", MiB(4))};
  const auto families = MemoryCollector([&] { return now; }).Collect();
  const auto adapters = Samples(families, "h3_adapter_bytes", "adapter", "tier");
  EXPECT_EQ(adapters.at("style device"), Value(MiB(3)));
  EXPECT_EQ(adapters.at("other device"), Value(MiB(4)));
  EXPECT_EQ(Samples(families, "h3_adapters_resident", "tier").at("device"), 3);
}

TEST(MemoryCollectorTest, NamesAreEscaped) {
  MemoryReport now = SomeMemory();
  now.adapters = {Adapter(R"(a"} 1 é{x="\y)", MiB(1))};
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, MemoryCollector([&] { return now; }).Collect());
  EXPECT_THAT(text.str(), HasSubstr(R"(h3_adapter_bytes{adapter="a\"} 1 é{x=\"\\y",tier="device"} 1048576)"));
}

class WorkerMetricsTest : public ::testing::Test {
 protected:
  std::map<std::string, double> Of(const std::string& name, const std::string& first, const std::string& second = "") {
    return Samples(registry.Collect(), name, first, second);
  }
  prometheus::Registry registry;
  WorkerMetrics metrics{registry};
};

TEST_F(WorkerMetricsTest, EverySeriesIsThereBeforeTheFirstRequest) {
  const std::map<std::string, size_t> expected = {
      {"h3_worker_requests_total", 10}, {"h3_denoise_steps_total", 9},    {"h3_denoise_step_seconds", 60},
      {"h3_cancel_latency_seconds", 1}, {"h3_lora_stack_depth", 1},       {"h3_lora_effective_rank", 1},
      {"h3_lora_strength", 1},          {"h3_adapter_load_seconds", 2},   {"h3_adapter_load_bytes_total", 2},
      {"h3_adapter_swaps_total", 10},   {"h3_adapter_swap_seconds", 15},  {"h3_rematerialization_avoided_write_bytes_total", 5},
      {"h3_oom_total", 4},              {"h3_base_weight_verifications_total", 2}};
  std::map<std::string, size_t> found;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    found[family.name] = family.metric.size();
    size_t series = 0;
    for (const prometheus::ClientMetric& metric : family.metric) {
      EXPECT_EQ(metric.counter.value, 0) << family.name;
      EXPECT_EQ(metric.histogram.sample_count, 0u) << family.name;
      series += metric.histogram.bucket.empty() ? 1 : metric.histogram.bucket.size() + 2;
    }
    EXPECT_LE(series, 840u) << family.name << ": the largest family that we allow";
  }
  EXPECT_EQ(found, expected);
}

TEST_F(WorkerMetricsTest, AStepIsCountedUnderItsTaskSizeAndStack) {
  metrics.CountStep({.task = "t2va", .rows = 32'000, .adapters = 2}, 1.5);
  metrics.CountStep({.task = "t2va", .rows = 100, .adapters = 9}, 0.02);
  metrics.CountUnfinishedStep("t2va", "cancelled");
  metrics.CountUnfinishedStep("ref2va", "failed");
  const auto steps = Of("h3_denoise_steps_total", "task", "outcome");
  EXPECT_EQ(steps.at("t2va ok"), 2);
  EXPECT_EQ(steps.at("t2va cancelled"), 1);
  EXPECT_EQ(steps.at("ref2va failed"), 1);
  EXPECT_EQ(steps.at("ref2va ok"), 0);
  EXPECT_EQ(Of("h3_denoise_step_seconds", "size", "adapters").at("m 2"), 1);
  EXPECT_EQ(Of("h3_denoise_step_seconds", "size", "adapters").at("xs 3plus"), 1);
}

TEST_F(WorkerMetricsTest, SizesFollowThePackedRows) {
  EXPECT_EQ(SizeClass(1), "xs");
  EXPECT_EQ(SizeClass(8'191), "xs");
  EXPECT_EQ(SizeClass(8'192), "s");
  EXPECT_EQ(SizeClass(24'576), "m");
  EXPECT_EQ(SizeClass(65'536), "l");
  EXPECT_EQ(SizeClass(131'072), "xl");
  EXPECT_EQ(SizeClass(1e12), "xl");
}

TEST_F(WorkerMetricsTest, ASwapCountsItsKindItsTimeAndWhatWasNotWritten) {
  metrics.CountSwap("strength", "device", 0.002, MiB(8));
  metrics.CountSwap("strength", "disk", 3, MiB(8));
  metrics.CountRefusedSwap("activate");
  EXPECT_EQ(Of("h3_adapter_swaps_total", "kind", "result").at("strength ok"), 2);
  EXPECT_EQ(Of("h3_adapter_swaps_total", "kind", "result").at("activate refused"), 1);
  EXPECT_EQ(Of("h3_adapter_swap_seconds", "kind", "residency").at("strength device"), 1);
  EXPECT_EQ(Of("h3_rematerialization_avoided_write_bytes_total", "cause").at("strength"), Value(MiB(16)));
  EXPECT_EQ(Of("h3_rematerialization_avoided_write_bytes_total", "cause").at("activate"), 0);
}

TEST_F(WorkerMetricsTest, AStackCountsItsDepthAndEachStrength) {
  metrics.ObserveStack({-0.5, 1, 1});
  metrics.ObserveStack({});
  metrics.ObserveEffectiveRank(48);
  EXPECT_EQ(Of("h3_lora_stack_depth", "").at(""), 2);
  EXPECT_EQ(Of("h3_lora_strength", "").at(""), 3);
  EXPECT_EQ(Of("h3_lora_effective_rank", "").at(""), 1);
}

TEST_F(WorkerMetricsTest, CountersMoveForTheirReasonOnly) {
  metrics.CountRequest("CANCELLED");
  metrics.CountAdapterLoad("disk", 0.1, MiB(2));
  metrics.CountOutOfMemory("denoise");
  metrics.CountVerification("ok");
  metrics.SetDevice("cuda:0", "NVIDIA H200");
  EXPECT_EQ(Of("h3_worker_requests_total", "code").at("CANCELLED"), 1);
  EXPECT_EQ(Of("h3_worker_requests_total", "code").at("OK"), 0);
  EXPECT_EQ(Of("h3_adapter_load_bytes_total", "source"), (std::map<std::string, double>{{"disk", Value(MiB(2))}, {"host", 0}}));
  EXPECT_EQ(Of("h3_adapter_load_seconds", "source"), (std::map<std::string, double>{{"disk", 1}, {"host", 0}}));
  EXPECT_EQ(Of("h3_oom_total", "phase"), (std::map<std::string, double>{{"denoise", 1}, {"load", 0}, {"prepare", 0}, {"result", 0}}));
  EXPECT_EQ(Of("h3_base_weight_verifications_total", "result"), (std::map<std::string, double>{{"changed", 0}, {"ok", 1}}));
  EXPECT_EQ(Of("h3_device_info", "device", "name"), (std::map<std::string, double>{{"cuda:0 NVIDIA H200", 1}}));
}

}  // namespace
}  // namespace h3
