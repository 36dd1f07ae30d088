#include "server/format/adapter_names.h"

#include <array>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace h3 {
namespace {

struct Suffix {
  absl::string_view text;
  Part part;
  bool default_infix = false;
};

// Closed: what ends in none of these is no part of an adapter.
constexpr std::array<Suffix, 27> kSuffixes = {{{".lora_A.weight", Part::kA},
                                               {".lora_B.weight", Part::kB},
                                               {".lora_A.default.weight", Part::kA, true},
                                               {".lora_B.default.weight", Part::kB, true},
                                               {".lora_down.weight", Part::kA},
                                               {".lora_up.weight", Part::kB},
                                               {".lora.down.weight", Part::kA},
                                               {".lora.up.weight", Part::kB},
                                               {".lora_A", Part::kA},
                                               {".lora_B", Part::kB},
                                               {".alpha", Part::kAlpha},
                                               {".lora_alpha", Part::kAlpha},
                                               {".dora_scale", Part::kMagnitude},
                                               {".lora_magnitude_vector", Part::kMagnitude},
                                               {".lora_magnitude_vector.weight", Part::kMagnitude},
                                               {".lora_magnitude_vector.default.weight", Part::kMagnitude, true},
                                               {".lora_magnitude_vector.default", Part::kMagnitude, true},
                                               {".lokr_w1", Part::kLokrW1},
                                               {".lokr_w1_a", Part::kLokrW1A},
                                               {".lokr_w1_b", Part::kLokrW1B},
                                               {".lokr_w2", Part::kLokrW2},
                                               {".lokr_w2_a", Part::kLokrW2A},
                                               {".lokr_w2_b", Part::kLokrW2B},
                                               {".diff_b", Part::kOffset},
                                               {".diff", Part::kDifference},
                                               {".weight", Part::kWeight},
                                               {".bias", Part::kBias}}};

struct Unsupported {
  absl::string_view mark;  // Anywhere in the name.
  absl::string_view kind;
};

// Kinds that are known and cannot be applied. Looked at first: their factors would otherwise be taken for plain ones.
constexpr std::array<Unsupported, 14> kUnsupported = {{{".hada_", "LoHa"},
                                                       {".oft_", "OFT"},
                                                       {".boft_", "BOFT"},
                                                       {".lora_mid", "Tucker (lora_mid)"},
                                                       {".lokr_t2", "Tucker (lokr_t2)"},
                                                       {".reshape_weight", "reshape_weight"},
                                                       {".set_weight", "set_weight"},
                                                       {".set_bias", "set_bias"},
                                                       {".ia3_", "IA3"},
                                                       {".glora_", "GLoRA"},
                                                       {".weight_scale", "quantised factors (weight_scale)"},
                                                       {".scale_weight", "quantised factors (scale_weight)"},
                                                       {".comfy_quant", "quantised factors (comfy_quant)"},
                                                       {".lora_B.bias", "lora_bias"}}};

std::string Flatten(absl::string_view name) { return absl::StrReplaceAll(name, {{".", "_"}}); }

}  // namespace

std::optional<ParsedName> ParseTensorName(absl::string_view name) {
  ParsedName parsed;
  parsed.peft_prefix = absl::ConsumePrefix(&name, "base_model.model.");
  if (absl::ConsumePrefix(&name, "lora_unet_") || absl::ConsumePrefix(&name, "lora_transformer_")) {
    parsed.naming = Naming::kFlattened;
  } else if (absl::ConsumePrefix(&name, "lycoris_")) {
    parsed.naming = Naming::kFlattened;
    parsed.lycoris_prefix = true;
  } else if (absl::ConsumePrefix(&name, "transformer_ref.")) {
    parsed.section = "transformer_ref";
  } else if (absl::ConsumePrefix(&name, "transformer.")) {
    parsed.section = "transformer";
  } else if (!absl::ConsumePrefix(&name, "model.diffusion_model.")) {
    absl::ConsumePrefix(&name, "diffusion_model.");
  }
  if (name == "adaln_t_table") {
    parsed.part = Part::kTable;
    return parsed;
  }
  for (const Unsupported& kind : kUnsupported) {
    const size_t at = name.find(kind.mark);
    if (at == absl::string_view::npos) continue;
    parsed.module = std::string(name.substr(0, at));
    parsed.part = Part::kUnsupported;
    parsed.unsupported = kind.kind;
    return parsed;
  }
  const Suffix* longest = nullptr;
  for (const Suffix& suffix : kSuffixes) {
    if (absl::EndsWith(name, suffix.text) && (longest == nullptr || suffix.text.size() > longest->text.size())) longest = &suffix;
  }
  if (longest == nullptr) return std::nullopt;
  parsed.part = longest->part;
  parsed.default_infix = longest->default_infix;
  parsed.module = std::string(absl::StripSuffix(name, longest->text));
  return parsed;
}

ModuleNames::ModuleNames(const Geometry& geometry) : sites_(Sites(geometry)), blocks_(geometry.blocks) {
  const int64_t inner = geometry.inner();
  for (size_t i = 0; i < sites_.size(); ++i) {
    const Site& site = sites_[i];
    const Target whole{.site = static_cast<int>(i), .rows = {0, site.out}};
    const auto part = [&](int64_t index, bool diffusers) {
      return Target{.site = whole.site, .rows = {index * inner, inner}, .diffusers = diffusers};
    };
    Target diffusers = whole;
    diffusers.diffusers = true;
    Target swapped = diffusers;
    swapped.row_map = RowMap::kSwapHalves;
    Add(site.name, whole);

    // A block's modules are met with diffusers' leaves under either block prefix.
    std::vector<std::string> stems;
    const absl::string_view name = site.name;
    for (const auto& [prefix, other] : {std::pair("blocks.", "transformer_blocks."),
                                        std::pair("token_refiner.blocks.", "token_refiner.refiner_blocks.")}) {
      absl::string_view rest = name;
      if (!absl::ConsumePrefix(&rest, prefix)) continue;
      const std::string number(rest.substr(0, rest.find('.')));
      stems = {absl::StrCat(prefix, number), absl::StrCat(other, number)};
    }
    for (const std::string& stem : stems) {
      switch (site.kind) {
        case SiteKind::kQkv: {
          Add(stem + ".attn.qkv_proj", whole);
          int64_t index = 0;
          for (const char* leaf : {"q", "k", "v"}) {
            Add(absl::StrCat(stem, ".attn.to_", leaf), part(index, true));
            Add(absl::StrCat(stem, ".attn.", leaf, "_proj"), part(index, false));
            ++index;
          }
          Add(stem + ".attn.to_qkv", diffusers);
          break;
        }
        case SiteKind::kAttnOut:
          Add(stem + ".attn.out_proj", whole);
          Add(stem + ".attn.to_out.0", diffusers);
          break;
        case SiteKind::kFc1:
          Add(stem + ".mlp.fc1", whole);
          Add(stem + ".ff.net.0.proj", swapped);
          break;
        case SiteKind::kFc2:
          Add(stem + ".mlp.fc2", whole);
          Add(stem + ".ff.net.2", diffusers);
          break;
        default: Add(stem + ".adaln_proj.linear", whole); break;
      }
    }
    switch (site.kind) {
      case SiteKind::kVideoPatch: Add("proj_in", diffusers); break;
      case SiteKind::kAudioPatch: Add("audio_proj_in", diffusers); break;
      case SiteKind::kCondition: Add("context_embedder", diffusers); break;
      case SiteKind::kTimeIn: Add("time_embedder.linear_1", diffusers); break;
      case SiteKind::kTimeOut: Add("time_embedder.linear_2", diffusers); break;
      case SiteKind::kFinalAdaln: Add("norm_out.linear", diffusers); break;
      case SiteKind::kVideoOut: Add("proj_out", diffusers); break;
      case SiteKind::kAudioOut: Add("audio_proj_out", diffusers); break;
      default: break;
    }
  }
  for (const TensorShape& tensor : ExpectedTensors(geometry)) {
    if (tensor.shape.size() != 1 || !absl::StrContains(tensor.name, "norm")) continue;
    const std::string module(absl::StripSuffix(tensor.name, ".weight"));
    const Target target{.rows = {0, tensor.shape[0]}, .norm = tensor.name};
    Add(module, target);
    std::string other = absl::StrReplaceAll(
        module, {{"attn.q_norm", "attn.norm_q"}, {"attn.k_norm", "attn.norm_k"}, {"final_layer.norm", "norm_out.norm"}});
    if (absl::StartsWith(other, "blocks.")) other = "transformer_" + other;
    other = absl::StrReplaceAll(other, {{"token_refiner.blocks.", "token_refiner.refiner_blocks."}});
    Add(other, target);
  }
}

void ModuleNames::Add(const std::string& name, Target target) {
  flattened_.try_emplace(Flatten(name), target);
  dotted_.try_emplace(name, std::move(target));
}

const Target* ModuleNames::Find(const ParsedName& name) const {
  const auto& names = name.naming == Naming::kFlattened ? flattened_ : dotted_;
  const auto found = names.find(name.module);
  return found == names.end() ? nullptr : &found->second;
}

}  // namespace h3
