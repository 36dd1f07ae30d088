#include "server/vram/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {

Reservation::Reservation(Reservation&& other) noexcept : admission_(std::exchange(other.admission_, nullptr)), id_(other.id_) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    if (admission_ != nullptr) admission_->Release(id_);
    admission_ = std::exchange(other.admission_, nullptr);
    id_ = other.id_;
  }
  return *this;
}

Reservation::~Reservation() {
  if (admission_ != nullptr) admission_->Release(id_);
}

void Reservation::Settle(ByteCount bytes) {
  if (admission_ != nullptr) admission_->Settle(id_, bytes);
}

absl::StatusOr<Reservation> Admission::Reserve(const std::string& what, const MemoryDemand& demand, const Occupancy& now) {
  absl::MutexLock lock(&mu_);
  H3_RETURN_IF_ERROR(CheckLocked(what, demand, now));
  promised_[next_] = demand;
  return Reservation(this, next_++);
}

absl::Status Admission::Check(const std::string& what, const MemoryDemand& demand, const Occupancy& now) const {
  absl::MutexLock lock(&mu_);
  return CheckLocked(what, demand, now);
}

absl::Status Admission::CheckLocked(const std::string& what, const MemoryDemand& demand, const Occupancy& now) const {
  const ByteCount usable = total_ - margin_;
  const auto refuse = [&](absl::StatusCode code, ByteCount missing, absl::string_view why, ErrorDetails details) {
    const ByteCount free = std::max(ByteCount(0), usable - now.fixed - now.own - now.others - ReservedLocked());
    details.insert({{"needed_bytes", absl::StrCat(demand.total().value())},
                    {"total_bytes", absl::StrCat(total_.value())},
                    {"margin_bytes", absl::StrCat(margin_.value())},
                    {"base_bytes", absl::StrCat(now.fixed.value())},
                    {"adapter_bytes", absl::StrCat(now.own.value())},
                    {"free_bytes", absl::StrCat(free.value())},
                    {"reserved_bytes", absl::StrCat(ReservedLocked().value())},
                    {"missing_bytes", absl::StrCat(missing.value())}});
    return Refuse(code, reason::kVramExceeded,
                  absl::StrCat(what, " needs ", Human(demand.total()), " beside ", Human(now.fixed), " of the base and ", Human(now.own),
                               " of its adapters; the device has ", Human(usable), why),
                  std::move(details));
  };
  if (const ByteCount alone = now.fixed + now.own + demand.total(); alone > usable) {
    return refuse(absl::StatusCode::kFailedPrecondition, alone - usable,
                  absl::StrCat(": ", Human(alone - usable),
                               " too little even when nothing else runs; make it smaller (size, frames, stack) or give more (--device-memory)"),
                  {});
  }
  const ByteCount all = now.fixed + now.own + now.others + demand.held + ReservedLocked(demand.transient);
  if (all <= usable) return absl::OkStatus();
  return refuse(absl::StatusCode::kResourceExhausted, all - usable,
                absl::StrCat(", of which requests and sessions that run hold ", Human(ReservedLocked() + now.others), "; ",
                             Human(all - usable), " of that must go first"),
                {{"retry_seconds", "1"}});
}

ByteCount Admission::ReservedLocked(ByteCount transient) const {
  ByteCount held;
  for (const auto& [id, demand] : promised_) {
    held += demand.held;
    transient = std::max(transient, demand.transient);
  }
  return held + transient;
}

ByteCount Admission::reserved() const {
  absl::MutexLock lock(&mu_);
  return ReservedLocked();
}

ByteCount Admission::held() const {
  absl::MutexLock lock(&mu_);
  ByteCount held;
  for (const auto& [id, demand] : promised_) held += demand.held;
  return held;
}

ByteCount Admission::Spare(const Occupancy& now) const {
  return total_ - margin_ - reserved() - now.fixed - now.own - now.others - now.reusable;
}

ByteCount Admission::Headroom(const Occupancy& now) const { return std::max(ByteCount(0), Spare(now) + now.reusable); }

void Admission::Release(uint64_t id) {
  absl::MutexLock lock(&mu_);
  promised_.erase(id);
}

void Admission::Settle(uint64_t id, ByteCount bytes) {
  absl::MutexLock lock(&mu_);
  MemoryDemand& demand = promised_.at(id);
  demand.held = std::max(ByteCount(0), demand.held - bytes);
}

}  // namespace h3
