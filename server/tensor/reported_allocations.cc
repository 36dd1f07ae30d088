#include "server/tensor/reported_allocations.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <map>
#include <memory>
#include <unordered_map>

namespace h3 {
namespace {

class Listener final : public c10::MemoryReportingInfoBase {
 public:
  explicit Listener(c10::Device device) : device_(device), ledger_(device.str()) {}

  void reportMemoryUsage(void* block, int64_t size, size_t, size_t, c10::Device device) override {
    if (device.type() != device_.type() || block == nullptr) return;
    if (size > 0) {
      const Owner owner = OwnerScope::Current();
      blocks_[block] = {owner, ByteCount(size)};
      ledger_.Add(owner, ByteCount(size));
      return;
    }
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;  // Taken before anybody listened.
    ledger_.Remove(found->second.first, found->second.second);
    blocks_.erase(found);
  }
  bool memoryProfilingEnabled() const override { return true; }

  VramLedger& ledger() { return ledger_; }

 private:
  const c10::Device device_;
  VramLedger ledger_;
  std::unordered_map<void*, std::pair<Owner, ByteCount>> blocks_;
};

}  // namespace

VramLedger& ReportAllocations(c10::Device device) {
  // Never destroyed: tensors may outlive every other static.
  thread_local std::map<std::string, std::shared_ptr<Listener>>* const listeners = new std::map<std::string, std::shared_ptr<Listener>>();
  std::shared_ptr<Listener>& listener = (*listeners)[device.str()];
  if (listener == nullptr) {
    listener = std::make_shared<Listener>(device);
    new c10::DebugInfoGuard(c10::DebugInfoKind::PROFILER_STATE, listener);
  }
  return listener->ledger();
}

}  // namespace h3
