#include "server/metrics/fleet_metrics.h"

#include "server/metrics/memory_families.h"

namespace h3 {

std::vector<prometheus::MetricFamily> FleetCollector::Collect() const {
  Families families("h3_worker_");
  prometheus::MetricFamily& up = families.Gauge("up", "1: the worker serves or drains; 0: it loads, or is lost.");
  prometheus::MetricFamily& state = families.Gauge("state", "1 in the worker's state, 0 in the others.");
  prometheus::MetricFamily& heard =
      families.Gauge("snapshot_timestamp_seconds", "When the worker's last heartbeat came, which the other series are from; 0: never.");
  prometheus::MetricFamily& oom = families.Counter("oom_total", "Allocations that failed though the request had been admitted.");
  for (const WorkerReport& report : read_()) {
    const Label worker{"worker", report.worker};
    AddSample(up, report.state == "ready" || report.state == "draining", {worker});
    for (const char* name : {"loading", "ready", "draining", "lost"}) AddSample(state, report.state == name, {worker, {"state", name}});
    AddSample(heard, report.heard, {worker});
    if (!report.memory.has_value()) continue;
    ShowMemory(families, *report.memory, {worker});
    AddSample(oom, static_cast<double>(report.out_of_memory), {worker, {"device", report.memory->device}});
  }
  return std::move(families).Take();
}

}  // namespace h3
