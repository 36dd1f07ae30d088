// Who may take how much of a device: promises made before the memory is used, so that what was admitted does not run out of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/bytes.h"

namespace h3 {

// What a request needs for itself. One thread computes on a device: `transient` is wanted by one request at a time, `held` by each
// as long as it lives.
struct MemoryDemand {
  ByteCount held;
  ByteCount transient;
  ByteCount total() const { return held + transient; }
};

// What the device holds beside the memory of requests, when a demand comes.
struct Occupancy {
  ByteCount fixed;     // Stays whatever happens: the base, the runtime's context.
  ByteCount own;       // Stays for this request: its adapters.
  ByteCount others;    // Pinned by other requests.
  ByteCount reusable;  // Goes when it is in the way: idle adapters, merged copies, cached modulations.
};

class Admission;

// A promise. Moves, never copies; its end gives the memory back. On any thread, not after its Admission.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  // From now on less is held: what was promised is in place and counted elsewhere.
  void Settle(ByteCount bytes);

 private:
  friend class Admission;
  Reservation(Admission* admission, uint64_t id) : admission_(admission), id_(id) {}

  Admission* admission_ = nullptr;
  uint64_t id_ = 0;
};

// Thread-safe; never blocks.
class Admission {
 public:
  // `margin`: never promised.
  Admission(ByteCount total, ByteCount margin) : total_(total), margin_(margin) {}

  // Checks and promises at once. VRAM_EXCEEDED with FAILED_PRECONDITION where it would not fit an otherwise empty device, with
  // RESOURCE_EXHAUSTED and retry_seconds where others hold what is missing; details in bytes: needed, total, margin, base, adapters,
  // free, reserved, missing. `what`: "the request", "adapter style": begins the message.
  absl::StatusOr<Reservation> Reserve(const std::string& what, const MemoryDemand& demand, const Occupancy& now) ABSL_LOCKS_EXCLUDED(mu_);
  // The same without a promise, for memory that is taken at once.
  absl::Status Check(const std::string& what, const MemoryDemand& demand, const Occupancy& now) const ABSL_LOCKS_EXCLUDED(mu_);

  // All that is held, and the largest transient.
  ByteCount reserved() const ABSL_LOCKS_EXCLUDED(mu_);
  // Held by all reservations.
  ByteCount held() const ABSL_LOCKS_EXCLUDED(mu_);
  // What a new request may take: total - margin - reserved - what is neither of requests nor reusable. Never negative.
  ByteCount Headroom(const Occupancy& now) const ABSL_LOCKS_EXCLUDED(mu_);
  // What is left when the reusable stays too. May be negative: so much of it has to go.
  ByteCount Spare(const Occupancy& now) const ABSL_LOCKS_EXCLUDED(mu_);

  ByteCount total() const { return total_; }
  ByteCount margin() const { return margin_; }

 private:
  friend class Reservation;

  ByteCount ReservedLocked(ByteCount transient = ByteCount(0)) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckLocked(const std::string& what, const MemoryDemand& demand, const Occupancy& now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Release(uint64_t id) ABSL_LOCKS_EXCLUDED(mu_);
  void Settle(uint64_t id, ByteCount bytes) ABSL_LOCKS_EXCLUDED(mu_);

  const ByteCount total_;
  const ByteCount margin_;
  mutable absl::Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, MemoryDemand> promised_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
