// A pretend accelerator for tests: a LibTorch backend ("pretend") that computes with the CPU's kernels but is as unforgiving as a
// real device.
//
// - Its memory is not the host's: a device address that the host reads or writes is a SIGSEGV. Kernels see the same pages elsewhere.
// - Its streams are as late as they may be: work is queued, and runs, on a thread of the device, only when somebody waits for it.
//   What the host reads without waiting is not there yet: the target of a copy to pinned memory is filled with 0xff until then.
// - Its allocator rounds, splits, caches, retries and fails as CUDA's does, and reports as that one does.
// - Tensors of different devices do not meet in an operator, but for CPU scalars.
// - Waits and copies of pageable memory are counted.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "server/base/bytes.h"

namespace h3::testing {

inline constexpr char kPretendDevice[] = "pretend";

// Before the first tensor. LibTorch has one accelerator in a process from now on: this one. Idempotent.
void RegisterPretendDevice();

// What the driver says: the size of the device, and what the runtime's context takes of it. Not below what is reserved now.
void SetPretendMemory(ByteCount total, ByteCount context);

// Called before each allocation with the bytes that were asked for, on the allocating thread; may throw c10::OutOfMemoryError, which
// then is what the allocation does. Null: nobody.
void SetPretendAllocationObserver(std::function<void(ByteCount)> observer);
// Called after each allocation and each free, when it has been reported. Null: nobody.
void SetPretendEventObserver(std::function<void()> observer);

struct PretendCounters {
  int64_t waits = 0;            // The host waited for the device: a value, a blocking copy, a stream, an event.
  int64_t kernels = 0;          // Launched.
  int64_t pageable_copies = 0;  // Between the device and memory that is not pinned.
  int64_t pageable_bytes = 0;
  int64_t up_bytes = 0;         // Host to device.
  int64_t down_bytes = 0;       // Device to host.
  int64_t queued = 0;           // Work that nobody has waited for: now, not since the start.
  int64_t longest_queue = 0;    // Largest `queued` since the start.
  std::map<std::string, int64_t> shape_waits;  // Of `waits`: operators whose result's shape LibTorch cannot tell beforehand.
};
PretendCounters GetPretendCounters();
void ResetPretendCounters();

// Bytes of pinned host memory now.
ByteCount PretendPinnedBytes();

}  // namespace h3::testing
