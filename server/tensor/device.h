// The one device of a process, through LibTorch's device-generic interface: the same code for the CPU and for an accelerator.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/bytes.h"
#include "server/format/dtype.h"

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

// nullopt for dtypes that no tensor of ours has.
std::optional<c10::ScalarType> ToScalarType(DType dtype);

// "float32", "bfloat16", "float16", "float64".
std::string ScalarTypeName(c10::ScalarType type);

}  // namespace h3
