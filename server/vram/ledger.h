// The memory ledger of one device: every byte has one owner, and the owners sum to what the process uses on the device.
// Allocators call Add and Remove (tensor/counting_allocator.h on the CPU); everybody else reads snapshots.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/bytes.h"

namespace h3 {

enum class Owner {
  kBaseWeights,
  kAdapters,
  kMaterialized,
  kCaches,
  kActivations,
  kWorkspace,
  kStaging,
  kRuntimeContext,
  kAllocatorCache,
  kUnattributed,  // Allocated outside every OwnerScope: always a bug of ours, watched by an alert.
};
inline constexpr int kOwners = 10;

// "base_weights", "adapters", ...: the label of h3_vram_bytes and the key of `memory --json`.
absl::string_view OwnerName(Owner owner);

struct LedgerSnapshot {
  std::array<ByteCount, kOwners> owners{};
  std::array<ByteCount, kOwners> added{};  // Ever allocated: what a strength change must leave as it is.
  ByteCount used;  // Sum of the owners.
  ByteCount peak;  // Largest `used` since the last ResetPeak.

  ByteCount of(Owner owner) const { return owners[static_cast<size_t>(owner)]; }
  ByteCount added_to(Owner owner) const { return added[static_cast<size_t>(owner)]; }
};

// Thread-safe; Add, Remove and Snapshot never block or allocate. A snapshot taken while others allocate is consistent with
// itself: `used` is the sum of its owners.
class VramLedger {
 public:
  explicit VramLedger(std::string device) : device_(std::move(device)) {}

  void Add(Owner owner, ByteCount bytes);
  void Remove(Owner owner, ByteCount bytes);
  LedgerSnapshot Snapshot() const;
  // The next peak counts from now.
  void ResetPeak();
  const std::string& device() const { return device_; }

 private:
  const std::string device_;
  std::array<std::atomic<int64_t>, kOwners> live_{};
  std::array<std::atomic<int64_t>, kOwners> added_{};
  std::atomic<int64_t> used_{0};
  std::atomic<int64_t> peak_{0};
};

// Attributes what this thread allocates to `owner` until the scope ends. Scopes nest.
class OwnerScope {
 public:
  explicit OwnerScope(Owner owner);
  ~OwnerScope();
  OwnerScope(const OwnerScope&) = delete;
  OwnerScope& operator=(const OwnerScope&) = delete;

  // kUnattributed outside every scope.
  static Owner Current();

 private:
  const Owner previous_;
};

}  // namespace h3
