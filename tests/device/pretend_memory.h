// Memory of the pretend device: its pages, its caching allocator, and pinned memory of the host.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "server/base/bytes.h"

namespace h3::testing {

// Where a kernel finds what the host knows as `device`. H3_CHECKs that it is an address of the device.
char* KernelAddress(const void* device);

// Thread-safe. Blocks are rounded to 512 bytes and cut from segments: 2 MiB for blocks up to 1 MiB, 20 MiB for those below 10 MiB,
// else their own of whole 2 MiB. A free block is used again on its stream only, or elsewhere once its streams are done.
class PretendAllocator : public c10::DeviceAllocator {
 public:
  virtual void SetMemory(ByteCount total, ByteCount context) = 0;
  virtual void SetAllocationObserver(std::function<void(ByteCount)> observer) = 0;
  virtual void SetEventObserver(std::function<void()> observer) = 0;
};
PretendAllocator& GetPretendAllocator();

// Pinned memory of the host. Thread-safe.
c10::Allocator& GetPinnedAllocator();
// Keeps the block around `address` alive, for copies that come later; null: the memory is not pinned.
std::shared_ptr<void> HoldPinned(const void* address);
ByteCount PinnedBytes();

}  // namespace h3::testing
