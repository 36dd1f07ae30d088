#include "server/tensor/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/counting_allocator.h"
#include "server/tensor/reported_allocations.h"

namespace h3 {
namespace {

ByteCount MachineMemory() {
  return ByteCount(static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE)));
}

// The limit of this process's cgroup, where a container sets one.
std::optional<ByteCount> CgroupLimit() {
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    std::string text;
    int64_t bytes = 0;
    if (file >> text && absl::SimpleAtoi(text, &bytes)) return ByteCount(bytes);
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<c10::Device> ParseDevice(const std::string& name) {
  return CatchTorch("device", [&]() -> absl::StatusOr<c10::Device> {
    const auto accelerator = at::getAccelerator(/*checked=*/false);
    const bool present = accelerator.has_value() && at::accelerator::deviceCount() > 0;
    if (name == "cpu") return c10::Device(c10::DeviceType::CPU);
    if (name == "auto") return present ? c10::Device(*accelerator, 0) : c10::Device(c10::DeviceType::CPU);
    absl::StatusOr<c10::Device> device = c10::Device(name);
    if (!present || device->type() != *accelerator ||
        (device->has_index() && device->index() >= at::accelerator::deviceCount())) {
      return RefuseArgument(reason::kBadRequest, absl::StrCat("this machine has no device ", name, "; use --device cpu or auto"));
    }
    return c10::Device(device->type(), device->has_index() ? device->index() : 0);
  });
}

absl::StatusOr<DeviceCapacity> ProbeDevice(c10::Device device, ByteCount used, std::optional<ByteCount> limit) {
  DeviceCapacity capacity;
  if (device.is_cpu()) {
    capacity.total = MachineMemory();
    if (const auto cgroup = CgroupLimit(); cgroup.has_value()) capacity.total = std::min(capacity.total, *cgroup);
    if (limit.has_value()) capacity.total = std::min(capacity.total, *limit);
    capacity.free = std::max(ByteCount(0), capacity.total - used);
    return capacity;
  }
  H3_RETURN_IF_ERROR(CatchTorch("device memory", [&]() -> absl::Status {
    const auto [free, total] = at::accelerator::getMemoryInfo(device.index());
    capacity = {ByteCount(static_cast<int64_t>(total)), ByteCount(static_cast<int64_t>(free))};
    return absl::OkStatus();
  }));
  if (limit.has_value() && *limit < capacity.total) {
    capacity.total = *limit;
    capacity.free = std::min(capacity.free, std::max(ByteCount(0), *limit - used));
  }
  return capacity;
}

VramLedger& LedgerOf(c10::Device device) { return device.is_cpu() ? InstallCountingAllocator() : ReportAllocations(device); }

AllocatorFigures ProbeAllocator(c10::Device device) {
  if (device.is_cpu()) {
    const ByteCount allocated = CountedBytes();
    return {.allocated = allocated, .reserved = allocated, .active = allocated};
  }
  AllocatorFigures figures;
  CatchTorch("allocator statistics", [&]() -> absl::Status {
    const auto stats = at::accelerator::getDeviceStats(device.index());
    const auto current = [](const auto& array) { return ByteCount(array[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current); };
    figures = {current(stats.allocated_bytes), current(stats.reserved_bytes), current(stats.active_bytes),
               current(stats.inactive_split_bytes), stats.num_alloc_retries};
    return absl::OkStatus();
  }).IgnoreError();
  return figures;
}

HostFigures ProbeHost() {
  HostFigures figures;
  std::ifstream status("/proc/self/status");
  std::string key;
  int64_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    if (!(words >> key >> kib)) continue;
    const ByteCount bytes(kib << 10);
    if (key == "VmRSS:") figures.resident = bytes;
    if (key == "RssAnon:") figures.anonymous = bytes;
    if (key == "RssFile:") figures.file = bytes;
  }
  return figures;
}

std::optional<c10::ScalarType> ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kF64: return c10::ScalarType::Double;
    case DType::kF32: return c10::ScalarType::Float;
    case DType::kF16: return c10::ScalarType::Half;
    case DType::kBF16: return c10::ScalarType::BFloat16;
    case DType::kI64: return c10::ScalarType::Long;
    default: return std::nullopt;
  }
}

std::string ScalarTypeName(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double: return "float64";
    case c10::ScalarType::Float: return "float32";
    case c10::ScalarType::Half: return "float16";
    case c10::ScalarType::BFloat16: return "bfloat16";
    default: return c10::toString(type);
  }
}

}  // namespace h3
