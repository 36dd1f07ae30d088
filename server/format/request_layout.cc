#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/format/layout.h"

namespace h3 {
namespace {

using Json = nlohmann::json;

absl::Status BadLayout(absl::string_view what) { return RefuseArgument(reason::kBadLayout, absl::StrCat("layout: ", what)); }

absl::StatusOr<int64_t> Count(const Json& object, const char* key, bool required) {
  const auto found = object.find(key);
  if (found == object.end()) {
    if (!required) return 0;
    return BadLayout(absl::StrCat(key, " is missing"));
  }
  if (!found->is_number_integer()) return BadLayout(absl::StrCat(key, " is not a whole number"));
  return found->get<int64_t>();
}

absl::Status ReadNumber(const Json& object, const char* key, std::optional<double>& into) {
  const auto found = object.find(key);
  if (found == object.end()) return absl::OkStatus();
  if (!found->is_number()) return BadLayout(absl::StrCat(key, " is not a number"));
  into = found->get<double>();
  return absl::OkStatus();
}

absl::StatusOr<Reference> ReadReference(const Json& json) {
  if (!json.is_object()) return BadLayout("a reference is not an object");
  const std::string kind = json.value("kind", Json()).is_string() ? json["kind"].get<std::string>() : "";
  Reference reference;
  if (kind == "image") {
    reference.kind = ReferenceKind::kImage;
  } else if (kind == "video") {
    reference.kind = ReferenceKind::kVideo;
  } else if (kind == "audio") {
    reference.kind = ReferenceKind::kAudio;
  } else {
    return BadLayout("a reference's kind is image, video or audio");
  }
  H3_ASSIGN_OR_RETURN(reference.latent_frames, Count(json, "latent_frames", false));
  H3_ASSIGN_OR_RETURN(reference.latent_height, Count(json, "latent_height", false));
  H3_ASSIGN_OR_RETURN(reference.latent_width, Count(json, "latent_width", false));
  H3_ASSIGN_OR_RETURN(reference.audio_latents, Count(json, "audio_latents", false));
  return reference;
}

}  // namespace

absl::StatusOr<RequestLayout> ParseRequestLayout(absl::string_view text) {
  constexpr size_t kMaxLayoutBytes = 1 << 20;
  if (text.size() > kMaxLayoutBytes) return BadLayout("longer than 1 MiB");
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return BadLayout("not a JSON object");
  RequestLayout request;
  Layout& layout = request.layout;
  if (const auto keyframes = json.find("keyframes"); keyframes != json.end()) {
    if (!keyframes->is_array()) return BadLayout("keyframes is not a list");
    for (const Json& keyframe : *keyframes) {
      if (keyframe == "first") {
        layout.keyframes.push_back(Keyframe::kFirst);
      } else if (keyframe == "last") {
        layout.keyframes.push_back(Keyframe::kLast);
      } else {
        return BadLayout("a keyframe is \"first\" or \"last\"");
      }
    }
  }
  if (const auto references = json.find("refs"); references != json.end()) {
    if (!references->is_array()) return BadLayout("refs is not a list");
    for (const Json& reference : *references) {
      H3_ASSIGN_OR_RETURN(const Reference read, ReadReference(reference));
      layout.references.push_back(read);
    }
  }
  H3_ASSIGN_OR_RETURN(layout.text_tokens, Count(json, "text_tokens", true));
  H3_ASSIGN_OR_RETURN(layout.latent_frames, Count(json, "latent_frames", true));
  H3_ASSIGN_OR_RETURN(layout.latent_height, Count(json, "latent_height", true));
  H3_ASSIGN_OR_RETURN(layout.latent_width, Count(json, "latent_width", true));
  H3_ASSIGN_OR_RETURN(layout.audio_latents, Count(json, "audio_latents", true));
  H3_RETURN_IF_ERROR(ReadNumber(json, "base_sigma", request.base_sigma));
  H3_RETURN_IF_ERROR(ReadNumber(json, "video_shift", request.video_shift));
  H3_RETURN_IF_ERROR(ReadNumber(json, "audio_shift", request.audio_shift));
  return request;
}

}  // namespace h3
