// The memory of a device as Prometheus sees it: one table of names, helps and labels, from which a worker shows its own device
// (prefix "h3_") and a scheduler those of its workers (prefix "h3_worker_", label `worker`). Two prefixes, so that who scrapes both
// never counts a byte twice.
#pragma once

#include <array>
#include <vector>

#include "server/metrics/families.h"
#include "server/vram/memory_report.h"

namespace h3 {

inline constexpr std::array kTierNames = {"device", "host"};  // By Tier.

inline double Bytes(ByteCount bytes) { return static_cast<double>(bytes.value()); }

// Everything that a report tells of one moment, `labels` in front of each series' own. Of adapters the 50 largest of each tier,
// the rest as "other". For several devices call it once for each.
void ShowMemory(Families& families, const MemoryReport& now, const std::vector<Label>& labels);

}  // namespace h3
