// An engine that computes nothing: for tests of what stands around one. Deterministic, and stepped by the test.
//
// A run or session may be started whatever its layout; it answers the stack as asked for, each adapter with the digest
// "digest-of-NAME". One Advance is one piece of work, as with the real engine: first the preparation, then one a model
// evaluation. With HoldSteps, each piece of work (and each Evaluate of a session) first waits for a step that the test has
// allowed, and like the real engine gives up when it is cancelled. Every [device] method aborts the test program when it is
// called, or when a run or a session is destroyed, on another thread than the one that first used the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/worker/engine.h"

namespace h3::testing {

class FakeEngine final : public Engine {
 public:
  // Methods for the test are thread-safe.

  // Bytes of the "video" tensor of a result (a multiple of 4); its byte i is ResultByte(i). "audio" has 8 bytes.
  explicit FakeEngine(int64_t result_bytes = 64);
  static char ResultByte(size_t i) { return static_cast<char>(i % 251); }

  void HoldSteps() ABSL_LOCKS_EXCLUDED(mu_);
  void AllowSteps(int64_t count) ABSL_LOCKS_EXCLUDED(mu_);
  // False after 20 seconds: `count` pieces of work have begun since the start.
  bool WaitForBegun(int64_t count) ABSL_LOCKS_EXCLUDED(mu_);
  // False after 20 seconds: no run and no session is left.
  bool WaitForIdle() ABSL_LOCKS_EXCLUDED(mu_);

  // What the next StartGeneration, OpenSession, LoadAdapter or MeasureAdapter answers in the place of its result. Once.
  void RefuseNext(absl::Status why) ABSL_LOCKS_EXCLUDED(mu_);
  // From now on Health is `why`, and work fails with it.
  void Break(absl::Status why) ABSL_LOCKS_EXCLUDED(mu_);

  int64_t begun() const ABSL_LOCKS_EXCLUDED(mu_);
  // The last that StartGeneration got, refused or not.
  std::optional<GenerationSpec> last_generation() const ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<EvaluationSpec> last_evaluation() const ABSL_LOCKS_EXCLUDED(mu_);
  // The last that LoadAdapter or MeasureAdapter got.
  std::optional<StackEntry> last_adapter() const ABSL_LOCKS_EXCLUDED(mu_);

  // False after 20 seconds: `count` adapters have been asked for with PrefetchAdapter. Their names, in order.
  bool WaitForPrefetched(size_t count) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::string> prefetched() const ABSL_LOCKS_EXCLUDED(mu_);

  // Engine.
  absl::StatusOr<std::unique_ptr<Generation>> StartGeneration(GenerationSpec spec) override;
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(Conditions conditions, std::vector<std::pair<float, float>> announced,
                                                       const CancellationToken& cancel) override;
  absl::StatusOr<ResolvedAdapter> LoadAdapter(const StackEntry& entry) override;
  // Relative strength 0.25, all of one module.
  absl::StatusOr<AdapterMeasure> MeasureAdapter(const StackEntry& entry) override;
  // NOT_FOUND / UNKNOWN_ADAPTER where LoadAdapter has not loaded it; else 100 bytes.
  absl::StatusOr<ByteCount> UnloadAdapter(const std::string& digest) override;
  absl::Status PrefetchAdapter(const StackEntry& entry) override ABSL_LOCKS_EXCLUDED(mu_);
  void AuditBase(absl::Duration most) override;
  const ModelInfo& model() const override { return model_; }
  MemoryReport Memory() const override;
  absl::Status Health() const override;

 private:
  friend class FakeGeneration;
  friend class FakeSession;

  // Begins a piece of work: OK when it may be done.
  absl::Status Step(const CancellationToken& cancel) ABSL_LOCKS_EXCLUDED(mu_);
  void CheckThread() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status TakeRefusal() ABSL_LOCKS_EXCLUDED(mu_);
  void Born() ABSL_LOCKS_EXCLUDED(mu_);
  void Died() ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<HostTensor> Result() const;

  const int64_t result_bytes_;
  ModelInfo model_;
  mutable absl::Mutex mu_;
  std::optional<int64_t> allowed_ ABSL_GUARDED_BY(mu_);  // Absent: any number.
  int64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t alive_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);
  absl::Status health_ ABSL_GUARDED_BY(mu_);
  std::optional<std::thread::id> device_thread_ ABSL_GUARDED_BY(mu_);
  std::vector<ResolvedAdapter> resident_ ABSL_GUARDED_BY(mu_);
  std::optional<GenerationSpec> last_generation_ ABSL_GUARDED_BY(mu_);
  std::optional<EvaluationSpec> last_evaluation_ ABSL_GUARDED_BY(mu_);
  std::optional<StackEntry> last_adapter_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> prefetched_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3::testing
