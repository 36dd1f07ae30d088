// absl::Mutex made of the standard library's, for programs under the thread sanitizer. The distribution's Abseil is not
// instrumented: the sanitizer does not see its locks and would take every guarded field for a race. Definitions in a program
// come before those of a shared library, so these replace it, for Abseil's own callers too. absl::CondVar is not replaced and
// must not be used with it.
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

struct Standard {
  std::mutex mu;
  std::condition_variable changed;  // Any unlock: conditions may be true now.
};

// The word of an absl::Mutex holds a pointer to it, from the first use on.
Standard& Of(std::atomic<intptr_t>& word) {
  intptr_t known = word.load(std::memory_order_acquire);
  if (known == 0) {
    auto* made = new Standard;
    if (word.compare_exchange_strong(known, reinterpret_cast<intptr_t>(made), std::memory_order_acq_rel)) return *made;
    delete made;
  }
  return *reinterpret_cast<Standard*>(known);
}

bool Wait(Standard& standard, const Condition& condition, absl::Time deadline) {
  std::unique_lock<std::mutex> lock(standard.mu, std::adopt_lock);
  const auto holds = [&] { return condition.Eval(); };
  bool held = true;
  if (deadline == absl::InfiniteFuture()) {
    standard.changed.wait(lock, holds);
  } else {
    held = standard.changed.wait_until(lock, absl::ToChronoTime(deadline), holds);
  }
  lock.release();  // It stays locked for the caller.
  return held;
}

}  // namespace

Mutex::~Mutex() { delete reinterpret_cast<Standard*>(mu_.load(std::memory_order_acquire)); }
void Mutex::Lock() { Of(mu_).mu.lock(); }
bool Mutex::TryLock() { return Of(mu_).mu.try_lock(); }
void Mutex::Unlock() {
  Standard& standard = Of(mu_);
  standard.changed.notify_all();  // Before the unlock: after it the mutex may be gone.
  standard.mu.unlock();
}
void Mutex::ReaderLock() { Lock(); }
bool Mutex::ReaderTryLock() { return TryLock(); }
void Mutex::ReaderUnlock() { Unlock(); }

void Mutex::Await(const Condition& condition) { Wait(Of(mu_), condition, absl::InfiniteFuture()); }
bool Mutex::AwaitWithDeadline(const Condition& condition, absl::Time deadline) { return Wait(Of(mu_), condition, deadline); }
bool Mutex::AwaitWithTimeout(const Condition& condition, absl::Duration timeout) {
  return AwaitWithDeadline(condition, absl::Now() + timeout);
}
void Mutex::LockWhen(const Condition& condition) {
  Lock();
  Await(condition);
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, absl::Time deadline) {
  Lock();
  return AwaitWithDeadline(condition, deadline);
}
bool Mutex::LockWhenWithTimeout(const Condition& condition, absl::Duration timeout) {
  return LockWhenWithDeadline(condition, absl::Now() + timeout);
}
void Mutex::ReaderLockWhen(const Condition& condition) { LockWhen(condition); }
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, absl::Time deadline) {
  return LockWhenWithDeadline(condition, deadline);
}
bool Mutex::ReaderLockWhenWithTimeout(const Condition& condition, absl::Duration timeout) {
  return LockWhenWithTimeout(condition, timeout);
}

ABSL_NAMESPACE_END
}  // namespace absl
