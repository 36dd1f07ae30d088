// The device that a test program of the engine computes on, by what it links: the CPU (testing_cpu), or the pretend accelerator
// (tests/device).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "server/base/bytes.h"

namespace h3::testing {

// For EngineOptions::device.
std::string TestDevice();

// Bytes of its memory come in multiples of this.
int64_t BlockUnit();

// From now on an allocation that needs more than `more` beyond what is in use now fails with c10::OutOfMemoryError; nullopt: no limit.
void LimitAllocations(std::optional<ByteCount> more);

// Called before each allocation on the device with the bytes that were asked for; null: nobody. It may throw
// c10::OutOfMemoryError.
void ObserveAllocations(std::function<void(ByteCount)> observer);

}  // namespace h3::testing
