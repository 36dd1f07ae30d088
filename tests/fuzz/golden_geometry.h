// The geometry of the golden model (tests/golden/README.md), here as numbers: a fuzzer opens no files.
#pragma once

#include "server/format/geometry.h"

namespace h3::fuzz {

inline constexpr int64_t kGridWidth = 28;  // The full model's AdaLN width.

inline Geometry GoldenGeometry(bool pruned) {
  Geometry geometry{.hidden = 64,
                    .blocks = 4,
                    .refiner_blocks = 2,
                    .heads = 4,
                    .head_dim = 24,
                    .ffn = 112,
                    .video_channels = 4,
                    .audio_channels = 6,
                    .text_width = 40,
                    .time_input = 32,
                    .time_hidden = 56,
                    .adaln_width = kGridWidth,
                    .rope_frequencies = 3};
  if (pruned) {
    geometry.time_input = 0;
    geometry.time_hidden = 0;
    geometry.adaln_width = 8;
    geometry.curve_rows = 1025;
  }
  return geometry;
}

}  // namespace h3::fuzz
