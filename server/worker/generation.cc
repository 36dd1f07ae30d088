#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "server/model/sampler.h"
#include "server/tensor/catch_torch.h"
#include "server/worker/prepared.h"
#include "server/worker/request_tensors.h"
#include "server/worker/runs.h"

namespace h3 {
namespace {

class H3Generation final : public Generation {
 public:
  static absl::StatusOr<std::unique_ptr<Generation>> Make(H3Engine& engine, GenerationSpec spec) {
    auto run = std::unique_ptr<H3Generation>(new H3Generation(engine, std::move(spec.schedule)));
    const OwnerScope owner(Owner::kActivations);
    const Geometry& g = engine.resident().geometry();
    std::vector<HostTensor> start;
    std::vector<HostTensor>& tensors = spec.conditions.tensors;
    if (!spec.seed.has_value()) {
      for (auto it = tensors.begin(); it != tensors.end();) {
        const bool target = it->name == "target_video" || it->name == "target_audio_rows";
        if (target) start.push_back(std::move(*it));
        it = target ? tensors.erase(it) : it + 1;
      }
    }
    H3_RETURN_IF_ERROR(CheckStack(spec.conditions.stack, run->schedule_.evaluations()));
    H3_ASSIGN_OR_RETURN(run->prepared_, Prepared::Make(engine, std::move(spec.conditions), run->schedule_.evaluations()));
    run->planned_peak_ = run->prepared_->planned_peak();
    const Layout& layout = run->prepared_->layout();
    const std::vector<int64_t> video_shape = {1, g.video_channels, layout.latent_frames, layout.latent_height, layout.latent_width};
    if (spec.seed.has_value()) {
      run->StartFromSeed(*spec.seed);
    } else {
      RequestTensors request(start, engine.resident().device());
      H3_ASSIGN_OR_RETURN(const at::Tensor video, request.Float("target_video", video_shape, at::kFloat));
      H3_ASSIGN_OR_RETURN(const at::Tensor audio,
                          request.Float("target_audio_rows", {2 * layout.audio_latents, g.audio_channels}, at::kFloat));
      H3_RETURN_IF_ERROR(request.CheckAllUsed());
      run->Start(run->prepared_->condition_video(), PatchifyLatent(video, engine.resident().device()), audio);
    }
    for (int64_t i = 0; i < run->schedule_.evaluations(); ++i) {
      run->plans_.push_back({.t_video = 1.0f - run->schedule_.video[static_cast<size_t>(i)],
                             .t_audio = 1.0f - run->schedule_.audio[static_cast<size_t>(i)],
                             .index = i});
    }
    return run;
  }

  absl::StatusOr<bool> Advance(const CancellationToken& cancel) override {
    const c10::InferenceMode inference;
    const OwnerScope owner(Owner::kActivations);
    const absl::Time start = absl::Now();
    engine_.ledger().ResetPeak();
    const absl::Status status = CatchTorch("generate", [&]() -> absl::Status {
      return ready_ ? Step(cancel) : Prepare(cancel);
    });
    peak_ = std::max(peak_, engine_.ledger().Snapshot().peak);
    H3_RETURN_IF_ERROR(engine_.Observed(ready_ ? "denoise" : "prepare", status));
    H3_RETURN_IF_ERROR(engine_.CheckBase());
    const absl::Duration took = absl::Now() - start;
    if (ready_ && next_ == 0) {
      timings_.prepare = took;
    } else {
      timings_.steps.push_back(took);
    }
    return next_ == schedule_.evaluations();
  }

  absl::StatusOr<std::vector<HostTensor>> TakeResult() override {
    const c10::InferenceMode inference;
    auto taken = CatchTorch("result", [&]() -> absl::StatusOr<std::vector<HostTensor>> {
      H3_CHECK(next_ == schedule_.evaluations() && prepared_ != nullptr);
      H3_RETURN_IF_ERROR(CheckResult(video_, audio_));
      std::vector<HostTensor> result;
      result.push_back(ToHost("video", video_));
      result.push_back(ToHost("audio", audio_));
      const Packing& packing = prepared_->packing();
      const Layout& layout = prepared_->layout();
      const int64_t channels = engine_.resident().geometry().video_channels;
      const OwnerScope owner(Owner::kStaging);
      at::Tensor rows = video_.narrow(0, packing.condition_video_rows, packing.target_video_rows()).to(at::kCPU).contiguous();
      at::Tensor latents = at::empty({1, channels, layout.latent_frames, layout.latent_height, layout.latent_width}, at::kFloat);
      UnpatchifyVideo(rows.const_data_ptr<float>(), channels, layout.latent_frames, layout.latent_height, layout.latent_width,
                      latents.data_ptr<float>());
      result.push_back(ToHost("video_latents", latents));
      // Stereo, stored channel-major: rows [2 n, C] -> [2, C, n].
      const at::Tensor audio = audio_.narrow(0, packing.condition_audio_rows, packing.target_audio_rows());
      result.push_back(ToHost("audio_latents", audio.reshape({2, layout.audio_latents, audio.size(1)}).transpose(1, 2)));
      avoided_ = prepared_->stack().MergedBytes();
      resolved_ = prepared_->resolved();
      prepared_.reset();
      video_ = audio_ = at::Tensor();
      engine_.SetLastPeak(peak_);
      return result;
    });
    engine_.Observed("result", taken.status()).IgnoreError();
    return taken;
  }

  const std::vector<ResolvedAdapter>& stack() const override { return prepared_ != nullptr ? prepared_->resolved() : resolved_; }
  const RunTimings& timings() const override { return timings_; }
  ByteCount peak() const override { return peak_; }
  ByteCount planned_peak() const override { return planned_peak_; }
  ByteCount avoided_resident() const override { return prepared_ != nullptr ? prepared_->stack().MergedBytes() : avoided_; }

 private:
  H3Generation(H3Engine& engine, Schedule schedule) : engine_(engine), schedule_(std::move(schedule)) {}

  void StartFromSeed(uint64_t seed) {
    const Packing& packing = prepared_->packing();
    const Geometry& g = engine_.resident().geometry();
    const c10::Device device = engine_.resident().device();
    const SeededNoise noise = DrawNoise(seed, prepared_->layout(), packing, g.video_channels, g.audio_channels);
    // Visual conditions are blended, here and nowhere else: t x + (1 - t) noise at t = 0.999.
    at::Tensor conditions = prepared_->condition_video().clone();
    int64_t row = 0;
    for (const at::Tensor& latent : noise.visual_conditions) {
      const at::Tensor rows = PatchifyLatent(latent, device);
      at::Tensor part = conditions.narrow(0, row, rows.size(0));
      const float t = static_cast<float>(1.0 - kConditionNoise);
      part.mul_(t).add_(rows, 1.0f - t);
      row += rows.size(0);
    }
    Start(conditions, PatchifyLatent(noise.video, device), noise.audio.to(device));
  }

  void Start(const at::Tensor& condition_video, const at::Tensor& video, const at::Tensor& audio) {
    video_ = at::cat({condition_video, video});
    audio_ = at::cat({prepared_->condition_audio(), audio});
  }

  absl::Status Prepare(const CancellationToken& cancel) {
    for (const EvaluationPlan& plan : plans_) H3_RETURN_IF_ERROR(prepared_->PrepareText(plan, cancel));
    H3_RETURN_IF_ERROR(prepared_->PrepareModulation(plans_, cancel));
    ready_ = true;
    return absl::OkStatus();
  }

  absl::Status Step(const CancellationToken& cancel) {
    const auto i = static_cast<size_t>(next_);
    // With all that follow: past one group of modulations the next is computed.
    H3_ASSIGN_OR_RETURN(const Velocity velocity,
                        prepared_->Evaluate(absl::MakeConstSpan(plans_).subspan(i), video_, audio_, false, cancel));
    const Packing& packing = prepared_->packing();
    at::Tensor video = video_.narrow(0, packing.condition_video_rows, packing.target_video_rows());
    at::Tensor audio = audio_.narrow(0, packing.condition_audio_rows, packing.target_audio_rows());
    EulerStep(video, velocity.video, schedule_.video[i], schedule_.video[i + 1]);
    EulerStep(audio, velocity.audio, schedule_.audio[i], schedule_.audio[i + 1]);
    ++next_;
    return absl::OkStatus();
  }

  H3Engine& engine_;
  const Schedule schedule_;
  std::unique_ptr<Prepared> prepared_;
  std::vector<EvaluationPlan> plans_;
  at::Tensor video_, audio_;  // Rows, conditions first, float32.
  bool ready_ = false;
  int64_t next_ = 0;
  RunTimings timings_;
  ByteCount peak_, planned_peak_;
  ByteCount avoided_;
  std::vector<ResolvedAdapter> resolved_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Generation>> MakeGeneration(H3Engine& engine, GenerationSpec spec) {
  const c10::InferenceMode inference;
  return CatchTorch("generate", [&] { return H3Generation::Make(engine, std::move(spec)); });
}

}  // namespace h3
