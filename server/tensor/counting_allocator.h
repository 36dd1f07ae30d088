// The CPU as a device with a ledger: an allocator under LibTorch that counts every tensor's bytes, exactly, by owner.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "server/base/bytes.h"
#include "server/vram/ledger.h"

namespace h3 {

// Installs the allocator for the rest of the process (LibTorch keeps raw pointers to it) and returns its ledger, which lives for
// ever. Idempotent. Call before the first tensor is made. Each block is counted with the bytes that were asked for, under
// the OwnerScope of the allocating thread; a free on another thread gives them back to the same owner.
VramLedger& InstallCountingAllocator();

// Live bytes that were allocated through it: without mapped files. Any thread.
ByteCount CountedBytes();

// From now on an allocation that would take `used` above `limit` throws c10::OutOfMemoryError. nullopt: no limit.
void SetAllocationLimit(std::optional<ByteCount> limit);

// Called for each allocation with its size, on the allocating thread, before it happens; null: nobody. For tests that look for
// weight-sized allocations, or make one fail by throwing c10::OutOfMemoryError; it must not allocate tensors.
void SetAllocationObserver(std::function<void(ByteCount)> observer);

// Counts memory that is not allocated through LibTorch (mapped checkpoint files) while alive.
class ExternalBytes {
 public:
  ExternalBytes(VramLedger& ledger, Owner owner, ByteCount bytes) : ledger_(ledger), owner_(owner), bytes_(bytes) {
    ledger_.Add(owner_, bytes_);
  }
  ~ExternalBytes() { ledger_.Remove(owner_, bytes_); }
  ExternalBytes(const ExternalBytes&) = delete;
  ExternalBytes& operator=(const ExternalBytes&) = delete;

 private:
  VramLedger& ledger_;
  const Owner owner_;
  const ByteCount bytes_;
};

}  // namespace h3
