#include "server/metrics/fleet_metrics.h"

#include <gmock/gmock.h>

#include "tests/unit/metrics/samples.h"

namespace h3 {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

MemoryReport Holding(int64_t weights, int64_t adapters) {
  MemoryReport report{.device = "cuda:0", .total = ByteCount(1000), .free = ByteCount(1000 - weights - adapters)};
  report.ledger.owners[static_cast<size_t>(Owner::kBaseWeights)] = ByteCount(weights);
  report.ledger.owners[static_cast<size_t>(Owner::kAdapters)] = ByteCount(adapters);
  return report;
}

std::vector<prometheus::MetricFamily> Shown(std::vector<WorkerReport> reports) {
  return FleetCollector([reports = std::move(reports)] { return reports; }).Collect();
}

TEST(FleetMetricsTest, TheOwnersOfEachWorkerSumToWhatItsDeviceHolds) {
  const auto families = Shown({{.worker = "a", .state = "ready", .heard = 5, .memory = Holding(600, 50)},
                               {.worker = "b", .state = "draining", .heard = 6, .memory = Holding(300, 7), .out_of_memory = 2}});
  EXPECT_THAT(Samples(families, "h3_worker_vram_bytes", "worker"), ElementsAre(Pair("a", 650), Pair("b", 307)));
  EXPECT_EQ(Samples(families, "h3_worker_vram_bytes", "worker", "owner").at("b adapters"), 7);
  EXPECT_THAT(Samples(families, "h3_worker_vram_device_free_bytes", "worker"), ElementsAre(Pair("a", 350), Pair("b", 693)));
  EXPECT_THAT(Samples(families, "h3_worker_oom_total", "worker"), ElementsAre(Pair("a", 0), Pair("b", 2)));
  EXPECT_THAT(Samples(families, "h3_worker_snapshot_timestamp_seconds", "worker"), ElementsAre(Pair("a", 5), Pair("b", 6)));
  EXPECT_THAT(Samples(families, "h3_worker_up", "worker"), ElementsAre(Pair("a", 1), Pair("b", 1)));
  // One family for all workers: a scrape that repeats one is refused as a whole.
  int shown = 0;
  for (const auto& family : families) shown += family.name == "h3_worker_vram_bytes";
  EXPECT_EQ(shown, 1);
}

TEST(FleetMetricsTest, AWorkerOfWhichNothingFreshIsKnownHasAStateAndNoBytes) {
  const auto families = Shown({{.worker = "a", .state = "lost", .heard = 5}, {.worker = "b", .state = "loading"}});
  EXPECT_THAT(Samples(families, "h3_worker_up", "worker"), ElementsAre(Pair("a", 0), Pair("b", 0)));
  EXPECT_EQ(Samples(families, "h3_worker_state", "worker", "state").at("a lost"), 1);
  EXPECT_EQ(Samples(families, "h3_worker_state", "worker", "state").at("a ready"), 0);
  EXPECT_EQ(Samples(families, "h3_worker_state", "worker", "state").at("b loading"), 1);
  for (const auto& family : families) EXPECT_TRUE(family.name.find("bytes") == std::string::npos || family.metric.empty()) << family.name;
}

TEST(FleetMetricsTest, AdaptersBeyondTheLargestFiftyShareASeries) {
  MemoryReport report = Holding(1, 0);
  for (int i = 0; i < 60; ++i) report.adapters.push_back({"adapter" + std::to_string(i), "", ByteCount(100 + i)});
  const auto families = Shown({{.worker = "a", .state = "ready", .memory = report}});
  EXPECT_EQ(Samples(families, "h3_worker_adapters_resident", "tier").at("device"), 60);
  const auto bytes = Samples(families, "h3_worker_adapter_bytes", "tier", "adapter");
  EXPECT_EQ(bytes.at("device other"), 100 + 101 + 102 + 103 + 104 + 105 + 106 + 107 + 108 + 109);
  EXPECT_EQ(bytes.count("device adapter9"), 0u);
}

}  // namespace
}  // namespace h3
