#include "server/model/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

namespace h3 {

SeededNoise DrawNoise(uint64_t seed, const Layout& layout, const Packing& packing, int64_t video_channels,
                      int64_t audio_channels) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto draw = [&](std::vector<int64_t> shape) { return at::randn(shape, generator, at::TensorOptions().dtype(at::kFloat)); };
  SeededNoise noise;
  for (const ConditionShape& c : packing.visual_conditions) {
    noise.visual_conditions.push_back(draw({1, video_channels, c.frames, c.height, c.width}));
  }
  noise.video = draw({1, video_channels, layout.latent_frames, layout.latent_height, layout.latent_width});
  noise.audio = draw({2 * layout.audio_latents, audio_channels});
  return noise;
}

void EulerStep(at::Tensor& x, const at::Tensor& velocity, float sigma, float next) {
  // The sigma that the model saw: t is rounded to float32 before it is turned back.
  const float seen = 1.0f - (1.0f - sigma);
  const float ratio = next / sigma;
  const at::Tensor denoised = x.add(velocity, seen);
  x.mul_(ratio).add_(denoised, 1.0f - ratio);
}

}  // namespace h3
