#include <c10/util/Exception.h>

#include <algorithm>

#include "tests/device/pretend_device.h"
#include "tests/device/pretend_memory.h"
#include "tests/testing/test_device.h"

namespace h3::testing {
namespace {

const bool registered = [] {
  RegisterPretendDevice();
  return true;
}();

ByteCount Allocated() { return ByteCount(GetPretendAllocator().getDeviceStats(0).allocated_bytes[0].current); }

}  // namespace

std::string TestDevice() { return kPretendDevice; }

int64_t BlockUnit() { return 512; }

void LimitAllocations(std::optional<ByteCount> more) {
  if (!more.has_value()) return SetPretendAllocationObserver(nullptr);
  SetPretendAllocationObserver([limit = Allocated() + *more](ByteCount bytes) {
    TORCH_CHECK_WITH(OutOfMemoryError, Allocated() + bytes <= limit, "the test allows no ", bytes.value(), " bytes more");
  });
}

void ObserveAllocations(std::function<void(ByteCount)> observer) { SetPretendAllocationObserver(std::move(observer)); }

}  // namespace h3::testing
