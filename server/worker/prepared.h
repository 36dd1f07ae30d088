// What a run and a session have in common: checked conditions, a pinned stack, the text stream and the modulations, from which
// any evaluation of theirs is computed. On the device thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/cancellation.h"
#include "server/lora/adapter_store.h"
#include "server/lora/stack.h"
#include "server/model/forward.h"
#include "server/model/resident_model.h"
#include "server/worker/engine.h"
#include "server/worker/h3_engine.h"

namespace h3 {

// One evaluation that will be asked for.
struct EvaluationPlan {
  float t_video = 0;
  float t_audio = 0;
  int64_t index = 0;            // Picks the per-evaluation factors.
  std::vector<double> factors;  // In their place; or empty.
};

// Latent [1, C, T, H, W], float32 on any device -> rows [T H/2 W/2, 4 C] on `device`.
at::Tensor PatchifyLatent(const at::Tensor& latent, c10::Device device);

class Prepared {
 public:
  // Checks the conditions against the model (BAD_LAYOUT, BAD_TENSOR, BASE_MISMATCH, NOT_FINITE), packs them, pins the stack, reserves
  // the memory of `evaluations` of them (0: a session) and copies them to the device. VRAM_EXCEEDED as Admission::Reserve.
  static absl::StatusOr<std::unique_ptr<Prepared>> Make(H3Engine& engine, Conditions conditions, int64_t evaluations);

  const Layout& layout() const { return conditions_.layout; }
  const Packing& packing() const { return context_.packing; }
  const Stack& stack() const { return *stack_; }
  const std::vector<ResolvedAdapter>& resolved() const { return stack_->resolved(); }
  // The bound on the device's peak that it was admitted by.
  ByteCount planned_peak() const { return admitted_.planned_peak; }
  // The conditions as they came, float32 rows on the device: [condition video rows, 4 C], [condition audio rows, C].
  const at::Tensor& condition_video() const { return condition_video_; }
  const at::Tensor& condition_audio() const { return condition_audio_; }

  // The text stream of an evaluation's factors, computed at its first use. Called early, it keeps the cost out of the first step.
  absl::Status PrepareText(const EvaluationPlan& plan, const CancellationToken& cancel);
  // Computes the modulations of these evaluations together (as many as fit the modulation budget, from the first on) and
  // forgets the ones before.
  absl::Status PrepareModulation(absl::Span<const EvaluationPlan> plans, const CancellationToken& cancel);

  // The first of `plans`: video [all video rows, 4 C], audio [all audio rows, C], float32, condition rows first, on the device.
  // Prepares what is not, with the evaluations that follow it.
  absl::StatusOr<Velocity> Evaluate(absl::Span<const EvaluationPlan> plans, const at::Tensor& video, const at::Tensor& audio,
                                    bool condition_rows, const CancellationToken& cancel);

 private:
  // The line of modulation_ that each packed row takes; nullopt while one is not computed.
  std::optional<std::vector<int64_t>> RowLines(const EvaluationPlan& plan);

  Prepared(H3Engine& engine, Conditions conditions)
      : engine_(engine), model_(engine.resident()), conditions_(std::move(conditions)) {}

  H3Engine& engine_;
  const ResidentModel& model_;
  Conditions conditions_;
  H3Engine::Admitted admitted_;  // Before what it is for: memory is given back when it is free.
  std::unique_ptr<Stack> stack_;
  PackedContext context_;
  at::Tensor text_;  // [tokens, text width], as it came.
  at::Tensor condition_video_, condition_audio_;
  std::map<Stack::TextKey, at::Tensor> text_streams_;
  std::vector<ModulationEntry> entries_;  // Lines of modulation_.
  std::optional<Modulation> modulation_;
};

}  // namespace h3
