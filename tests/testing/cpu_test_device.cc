#include "server/tensor/counting_allocator.h"
#include "tests/testing/test_device.h"

namespace h3::testing {

std::string TestDevice() { return "cpu"; }

int64_t BlockUnit() { return 1; }

void LimitAllocations(std::optional<ByteCount> more) {
  SetAllocationLimit(more.has_value() ? std::optional(InstallCountingAllocator().Snapshot().used + *more) : std::nullopt);
}

void ObserveAllocations(std::function<void(ByteCount)> observer) { SetAllocationObserver(std::move(observer)); }

}  // namespace h3::testing
