// The one device of a process, through LibTorch's device-generic interface: the same code for the CPU and for an accelerator.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/bytes.h"
#include "server/format/dtype.h"
#include "server/vram/memory_report.h"

namespace h3 {

// "auto" (an accelerator where there is one, else the CPU), "cpu", "cuda", "cuda:N". INVALID_ARGUMENT for anything else or for a
// device that this machine lacks.
absl::StatusOr<c10::Device> ParseDevice(const std::string& name);

struct DeviceCapacity {
  ByteCount total;
  ByteCount free;
};

// CPU: total is the least of `limit`, the cgroup's limit and MemTotal; free is total - `used` (the ledger's). Accelerator: the
// driver's figures, total capped by `limit`.
absl::StatusOr<DeviceCapacity> ProbeDevice(c10::Device device, ByteCount used, std::optional<ByteCount> limit);

// The ledger of the device's memory, fed from now on by what allocates there. On the thread that will own the device, before its
// first tensor.
VramLedger& LedgerOf(c10::Device device);

// What the allocator under the device's tensors says now. Zeros where it says nothing. Any thread.
AllocatorFigures ProbeAllocator(c10::Device device);

// This process in host memory, from the kernel. Any thread.
HostFigures ProbeHost();

// nullopt for dtypes that no tensor of ours has.
std::optional<c10::ScalarType> ToScalarType(DType dtype);

// "float32", "bfloat16", "float16", "float64".
std::string ScalarTypeName(c10::ScalarType type);

}  // namespace h3
