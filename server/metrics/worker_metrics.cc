#include "server/metrics/worker_metrics.h"

#include <algorithm>
#include <array>
#include <utility>

#include "server/metrics/memory_families.h"

namespace h3 {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

constexpr std::array kSizes = {"xs", "s", "m", "l", "xl"};
constexpr std::array kSizeLimits = {8'192.0, 24'576.0, 65'536.0, 131'072.0};
constexpr std::array kAdapterCounts = {"0", "1", "2", "3plus"};
constexpr std::array kOutcomes = {"ok", "cancelled", "failed"};
constexpr std::array kOutOfMemoryPhases = {"load", "prepare", "denoise", "result"};
constexpr std::array kSwaps = {"activate", "deactivate", "strength", "reorder", "replace"};

// 60 children: the largest family that there is (840 series), so that no bucket is there for nothing.
Buckets StepBuckets() { return {0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 40, 120}; }
// 10 us to 10 s; 50 ms is what an alert asks for.
Buckets SwapBuckets() { return {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.3, 1, 3, 10}; }
Buckets LoadBuckets() { return {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100}; }
Buckets CancelBuckets() { return {0.001, 0.01, 0.03, 0.1, 0.3, 1, 2, 5, 10, 20, 40, 120}; }

const char* AdapterCount(size_t adapters) { return kAdapterCounts[std::min(adapters, kAdapterCounts.size() - 1)]; }

// Counts since the worker's start, which only it tells.
void ShowAllocated(Families& families, const MemoryReport& now) {
  prometheus::MetricFamily& allocated = families.Counter(
      "vram_allocated_bytes_total",
      "Bytes ever allocated, by owner. A strength change adds nothing under base_weights, adapters, materialized and caches.");
  for (int i = 0; i < kOwners; ++i) {
    const auto owner = static_cast<Owner>(i);
    AddSample(allocated, Bytes(now.ledger.added_to(owner)), {{"device", now.device}, {"owner", std::string(OwnerName(owner))}});
  }
}

void ShowHost(Families& families, const MemoryReport& now) {
  AddSample(families.Gauge("host_weights_bytes", "Weights of the model that stay in host memory."), Bytes(now.host_weights), {{"device", now.device}});
  prometheus::MetricFamily& host =
      families.Gauge("host_resident_bytes", "Host memory of the process; file: pages of mapped files that are in memory.");
  AddSample(host, Bytes(now.host.anonymous), {{"kind", "anonymous"}});
  AddSample(host, Bytes(now.host.file), {{"kind", "file"}});
  AddSample(families.Standard("process_resident_memory_bytes", "Resident memory size in bytes."), Bytes(now.host.resident));
}

void ShowResidency(Families& families, const MemoryReport& now) {
  prometheus::MetricFamily& lookups =
      families.Counter("adapter_cache_lookups_total", "Adapters that were asked for in a tier: there already, or not.");
  prometheus::MetricFamily& evictions = families.Counter("adapter_evictions_total", "Adapters that had to go for others.");
  for (int i = 0; i < kTiers; ++i) {
    const Label tier{"tier", kTierNames[static_cast<size_t>(i)]};
    const TierCounters& counters = now.adapters_by_tier[i];
    AddSample(lookups, static_cast<double>(counters.hits), {{"result", "hit"}, tier});
    AddSample(lookups, static_cast<double>(counters.misses), {{"result", "miss"}, tier});
    AddSample(evictions, static_cast<double>(counters.evictions), {{"reason", "budget"}, tier});
  }
  int64_t leases = 0;
  for (const AdapterResidency& adapter : now.adapters) leases += adapter.pins;
  AddSample(families.Gauge("adapter_leases", "Holds on adapters by the stacks of requests and sessions."), static_cast<double>(leases));
}

}  // namespace

absl::string_view SizeClass(double rows) {
  const auto limit = std::find_if(kSizeLimits.begin(), kSizeLimits.end(), [&](double at) { return rows < at; });
  return kSizes[static_cast<size_t>(limit - kSizeLimits.begin())];
}

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry)
    : cancel_latency_seconds(Histograms(registry, "h3_cancel_latency_seconds",
                                        "From the moment that a cancel was seen until its run or session had left the device.")
                                 .Add({}, CancelBuckets())),
      step_seconds_(Histograms(registry, "h3_denoise_step_seconds",
                               "Time of one model evaluation, by task, packed rows (xs < 8192, s < 24576, m < 65536, l < 131072, xl) and "
                               "adapters in the stack.")),
      steps_(Counters(registry, "h3_denoise_steps_total", "Model evaluations that were begun, by how they ended.")),
      stack_depth_(Histograms(registry, "h3_lora_stack_depth", "Adapters in the stack of a request.")
                       .Add({}, Buckets{0, 1, 2, 3, 4, 6, 8, 16, 32})),
      effective_rank_(Histograms(registry, "h3_lora_effective_rank", "Sum of the ranks in the stack of a request that started.")
                          .Add({}, Buckets{0, 4, 8, 16, 32, 64, 128, 256, 512, 1024})),
      strength_(Histograms(registry, "h3_lora_strength",
                           "Strength of each adapter of a request. Some are negative: a rate of the sum means nothing.")
                    .Add({}, Buckets{-2, -1, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2})),
      requests_(Counters(registry, "h3_worker_requests_total", "Generations and sessions that ended, by gRPC code.")),
      load_seconds_(Histograms(registry, "h3_adapter_load_seconds", "Time to bring an adapter to the device, by where it was.")),
      load_bytes_(Counters(registry, "h3_adapter_load_bytes_total", "Bytes of adapters that were brought to the device.")),
      swaps_(Counters(registry, "h3_adapter_swaps_total", "Stacks that differ from the one before, by the first difference.")),
      swap_seconds_(Histograms(registry, "h3_adapter_swap_seconds",
                               "Time until such a stack was in place, by where the slowest of its adapters was.")),
      avoided_write_bytes_(Counters(registry, "h3_rematerialization_avoided_write_bytes_total",
                                    "Bytes of weights that a merging runtime would have written for these changes.")),
      out_of_memory_(Counters(registry, "h3_oom_total", "Allocations that failed though the request had been admitted.")),
      verifications_(Counters(registry, "h3_base_weight_verifications_total", "Tensors of the base that were read again and compared.")),
      device_info_(prometheus::BuildGauge().Name("h3_device_info").Help("1, with the device's name as a label.").Register(registry)) {
  for (const char* task : kTasks) {
    for (const char* outcome : kOutcomes) steps_.Add({{"task", task}, {"outcome", outcome}});
    for (const char* size : kSizes) {
      for (const char* adapters : kAdapterCounts)
        step_seconds_.Add({{"task", task}, {"size", size}, {"adapters", adapters}}, StepBuckets());
    }
  }
  for (const char* code : kCodes) requests_.Add({{"code", code}});
  for (const char* source : {"disk", "host"}) {
    load_seconds_.Add({{"source", source}}, LoadBuckets());
    load_bytes_.Add({{"source", source}});
  }
  for (const char* kind : kSwaps) {
    for (const char* result : {"ok", "refused"}) swaps_.Add({{"kind", kind}, {"result", result}});
    for (const char* residency : {"device", "host", "disk"}) swap_seconds_.Add({{"kind", kind}, {"residency", residency}}, SwapBuckets());
    avoided_write_bytes_.Add({{"cause", kind}});
  }
  for (const char* phase : kOutOfMemoryPhases) out_of_memory_.Add({{"phase", phase}});
  for (const char* result : {"ok", "changed"}) verifications_.Add({{"result", result}});
}

void WorkerMetrics::CountStep(const StepKind& kind, double seconds) {
  steps_.Add({{"task", kind.task}, {"outcome", "ok"}}).Increment();
  const std::string size(SizeClass(kind.rows));
  step_seconds_.Add({{"task", kind.task}, {"size", size}, {"adapters", AdapterCount(kind.adapters)}}, StepBuckets()).Observe(seconds);
}

void WorkerMetrics::CountUnfinishedStep(const std::string& task, const std::string& outcome) {
  steps_.Add({{"task", task}, {"outcome", outcome}}).Increment();
}

void WorkerMetrics::ObserveStack(const std::vector<double>& strengths) {
  stack_depth_.Observe(static_cast<double>(strengths.size()));
  for (const double strength : strengths) strength_.Observe(strength);
}

void WorkerMetrics::ObserveEffectiveRank(double rank) { effective_rank_.Observe(rank); }

void WorkerMetrics::CountRequest(const std::string& code) { requests_.Add({{"code", code}}).Increment(); }

void WorkerMetrics::CountAdapterLoad(const std::string& source, double seconds, ByteCount bytes) {
  load_seconds_.Add({{"source", source}}, LoadBuckets()).Observe(seconds);
  load_bytes_.Add({{"source", source}}).Increment(Bytes(bytes));
}

void WorkerMetrics::CountSwap(const std::string& kind, const std::string& residency, double seconds, ByteCount avoided_write) {
  swaps_.Add({{"kind", kind}, {"result", "ok"}}).Increment();
  swap_seconds_.Add({{"kind", kind}, {"residency", residency}}, SwapBuckets()).Observe(seconds);
  avoided_write_bytes_.Add({{"cause", kind}}).Increment(Bytes(avoided_write));
}

void WorkerMetrics::CountRefusedSwap(const std::string& kind) { swaps_.Add({{"kind", kind}, {"result", "refused"}}).Increment(); }

int64_t WorkerMetrics::out_of_memory() const {
  double sum = 0;
  for (const char* phase : kOutOfMemoryPhases) sum += out_of_memory_.Add({{"phase", phase}}).Value();
  return static_cast<int64_t>(sum);
}

void WorkerMetrics::CountOutOfMemory(const std::string& phase) {
  out_of_memory_.Add({{"phase", phase}}).Increment();
}

void WorkerMetrics::CountVerification(const std::string& result) { verifications_.Add({{"result", result}}).Increment(); }

void WorkerMetrics::SetDevice(const std::string& device, const std::string& name) {
  device_info_.Add({{"device", device}, {"name", name}}).Set(1);
}

std::vector<prometheus::MetricFamily> MemoryCollector::Collect() const {
  const MemoryReport now = read_();
  Families families("h3_");
  ShowMemory(families, now, {});
  ShowAllocated(families, now);
  ShowHost(families, now);
  ShowResidency(families, now);
  return std::move(families).Take();
}

}  // namespace h3
