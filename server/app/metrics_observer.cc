#include "server/app/metrics_observer.h"

#include <string>

namespace h3 {
namespace {

const char* Name(AdapterSource source) {
  switch (source) {
    case AdapterSource::kDevice:
      return "device";
    case AdapterSource::kHost:
      return "host";
    case AdapterSource::kDisk:
      return "disk";
  }
  return "disk";
}

// Null: nothing was swapped.
const char* Name(StackChange change) {
  switch (change) {
    case StackChange::kNone:
      return nullptr;
    case StackChange::kActivate:
      return "activate";
    case StackChange::kDeactivate:
      return "deactivate";
    case StackChange::kReorder:
      return "reorder";
    case StackChange::kStrength:
      return "strength";
    case StackChange::kReplace:
      return "replace";
  }
  return nullptr;
}

}  // namespace

void MetricsObserver::AdapterLoaded(AdapterSource source, absl::Duration took, ByteCount bytes) {
  if (source == AdapterSource::kDevice) return;  // It was there.
  metrics_.CountAdapterLoad(Name(source), absl::ToDoubleSeconds(took), bytes);
}

void MetricsObserver::StackInPlace(StackChange change, AdapterSource slowest, absl::Duration took, ByteCount avoided_write) {
  if (const char* kind = Name(change); kind != nullptr)
    metrics_.CountSwap(kind, Name(slowest), absl::ToDoubleSeconds(took), avoided_write);
}

void MetricsObserver::StackRefused(StackChange change) {
  if (const char* kind = Name(change); kind != nullptr) metrics_.CountRefusedSwap(kind);
}

void MetricsObserver::OutOfMemory(absl::string_view phase) { metrics_.CountOutOfMemory(std::string(phase)); }

void MetricsObserver::BaseVerified(bool unchanged) { metrics_.CountVerification(unchanged ? "ok" : "changed"); }

}  // namespace h3
