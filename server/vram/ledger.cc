#include "server/vram/ledger.h"

#include <algorithm>

#include "server/base/check.h"

namespace h3 {
namespace {
thread_local Owner current_owner = Owner::kUnattributed;
}  // namespace

absl::string_view OwnerName(Owner owner) {
  static constexpr std::array<absl::string_view, kOwners> kNames = {
      "base_weights", "adapters", "materialized",    "caches",          "activations",
      "workspace",    "staging",  "runtime_context", "allocator_cache", "unattributed"};
  return kNames[static_cast<size_t>(owner)];
}

void VramLedger::Add(Owner owner, ByteCount bytes) {
  live_[static_cast<size_t>(owner)].fetch_add(bytes.value(), std::memory_order_relaxed);
  added_[static_cast<size_t>(owner)].fetch_add(bytes.value(), std::memory_order_relaxed);
  const int64_t used = used_.fetch_add(bytes.value(), std::memory_order_relaxed) + bytes.value();
  int64_t peak = peak_.load(std::memory_order_relaxed);
  while (used > peak && !peak_.compare_exchange_weak(peak, used, std::memory_order_relaxed)) {
  }
}

void VramLedger::Remove(Owner owner, ByteCount bytes) {
  const int64_t left = live_[static_cast<size_t>(owner)].fetch_sub(bytes.value(), std::memory_order_relaxed) - bytes.value();
  used_.fetch_sub(bytes.value(), std::memory_order_relaxed);
  H3_CHECK(left >= 0);
}

LedgerSnapshot VramLedger::Snapshot() const {
  LedgerSnapshot s;
  for (int i = 0; i < kOwners; ++i) {
    s.owners[i] = ByteCount(live_[i].load(std::memory_order_relaxed));
    s.added[i] = ByteCount(added_[i].load(std::memory_order_relaxed));
    s.used += s.owners[i];
  }
  s.peak = std::max(s.used, ByteCount(peak_.load(std::memory_order_relaxed)));
  return s;
}

void VramLedger::ResetPeak() { peak_.store(used_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

OwnerScope::OwnerScope(Owner owner) : previous_(current_owner) { current_owner = owner; }
OwnerScope::~OwnerScope() { current_owner = previous_; }
Owner OwnerScope::Current() { return current_owner; }

}  // namespace h3
