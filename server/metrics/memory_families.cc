#include "server/metrics/memory_families.h"

#include <algorithm>
#include <map>
#include <utility>

namespace h3 {
namespace {

constexpr size_t kMaxAdapterSeries = 50;

std::vector<Label> With(std::vector<Label> labels, std::initializer_list<Label> more) {
  labels.insert(labels.end(), more);
  return labels;
}

struct Figure {
  const char* name;
  const char* help;
  ByteCount (*of)(const MemoryReport&);
};

// What is one number of bytes for each device.
const std::array kFigures = {
    Figure{"vram_device_total_bytes", "Memory of the device, as capped by --device-memory.", [](const MemoryReport& m) { return m.total; }},
    Figure{"vram_device_free_bytes", "Memory of the device that nobody uses.", [](const MemoryReport& m) { return m.free; }},
    Figure{"vram_headroom_bytes", "What a new request may take: the number that admission compares with.",
           [](const MemoryReport& m) { return m.headroom; }},
    Figure{"vram_admission_reserved_bytes", "Promised to requests and sessions that were admitted.",
           [](const MemoryReport& m) { return m.reserved; }},
    Figure{"vram_reusable_bytes", "What a request may push out: idle adapters, merged copies, cached modulations.",
           [](const MemoryReport& m) { return m.reusable; }},
    Figure{"vram_margin_bytes", "Kept free by admission.", [](const MemoryReport& m) { return m.margin; }},
    Figure{"vram_peak_bytes", "Largest sum of owners during the last finished request.",
           [](const MemoryReport& m) { return m.last_request_peak; }},
    // Not one metric with a label: allocated is a part of reserved, and a sum over them would mean nothing.
    Figure{"allocator_allocated_bytes", "The allocator under the tensors: in live tensors.",
           [](const MemoryReport& m) { return m.allocator.allocated; }},
    Figure{"allocator_reserved_bytes", "Taken from the driver, in live tensors or cached.",
           [](const MemoryReport& m) { return m.allocator.reserved; }},
    Figure{"allocator_active_bytes", "In live tensors, or freed and still waited for.", [](const MemoryReport& m) { return m.allocator.active; }},
    Figure{"allocator_inactive_split_bytes", "Free parts of blocks, which cannot go back to the driver.",
           [](const MemoryReport& m) { return m.allocator.inactive_split; }},
    Figure{"rematerialization_avoided_resident_bytes", "Bytes that a merging runtime would hold a second time for the adapters in use now.",
           [](const MemoryReport& m) { return m.avoided_resident; }},
};

void ShowAdapters(Families& families, const MemoryReport& now, const std::vector<Label>& labels) {
  prometheus::MetricFamily& resident = families.Gauge("adapters_resident", "Adapters in each tier.");
  prometheus::MetricFamily& bytes = families.Gauge("adapter_bytes", "Bytes of each adapter; of each tier the 50 largest, the rest as other.");
  for (int i = 0; i < kTiers; ++i) {
    const Label tier{"tier", kTierNames[static_cast<size_t>(i)]};
    // One series a name: while a replaced file's old content is still pinned, two adapters share one, and a scrape must not repeat
    // a series.
    std::map<std::string, ByteCount> by_name;
    int64_t count = 0;
    for (const AdapterResidency& adapter : now.adapters) {
      if (adapter.tier != static_cast<Tier>(i)) continue;
      by_name[adapter.name] += adapter.bytes;
      ++count;
    }
    AddSample(resident, static_cast<double>(count), With(labels, {tier}));
    ByteCount other;
    if (const auto clash = by_name.find("other"); clash != by_name.end()) other += by_name.extract(clash).mapped();
    std::vector<std::pair<std::string, ByteCount>> adapters(by_name.begin(), by_name.end());
    std::stable_sort(adapters.begin(), adapters.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    for (size_t rank = 0; rank < adapters.size(); ++rank) {
      if (rank < kMaxAdapterSeries) {
        AddSample(bytes, Bytes(adapters[rank].second), With(labels, {{"adapter", adapters[rank].first}, tier}));
      } else {
        other += adapters[rank].second;
      }
    }
    AddSample(bytes, Bytes(other), With(labels, {{"adapter", "other"}, tier}));
  }
}

}  // namespace

void ShowMemory(Families& families, const MemoryReport& now, const std::vector<Label>& labels) {
  const std::vector<Label> device = With(labels, {{"device", now.device}});
  prometheus::MetricFamily& vram =
      families.Gauge("vram_bytes", "Bytes that the process uses on the device, by owner; the owners sum to what is used.");
  for (int i = 0; i < kOwners; ++i) {
    const auto owner = static_cast<Owner>(i);
    AddSample(vram, Bytes(now.ledger.of(owner)), With(device, {{"owner", std::string(OwnerName(owner))}}));
  }
  for (const Figure& figure : kFigures) AddSample(families.Gauge(figure.name, figure.help), Bytes(figure.of(now)), device);
  prometheus::MetricFamily& budget =
      families.Gauge("vram_budget_bytes", "Bytes that a pool may take, host_adapters in host memory; no series where it has no limit.");
  if (now.adapter_budget.has_value()) AddSample(budget, Bytes(*now.adapter_budget), With(device, {{"pool", "adapters"}}));
  AddSample(budget, Bytes(now.modulation_budget), With(device, {{"pool", "modulations"}}));
  AddSample(budget, Bytes(now.host_adapter_budget), With(device, {{"pool", "host_adapters"}}));
  AddSample(families.Counter("allocator_retries_total", "Allocations that had to flush the allocator's cache first."),
            static_cast<double>(now.allocator.retries), device);
  AddSample(families.Counter("base_weight_mutations_total", "Times that a base weight was found changed; must stay 0."),
            static_cast<double>(now.base_mutations), device);
  ShowAdapters(families, now, labels);
}

}  // namespace h3
