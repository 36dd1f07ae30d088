#include "server/tensor/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"

namespace h3 {
namespace {

// Before each block, so that a free needs no table. 64 bytes keep the block aligned for vector instructions.
struct alignas(64) BlockHeader {
  int64_t bytes;
  Owner owner;
  uint64_t magic;
};
constexpr uint64_t kMagic = 0x4833'6c65'6467'6572;
static_assert(sizeof(BlockHeader) == 64);

constexpr int64_t kNoLimit = INT64_MAX;
std::atomic<int64_t> allocation_limit{kNoLimit};
std::atomic<int64_t> counted_bytes{0};
std::atomic<bool> observed{false};  // Keeps the common path free of the shared pointer's lock.
std::atomic<std::shared_ptr<const std::function<void(ByteCount)>>> allocation_observer;

VramLedger*& CpuLedger() {
  static VramLedger* ledger = nullptr;
  return ledger;
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &Free, c10::Device(c10::DeviceType::CPU)};
    if (observed.load(std::memory_order_relaxed)) {
      if (const auto observer = allocation_observer.load()) (*observer)(ByteCount(static_cast<int64_t>(n)));
    }
    const int64_t bytes = static_cast<int64_t>(n);
    const int64_t limit = allocation_limit.load(std::memory_order_relaxed);
    if (limit != kNoLimit) {
      const ByteCount used = CpuLedger()->Snapshot().used;
      TORCH_CHECK_WITH(OutOfMemoryError, used.value() + bytes <= limit, "needs ", bytes, " bytes, ", limit - used.value(),
                       " of ", limit, " are free");
    }
    void* block = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < (int64_t{1} << 46) && posix_memalign(&block, 64, n + sizeof(BlockHeader)) == 0,
                     "the machine has no ", bytes, " bytes left");
    auto* header = new (block) BlockHeader{bytes, OwnerScope::Current(), kMagic};
    CpuLedger()->Add(header->owner, ByteCount(bytes));
    counted_bytes.fetch_add(bytes, std::memory_order_relaxed);
    void* data = header + 1;
    return {data, data, &Free, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Free; }

  void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }

 private:
  static void Free(void* data) {
    if (data == nullptr) return;
    auto* header = static_cast<BlockHeader*>(data) - 1;
    H3_CHECK(header->magic == kMagic);
    CpuLedger()->Remove(header->owner, ByteCount(header->bytes));
    counted_bytes.fetch_sub(header->bytes, std::memory_order_relaxed);
    header->magic = 0;
    std::free(header);
  }
};

}  // namespace

VramLedger& InstallCountingAllocator() {
  static VramLedger* const installed = [] {
    CpuLedger() = new VramLedger("cpu");
    // The highest priority: nothing that is loaded later may replace it.
    c10::SetCPUAllocator(new CountingAllocator(), /*priority=*/255);
    return CpuLedger();
  }();
  return *installed;
}

ByteCount CountedBytes() { return ByteCount(counted_bytes.load(std::memory_order_relaxed)); }

void SetAllocationLimit(std::optional<ByteCount> limit) {
  allocation_limit.store(limit.has_value() ? limit->value() : kNoLimit, std::memory_order_relaxed);
}

void SetAllocationObserver(std::function<void(ByteCount)> observer) {
  const bool any = observer != nullptr;
  allocation_observer.store(any ? std::make_shared<const std::function<void(ByteCount)>>(std::move(observer)) : nullptr);
  observed.store(any, std::memory_order_relaxed);
}

}  // namespace h3
