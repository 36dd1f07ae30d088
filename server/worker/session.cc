#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/tensor/catch_torch.h"
#include "server/worker/prepared.h"
#include "server/worker/request_tensors.h"
#include "server/worker/runs.h"

namespace h3 {
namespace {

class H3Session final : public Session {
 public:
  H3Session(H3Engine& engine, std::unique_ptr<Prepared> prepared) : engine_(engine), prepared_(std::move(prepared)) {}

  absl::Status Open(const std::vector<std::pair<float, float>>& announced, const CancellationToken& cancel) {
    H3_RETURN_IF_ERROR(prepared_->PrepareText({}, cancel));
    std::vector<EvaluationPlan> plans;
    for (size_t i = 0; i < announced.size(); ++i) {
      plans.push_back({.t_video = announced[i].first, .t_audio = announced[i].second, .index = static_cast<int64_t>(i)});
    }
    if (!plans.empty()) H3_RETURN_IF_ERROR(prepared_->PrepareModulation(plans, cancel));
    return engine_.CheckBase();
  }

  absl::StatusOr<std::vector<HostTensor>> Evaluate(const EvaluationSpec& spec, const CancellationToken& cancel) override {
    const c10::InferenceMode inference;
    const OwnerScope owner(Owner::kActivations);
    engine_.ledger().ResetPeak();
    auto answer = CatchTorch("evaluate", [&]() -> absl::StatusOr<std::vector<HostTensor>> {
      if (!spec.factors.empty() && spec.factors.size() != prepared_->resolved().size()) {
        return RefuseArgument(reason::kBadStrength, absl::StrCat(spec.factors.size(), " factors for a stack of ",
                                                                 prepared_->resolved().size(), "; give one an entry"));
      }
      H3_RETURN_IF_ERROR(prepared_->stack().CheckFactors(spec.factors));
      const EvaluationPlan plan{spec.t_video, spec.t_audio, spec.index, spec.factors};
      H3_ASSIGN_OR_RETURN(const at::Tensor video, VideoRows(spec.video));
      H3_ASSIGN_OR_RETURN(const at::Tensor audio, AudioRows(spec.audio));
      H3_ASSIGN_OR_RETURN(const Velocity velocity,
                          prepared_->Evaluate(absl::MakeConstSpan(&plan, 1), video, audio, spec.include_condition_rows, cancel));
      H3_RETURN_IF_ERROR(engine_.CheckBase());
      H3_RETURN_IF_ERROR(CheckResult(velocity.video, velocity.audio));
      engine_.SetLastPeak(engine_.ledger().Snapshot().peak);
      std::vector<HostTensor> result;
      result.push_back(ToHost("video", velocity.video));
      result.push_back(ToHost("audio", velocity.audio));
      return result;
    });
    engine_.Observed("denoise", answer.status()).IgnoreError();
    return answer;
  }

  const std::vector<ResolvedAdapter>& stack() const override { return prepared_->resolved(); }

 private:
  // Condition rows as they came, then the target's rows of this evaluation.
  absl::StatusOr<at::Tensor> VideoRows(const HostTensor& tensor) const {
    const Geometry& g = engine_.resident().geometry();
    const Layout& layout = prepared_->layout();
    const std::vector<HostTensor> tensors = {tensor};
    RequestTensors request(tensors, engine_.resident().device());
    at::Tensor rows;
    if (tensor.name == "target_video") {
      H3_ASSIGN_OR_RETURN(const at::Tensor latent,
                          request.Float(tensor.name, {1, g.video_channels, layout.latent_frames, layout.latent_height, layout.latent_width}, at::kFloat));
      rows = PatchifyLatent(latent, engine_.resident().device());
    } else {
      H3_ASSIGN_OR_RETURN(rows, request.Float("target_video_rows", {prepared_->packing().target_video_rows(), 4 * g.video_channels}, at::kFloat));
    }
    return at::cat({prepared_->condition_video(), rows});
  }

  absl::StatusOr<at::Tensor> AudioRows(const HostTensor& tensor) const {
    const std::vector<HostTensor> tensors = {tensor};
    RequestTensors request(tensors, engine_.resident().device());
    H3_ASSIGN_OR_RETURN(const at::Tensor rows,
                        request.Float("target_audio_rows", {prepared_->packing().target_audio_rows(), engine_.resident().geometry().audio_channels}, at::kFloat));
    return at::cat({prepared_->condition_audio(), rows});
  }

  H3Engine& engine_;
  const std::unique_ptr<Prepared> prepared_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> MakeSession(H3Engine& engine, Conditions conditions,
                                                     std::vector<std::pair<float, float>> announced,
                                                     const CancellationToken& cancel) {
  const c10::InferenceMode inference;
  return CatchTorch("session", [&]() -> absl::StatusOr<std::unique_ptr<Session>> {
    H3_ASSIGN_OR_RETURN(auto prepared, Prepared::Make(engine, std::move(conditions), 0));
    auto session = std::make_unique<H3Session>(engine, std::move(prepared));
    H3_RETURN_IF_ERROR(session->Open(announced, cancel));
    return session;
  });
}

}  // namespace h3
