// Noise from a seed, and the Euler step, as diffusers 0.42.1 has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "server/format/layout.h"

namespace h3 {

// Condition video rows run at this t at least; a run from a seed blends them to it.
inline constexpr double kConditionNoise = 0.001;

struct SeededNoise {
  std::vector<at::Tensor> visual_conditions;  // [1, C, T, H, W] each, in packed order.
  at::Tensor video;                           // [1, C, T, H, W]
  at::Tensor audio;                           // [2 audio_latents, C]
};

// One torch CPU generator, float32: each visual condition's latent in packed order, then the video, then the audio rows. On the
// CPU, whatever the device: the same on every machine.
SeededNoise DrawNoise(uint64_t seed, const Layout& layout, const Packing& packing, int64_t video_channels, int64_t audio_channels);

// x <- r x + (1 - r) x0 with x0 = x + (1 - t) v, r = next / now, in place, float32. `sigma` now and next, after the shift.
void EulerStep(at::Tensor& x, const at::Tensor& velocity, float sigma, float next);

}  // namespace h3
