#include "server/metrics/worker_metrics.h"

#include <algorithm>
#include <map>

namespace h3 {
namespace {

constexpr size_t kMaxAdapterSeries = 50;

prometheus::Histogram::BucketBoundaries StepBuckets() { return {0.01, 0.03, 0.1, 0.3, 1, 2, 5, 10, 20, 40, 80, 160, 320}; }

prometheus::MetricFamily Gauge(std::string name, std::string help) {
  prometheus::MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = prometheus::MetricType::Gauge;
  return family;
}

void Add(prometheus::MetricFamily& family, double value, std::vector<prometheus::ClientMetric::Label> labels) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  (family.type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  family.metric.push_back(std::move(metric));
}

double Bytes(ByteCount bytes) { return static_cast<double>(bytes.value()); }

}  // namespace

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry)
    : denoise_steps(
          prometheus::BuildCounter().Name("h3_denoise_steps_total").Help("Model evaluations done.").Register(registry).Add({})),
      step_seconds(prometheus::BuildHistogram()
                       .Name("h3_denoise_step_seconds")
                       .Help("Time of one model evaluation.")
                       .Register(registry)
                       .Add({}, StepBuckets())),
      stack_depth(prometheus::BuildHistogram()
                      .Name("h3_lora_stack_depth")
                      .Help("Adapters in the stack of a request.")
                      .Register(registry)
                      .Add({}, prometheus::Histogram::BucketBoundaries{0, 1, 2, 3, 4, 6, 8, 16, 32})),
      requests_(prometheus::BuildCounter()
                    .Name("h3_worker_requests_total")
                    .Help("Generations and sessions that ended, by gRPC code.")
                    .Register(registry)) {
  for (const char* code : {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED",
                           "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL", "UNAVAILABLE"}) {
    requests_.Add({{"code", code}});
  }
}

void WorkerMetrics::CountRequest(const std::string& code) { requests_.Add({{"code", code}}).Increment(); }

std::vector<prometheus::MetricFamily> MemoryCollector::Collect() const {
  const MemoryGauges now = read_();
  const prometheus::ClientMetric::Label device{"device", now.device};
  std::vector<prometheus::MetricFamily> families;

  prometheus::MetricFamily vram =
      Gauge("h3_vram_bytes", "Bytes that the process uses on the device, by owner; the owners sum to what is used.");
  for (int i = 0; i < kOwners; ++i) {
    const auto owner = static_cast<Owner>(i);
    Add(vram, Bytes(now.ledger.of(owner)), {device, {"owner", std::string(OwnerName(owner))}});
  }
  families.push_back(std::move(vram));

  prometheus::MetricFamily allocated;
  allocated.name = "h3_vram_allocated_bytes_total";
  allocated.help =
      "Bytes ever allocated, by owner. A strength change adds nothing under base_weights, adapters, materialized and caches.";
  allocated.type = prometheus::MetricType::Counter;
  for (int i = 0; i < kOwners; ++i) {
    const auto owner = static_cast<Owner>(i);
    Add(allocated, Bytes(now.ledger.added_to(owner)), {device, {"owner", std::string(OwnerName(owner))}});
  }
  families.push_back(std::move(allocated));

  const auto single = [&](const char* name, const char* help, double value) {
    families.push_back(Gauge(name, help));
    Add(families.back(), value, {device});
  };
  single("h3_vram_device_total_bytes", "Memory of the device, as capped by --device-memory.", Bytes(now.total));
  single("h3_vram_device_free_bytes", "Memory of the device that nobody uses.", Bytes(now.free));
  single("h3_vram_peak_bytes", "Largest sum of owners during the last finished request.", Bytes(now.last_request_peak));
  single("h3_rematerialization_avoided_resident_bytes",
         "Bytes that a merging runtime would hold a second time for the adapters in use now.", Bytes(now.avoided_resident));

  const auto counter = [&](const char* name, const char* help) -> prometheus::MetricFamily& {
    families.push_back(Gauge(name, help));
    families.back().type = prometheus::MetricType::Counter;
    return families.back();
  };
  Add(counter("h3_base_weight_mutations_total", "Times that a base weight was found changed; must stay 0."),
      static_cast<double>(now.base_mutations), {device});
  prometheus::MetricFamily& lookups = counter("h3_adapter_cache_lookups_total", "Adapters that stacks asked for: on the device already, or not.");
  Add(lookups, static_cast<double>(now.adapter_hits), {{"result", "hit"}, {"tier", "device"}});
  Add(lookups, static_cast<double>(now.adapter_misses), {{"result", "miss"}, {"tier", "device"}});
  Add(counter("h3_adapter_evictions_total", "Adapters that had to go for others."), static_cast<double>(now.adapter_evictions),
      {{"reason", "budget"}, {"tier", "device"}});
  families.push_back(Gauge("h3_vram_budget_bytes", "Bytes that a pool may take; no series where it has no limit."));
  if (now.adapter_budget.has_value()) Add(families.back(), Bytes(*now.adapter_budget), {device, {"pool", "adapters"}});

  // One series a name: while a replaced file's old content is still pinned, two adapters share one, and a scrape must not
  // repeat a series.
  std::map<std::string, ByteCount> by_name;
  for (const AdapterGauge& adapter : now.adapters) by_name[adapter.name] += adapter.bytes;
  ByteCount other;
  if (const auto clash = by_name.find("other"); clash != by_name.end()) other += by_name.extract(clash).mapped();
  std::vector<AdapterGauge> adapters;
  for (const auto& [name, bytes] : by_name) adapters.push_back({name, bytes});
  std::stable_sort(adapters.begin(), adapters.end(),
                   [](const AdapterGauge& a, const AdapterGauge& b) { return a.bytes > b.bytes; });
  prometheus::MetricFamily by_adapter =
      Gauge("h3_adapter_bytes", "Bytes of each resident adapter; the 50 largest, the rest as other.");
  for (size_t i = 0; i < adapters.size(); ++i) {
    if (i < kMaxAdapterSeries) {
      Add(by_adapter, Bytes(adapters[i].bytes), {{"adapter", adapters[i].name}, {"tier", "device"}});
    } else {
      other += adapters[i].bytes;
    }
  }
  Add(by_adapter, Bytes(other), {{"adapter", "other"}, {"tier", "device"}});
  families.push_back(std::move(by_adapter));

  families.push_back(Gauge("h3_adapters_resident", "Adapters on the device."));
  Add(families.back(), static_cast<double>(now.adapters.size()), {{"tier", "device"}});
  return families;
}

}  // namespace h3
