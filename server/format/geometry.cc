#include "server/format/geometry.h"

#include "absl/strings/str_cat.h"

namespace h3 {

absl::string_view SiteKindName(SiteKind kind) {
  switch (kind) {
    case SiteKind::kQkv: return "attn.qkv_proj";
    case SiteKind::kAttnOut: return "attn.out_proj";
    case SiteKind::kFc1: return "mlp.fc1";
    case SiteKind::kFc2: return "mlp.fc2";
    case SiteKind::kAdaln: return "adaln";
    case SiteKind::kFinalAdaln: return "final_adaln";
    case SiteKind::kTimeIn:
    case SiteKind::kTimeOut: return "time_embedder";
    case SiteKind::kVideoPatch:
    case SiteKind::kAudioPatch: return "patch";
    case SiteKind::kCondition: return "condition";
    case SiteKind::kVideoOut:
    case SiteKind::kAudioOut: return "head";
  }
  return "unknown";
}

std::vector<Site> Sites(const Geometry& g) {
  std::vector<Site> sites;
  const auto block_linears = [&](const std::string& prefix) {
    sites.push_back({prefix + ".attn.qkv_proj", SiteKind::kQkv, 3 * g.inner(), g.hidden, false});
    sites.push_back({prefix + ".attn.out_proj", SiteKind::kAttnOut, g.hidden, g.inner(), false});
    sites.push_back({prefix + ".mlp.fc1", SiteKind::kFc1, 2 * g.ffn, g.hidden, false});
    sites.push_back({prefix + ".mlp.fc2", SiteKind::kFc2, g.hidden, g.ffn, false});
  };
  sites.push_back({"video_patch_proj", SiteKind::kVideoPatch, g.hidden, 4 * g.video_channels, true});
  sites.push_back({"audio_patch_proj", SiteKind::kAudioPatch, g.hidden, g.audio_channels, true});
  sites.push_back({"condition_proj", SiteKind::kCondition, g.hidden, g.text_width, true});
  for (int64_t i = 0; i < g.refiner_blocks; ++i) block_linears(absl::StrCat("token_refiner.blocks.", i));
  if (!g.pruned()) {
    sites.push_back({"time_embedder.proj_in", SiteKind::kTimeIn, g.time_hidden, g.time_input, true});
    sites.push_back({"time_embedder.proj_out", SiteKind::kTimeOut, g.adaln_width, g.time_hidden, true});
  }
  for (int64_t i = 0; i < g.blocks; ++i) {
    const std::string prefix = absl::StrCat("blocks.", i);
    sites.push_back({prefix + ".adaln_proj.linear", SiteKind::kAdaln, 18 * g.hidden, g.adaln_width, true});
    block_linears(prefix);
  }
  sites.push_back({"final_layer.adaln_proj.linear", SiteKind::kFinalAdaln, 2 * g.hidden, g.adaln_width, true});
  sites.push_back({"final_layer.video_out", SiteKind::kVideoOut, 4 * g.video_channels, g.hidden, true});
  sites.push_back({"final_layer.audio_out", SiteKind::kAudioOut, g.audio_channels, g.hidden, true});
  return sites;
}

std::vector<TensorShape> ExpectedTensors(const Geometry& g) {
  std::vector<TensorShape> tensors;
  for (const Site& site : Sites(g)) {
    tensors.push_back({site.name + ".weight", {site.out, site.in}});
    if (site.has_bias) tensors.push_back({site.name + ".bias", {site.out}});
  }
  const auto norms = [&](const std::string& prefix) {
    tensors.push_back({prefix + ".norm1.weight", {g.hidden}});
    tensors.push_back({prefix + ".norm2.weight", {g.hidden}});
    tensors.push_back({prefix + ".attn.q_norm.weight", {g.head_dim}});
    tensors.push_back({prefix + ".attn.k_norm.weight", {g.head_dim}});
  };
  for (int64_t i = 0; i < g.refiner_blocks; ++i) norms(absl::StrCat("token_refiner.blocks.", i));
  for (int64_t i = 0; i < g.blocks; ++i) norms(absl::StrCat("blocks.", i));
  tensors.push_back({"token_refiner.final_norm.weight", {g.hidden}});
  tensors.push_back({"final_layer.norm.weight", {g.hidden}});
  if (g.pruned()) tensors.push_back({"adaln_t_table", {g.curve_rows, g.adaln_width}});
  return tensors;
}

}  // namespace h3
