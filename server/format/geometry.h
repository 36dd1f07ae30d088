// The sizes of an H3 model, and the table of its linear sites: every layer that an adapter can address. Loader, adapter intake,
// planner and tests walk this one table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace h3 {

struct Geometry {
  int64_t hidden = 0;
  int64_t blocks = 0;
  int64_t refiner_blocks = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;             // fc1 has 2 * ffn rows.
  int64_t video_channels = 0;  // A packed video row has 4 * video_channels columns (patch 1 x 2 x 2).
  int64_t audio_channels = 0;
  int64_t text_width = 0;
  int64_t time_input = 0;   // Sinusoid width; 0 on a pruned model.
  int64_t time_hidden = 0;  // 0 on a pruned model.
  int64_t adaln_width = 0;  // Input width of every AdaLN projection.
  int64_t curve_rows = 0;   // Rows of adaln_t_table; 0 on a full model.
  int64_t rope_frequencies = 0;

  bool pruned() const { return curve_rows > 0; }
  int64_t inner() const { return heads * head_dim; }
  bool operator==(const Geometry&) const = default;
};

enum class SiteKind {
  kQkv,         // [3 * inner, hidden]; canonical row order: stacked [q; k; v].
  kAttnOut,     // [hidden, inner]
  kFc1,         // [2 * ffn, hidden]; canonical row order [gate; up].
  kFc2,         // [hidden, ffn]
  kAdaln,       // [18 * hidden, adaln_width]: modality (video, text, audio) x 6 vectors x hidden.
  kFinalAdaln,  // [2 * hidden, adaln_width]
  kTimeIn,      // [time_hidden, time_input]; full model only.
  kTimeOut,     // [adaln_width, time_hidden]; full model only.
  kVideoPatch,  // [hidden, 4 * video_channels]
  kAudioPatch,  // [hidden, audio_channels]
  kCondition,   // [hidden, text_width]
  kVideoOut,    // [4 * video_channels, hidden]
  kAudioOut,    // [audio_channels, hidden]
};

struct Site {
  std::string name;  // Canonical: "blocks.0.attn.qkv_proj", "token_refiner.blocks.1.mlp.fc1", "final_layer.video_out".
  SiteKind kind = SiteKind::kQkv;
  int64_t out = 0;
  int64_t in = 0;
  bool has_bias = false;
};

// "attn.qkv_proj", "mlp.fc1", "adaln", "patch", ...: for reports.
absl::string_view SiteKindName(SiteKind kind);

// Every linear site of a model of this geometry, in the order of the forward.
std::vector<Site> Sites(const Geometry& geometry);

struct TensorShape {
  std::string name;  // Canonical, with ".weight" / ".bias".
  std::vector<int64_t> shape;
};

// Every tensor that a checkpoint of this geometry must hold under its canonical name (rope.inv_freq excepted: the diffusers
// container has none), the linear sites' included. On a full model time_embedder.*, on a pruned one adaln_t_table.
std::vector<TensorShape> ExpectedTensors(const Geometry& geometry);

}  // namespace h3
