// Everything that a worker knows about the memory of its device at one moment.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/base/bytes.h"
#include "server/vram/ledger.h"

namespace h3 {

// Where an adapter is kept. The host tier holds the content of its file; only the device tier takes device memory.
enum class Tier { kDevice, kHost };
inline constexpr int kTiers = 2;

// From where an adapter came when a stack asked for it, the fastest first.
enum class AdapterSource { kDevice, kHost, kDisk };

struct AdapterResidency {
  std::string name;
  std::string digest;
  ByteCount bytes;
  int64_t pins = 0;  // Stacks that hold it; 0 in the host tier.
  Tier tier = Tier::kDevice;
};

// How a tier of adapters did since the start.
struct TierCounters {
  int64_t hits = 0;       // It was there when a stack asked for it.
  int64_t misses = 0;     // It was not.
  int64_t evictions = 0;  // It had to go for others.
};

// What the allocator under the tensors says. CPU: the counting allocator; accelerator: the caching allocator.
struct AllocatorFigures {
  ByteCount allocated;       // In live tensors.
  ByteCount reserved;        // Taken from the driver, allocated or cached.
  ByteCount active;          // Allocated, or freed and still waited for.
  ByteCount inactive_split;  // Free parts of blocks that cannot go back to the driver.
  int64_t retries = 0;       // Allocations that had to flush the cache first.
};

// The process in host memory, as the kernel counts it.
struct HostFigures {
  ByteCount resident;   // RSS.
  ByteCount anonymous;
  ByteCount file;       // Pages of mapped files that are in memory.
};

struct MemoryReport {
  std::string device;
  ByteCount total;     // As capped by --device-memory.
  ByteCount free;      // That nobody uses; the driver's on an accelerator.
  ByteCount headroom;  // What a new request may take (vram/admission.h).
  ByteCount reserved;  // Promised to admitted requests and sessions.
  ByteCount reusable;  // Idle adapters, merged copies and cached modulations.
  ByteCount margin;
  LedgerSnapshot ledger;
  AllocatorFigures allocator;
  HostFigures host;
  ByteCount host_weights;  // Mapped weights that stay in host memory.
  ByteCount last_request_peak;
  std::vector<AdapterResidency> adapters;  // Both tiers.
  ByteCount avoided_resident;  // What a merging runtime would hold in addition for the adapters that are pinned now.
  int64_t base_mutations = 0;
  std::optional<ByteCount> adapter_budget;
  ByteCount host_adapter_budget;
  ByteCount modulation_budget;
  TierCounters adapters_by_tier[kTiers];
};

}  // namespace h3
