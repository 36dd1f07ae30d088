// The host tier of adapters: the content of their files, read and hashed, in host memory under a byte budget. What leaves the
// device comes back from here without the disk. Pinned memory where the device is an accelerator.
#pragma once

#include <c10/core/Device.h>

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/vram/memory_report.h"

namespace h3 {

// The bytes of an adapter's file in memory. Immutable.
struct HostContent {
  std::string name;    // As it was first read under; an alias.
  std::string digest;  // Hex SHA-256 of the bytes.
  std::shared_ptr<const char> data;
  int64_t size = 0;

  absl::string_view view() const { return {data.get(), static_cast<size_t>(size)}; }
};

// Copies `bytes` into host memory that is fast for `device`. Not counted by any ledger of the device. Throws c10::Error.
std::shared_ptr<const HostContent> MakeHostContent(std::string name, std::string digest, absl::string_view bytes, c10::Device device);

// Thread-safe. Never over its budget; what somebody still reads while it is evicted lives until they are done.
class HostTier {
 public:
  explicit HostTier(ByteCount budget) : budget_(budget) {}

  // Null: not here. Counts a hit or a miss, and a use.
  std::shared_ptr<const HostContent> Find(const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);
  // Without counting.
  bool Has(const std::string& digest) const ABSL_LOCKS_EXCLUDED(mu_);
  // Evicts the least recently used first; keeps nothing that is larger than the budget.
  void Add(std::shared_ptr<const HostContent> content) ABSL_LOCKS_EXCLUDED(mu_);
  void Drop(const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);

  std::vector<AdapterResidency> List() const ABSL_LOCKS_EXCLUDED(mu_);
  TierCounters counters() const ABSL_LOCKS_EXCLUDED(mu_);
  ByteCount budget() const { return budget_; }

 private:
  const ByteCount budget_;
  mutable absl::Mutex mu_;
  std::list<std::shared_ptr<const HostContent>> contents_ ABSL_GUARDED_BY(mu_);  // Most recently used first.
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  TierCounters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
