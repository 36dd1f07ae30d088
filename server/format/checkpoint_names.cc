#include "server/format/checkpoint_names.h"

#include <array>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace h3 {
namespace {

struct Rename {
  absl::string_view from;
  absl::string_view to;
};

// Whole leading names.
constexpr std::array<Rename, 12> kPrefixes = {{{"transformer_blocks.", "blocks."},
                                               {"token_refiner.refiner_blocks.", "token_refiner.blocks."},
                                               {"proj_in.", "video_patch_proj."},
                                               {"audio_proj_in.", "audio_patch_proj."},
                                               {"context_embedder.", "condition_proj."},
                                               {"time_embedder.linear_1.", "time_embedder.proj_in."},
                                               {"time_embedder.linear_2.", "time_embedder.proj_out."},
                                               {"norm_out.norm.", "final_layer.norm."},
                                               {"norm_out.linear.", "final_layer.adaln_proj.linear."},
                                               {"proj_out.", "final_layer.video_out."},
                                               {"audio_proj_out.", "final_layer.audio_out."},
                                               {"token_refiner.final_norm.", "token_refiner.final_norm."}}};

// Endings inside a block.
constexpr std::array<Rename, 4> kSuffixes = {{{".attn.to_out.0.weight", ".attn.out_proj.weight"},
                                              {".attn.norm_q.weight", ".attn.q_norm.weight"},
                                              {".attn.norm_k.weight", ".attn.k_norm.weight"},
                                              {".ff.net.2.weight", ".mlp.fc2.weight"}}};

constexpr std::array<absl::string_view, 3> kSplit = {".attn.to_q.weight", ".attn.to_k.weight", ".attn.to_v.weight"};

}  // namespace

std::vector<CanonicalPiece> FromDiffusersName(absl::string_view name) {
  std::string canonical(name);
  for (const Rename& rename : kPrefixes) {
    if (!absl::StartsWith(name, rename.from)) continue;
    canonical = absl::StrCat(rename.to, name.substr(rename.from.size()));
    break;
  }
  for (const Rename& rename : kSuffixes) {
    if (absl::EndsWith(canonical, rename.from)) {
      return {{absl::StrCat(absl::StripSuffix(canonical, rename.from), rename.to), 0, std::nullopt}};
    }
  }
  for (size_t i = 0; i < kSplit.size(); ++i) {
    if (absl::EndsWith(canonical, kSplit[i])) {
      return {{absl::StrCat(absl::StripSuffix(canonical, kSplit[i]), ".attn.qkv_proj.weight"), static_cast<int>(i), std::nullopt}};
    }
  }
  constexpr absl::string_view kUpGate = ".ff.net.0.proj.weight";
  if (absl::EndsWith(canonical, kUpGate)) {
    const std::string fc1 = absl::StrCat(absl::StripSuffix(canonical, kUpGate), ".mlp.fc1.weight");
    return {{fc1, 0, 1}, {fc1, 1, 0}};
  }
  return {{canonical, 0, std::nullopt}};
}

}  // namespace h3
