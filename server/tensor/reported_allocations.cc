#include "server/tensor/reported_allocations.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace h3 {
namespace {

class Listener final : public c10::MemoryReportingInfoBase {
 public:
  explicit Listener(c10::Device device) : device_(device), ledger_(device.str()) {}

  void reportMemoryUsage(void* block, int64_t size, size_t total_allocated, size_t, c10::Device device) override {
    if (device != device_ || block == nullptr) return;
    absl::MutexLock lock(&mu_);
    Forget(block);
    if (size > 0) {
      const Owner owner = OwnerScope::Current();
      blocks_[block] = {owner, ByteCount(size)};
      owned_ += size;
      ledger_.Add(owner, ByteCount(size));
    }
    const int64_t nobodys = std::max<int64_t>(0, static_cast<int64_t>(total_allocated) - owned_);
    if (nobodys > nobodys_) ledger_.Add(Owner::kUnattributed, ByteCount(nobodys - nobodys_));
    if (nobodys < nobodys_) ledger_.Remove(Owner::kUnattributed, ByteCount(nobodys_ - nobodys));
    nobodys_ = nobodys;
  }
  // Reports come all the same; the CPU's allocator keeps no table for us.
  bool memoryProfilingEnabled() const override { return false; }

  VramLedger& ledger() { return ledger_; }

 private:
  void Forget(void* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;
    ledger_.Remove(found->second.first, found->second.second);
    owned_ -= found->second.second.value();
    blocks_.erase(found);
  }

  const c10::Device device_;
  VramLedger ledger_;
  absl::Mutex mu_;
  std::unordered_map<void*, std::pair<Owner, ByteCount>> blocks_ ABSL_GUARDED_BY(mu_);
  int64_t owned_ ABSL_GUARDED_BY(mu_) = 0;    // Bytes of blocks_.
  int64_t nobodys_ ABSL_GUARDED_BY(mu_) = 0;  // Allocated beside them.
};

std::shared_ptr<Listener> ListenerOf(c10::Device device) {
  // Never destroyed: tensors may outlive every other static.
  static absl::Mutex* const mu = new absl::Mutex();
  static auto* const listeners = new std::map<std::string, std::shared_ptr<Listener>>();
  absl::MutexLock lock(mu);
  std::shared_ptr<Listener>& listener = (*listeners)[device.str()];
  if (listener == nullptr) listener = std::make_shared<Listener>(device);
  return listener;
}

}  // namespace

VramLedger& ReportAllocations(c10::Device device) {
  const std::shared_ptr<Listener> listener = ListenerOf(device);
  thread_local auto* const heard = new std::set<std::string>();
  if (heard->insert(device.str()).second) new c10::DebugInfoGuard(c10::DebugInfoKind::PROFILER_STATE, listener);
  return listener->ledger();
}

}  // namespace h3
