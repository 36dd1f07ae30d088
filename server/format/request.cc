#include "server/format/request.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

absl::Status BadStrength(size_t index, absl::string_view adapter, absl::string_view what) {
  return RefuseArgument(reason::kBadStrength, absl::StrCat("stack[", index, "] (", adapter, "): ", what),
                        {{"field", absl::StrCat("stack[", index, "]")}, {"adapter", std::string(adapter)}});
}

absl::Status CheckFactor(size_t index, const StackEntry& entry, absl::string_view what, double value) {
  if (std::isfinite(value) && std::abs(value) <= kMaxStrength) return absl::OkStatus();
  return BadStrength(index, entry.adapter, absl::StrCat(what, " ", value, " is outside -", kMaxStrength, " .. ", kMaxStrength));
}

}  // namespace

absl::Status CheckStack(absl::Span<const StackEntry> stack, int64_t evaluations) {
  for (size_t i = 0; i < stack.size(); ++i) {
    const StackEntry& entry = stack[i];
    H3_RETURN_IF_ERROR(CheckFactor(i, entry, "strength", entry.strength));
    for (const double factor : {entry.video, entry.text, entry.audio}) {
      H3_RETURN_IF_ERROR(CheckFactor(i, entry, "modality factor", factor));
    }
    for (const double factor : entry.per_evaluation) H3_RETURN_IF_ERROR(CheckFactor(i, entry, "per-evaluation factor", factor));
    if (evaluations > 0 && !entry.per_evaluation.empty() && static_cast<int64_t>(entry.per_evaluation.size()) != evaluations) {
      return BadStrength(i, entry.adapter,
                         absl::StrCat(entry.per_evaluation.size(), " per-evaluation factors for ", evaluations,
                                      " evaluations; give one for each"));
    }
    if (entry.apply == Apply::kMaterialized &&
        (entry.video != entry.text || entry.text != entry.audio || !entry.per_evaluation.empty())) {
      return BadStrength(i, entry.adapter,
                         "a merged copy has one strength for every row and evaluation; use apply=bypass for factors by modality or evaluation");
    }
    if (entry.auto_strength.has_value()) {
      const auto [floor, ceiling] = *entry.auto_strength;
      if (!std::isfinite(floor) || !std::isfinite(ceiling) || floor < 0 || floor > ceiling) {
        return BadStrength(i, entry.adapter,
                           absl::StrCat("auto-strength bounds ", floor, ":", ceiling, " need 0 <= floor <= ceiling"));
      }
    }
    if (entry.alpha.has_value() && (!std::isfinite(*entry.alpha) || *entry.alpha < 0)) {
      return RefuseArgument(reason::kBadScale,
                            absl::StrCat("stack[", i, "] (", entry.adapter, "): alpha ", *entry.alpha,
                                         " is not a finite number >= 0"),
                            {{"field", absl::StrCat("stack[", i, "].alpha")}, {"adapter", entry.adapter}});
    }
  }
  return absl::OkStatus();
}

std::vector<RequestTensor> RequestTensorsOf(const Layout& layout, const Geometry& g, bool targets) {
  std::vector<RequestTensor> tensors = {{"text", {layout.text_tokens, g.text_width}}, {"text_token_tags", {layout.text_tokens}, true}};
  int64_t videos = 0, audios = 0;
  const auto video = [&](int64_t frames, int64_t height, int64_t width) {
    tensors.push_back({absl::StrCat("condition_video.", videos++), {1, g.video_channels, frames, height, width}});
  };
  for (size_t i = 0; i < layout.keyframes.size(); ++i) video(1, layout.latent_height, layout.latent_width);
  for (const Reference& r : layout.references) {
    if (r.audio_latents > 0) tensors.push_back({absl::StrCat("condition_audio.", audios++), {2 * r.audio_latents, g.audio_channels}});
    if (r.kind != ReferenceKind::kAudio) video(r.latent_frames, r.latent_height, r.latent_width);
  }
  if (targets) {
    tensors.push_back({"target_video", {1, g.video_channels, layout.latent_frames, layout.latent_height, layout.latent_width}});
    tensors.push_back({"target_audio_rows", {2 * layout.audio_latents, g.audio_channels}});
  }
  return tensors;
}

absl::Status CheckRequestTensors(absl::Span<const HostTensor> announced, absl::Span<const RequestTensor> expected) {
  const auto text = [](const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); };
  const auto bad = [](const std::string& name, absl::string_view what, ErrorDetails details = {}) {
    details["tensor"] = name;
    return RefuseArgument(reason::kBadTensor, absl::StrCat("tensor ", name, ": ", what), std::move(details));
  };
  std::set<std::string> known;
  for (const RequestTensor& wanted : expected) {
    known.insert(wanted.name);
    const auto found = std::find_if(announced.begin(), announced.end(), [&](const HostTensor& t) { return t.name == wanted.name; });
    if (found == announced.end()) return bad(wanted.name, absl::StrCat("missing; ", text(wanted.shape), " is needed"));
    if (found->shape != wanted.shape) {
      return bad(wanted.name, absl::StrCat("has shape ", text(found->shape), ", the layout and the model make it ", text(wanted.shape)),
                 {{"shape", text(found->shape)}, {"expected", text(wanted.shape)}});
    }
    if (wanted.integer ? found->dtype != DType::kI64 : !IsFloat(found->dtype)) {
      return bad(wanted.name, absl::StrCat("has type ", DTypeName(found->dtype), "; ", wanted.integer ? "I64" : "F32, BF16, F16 or F64", " is needed"));
    }
  }
  for (const HostTensor& tensor : announced) {
    if (!known.contains(tensor.name)) return bad(tensor.name, "this request has no use for it");
  }
  return absl::OkStatus();
}

}  // namespace h3
