#include "server/scheduler_rpc/presets.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/base/text.h"

namespace h3 {
namespace {

constexpr absl::string_view kKind = "preset";  // name -> h3.v1.Preset
constexpr size_t kMaxName = 128;
// A list of all of them must fit one message of 4 MiB, which is what clients take by default.
constexpr size_t kMaxPresetBytes = 3 << 20;

absl::StatusOr<v1::Preset> Parse(const std::string& bytes) {
  v1::Preset preset;
  if (preset.ParseFromString(bytes)) return preset;
  return absl::InternalError("the state database holds a preset that is none");
}

}  // namespace

absl::Status CheckPresetName(const std::string& name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
  if (plain && !name.empty() && name.size() <= kMaxName) return absl::OkStatus();
  return RefuseArgument(reason::kBadRequest, "a preset's name has 1 to 128 letters, digits, and . _ -", {{"field", "name"}});
}

absl::StatusOr<v1::Preset> FindPreset(StateStore& state, const std::string& name) {
  H3_ASSIGN_OR_RETURN(const std::optional<std::string> bytes, state.Get(kKind, name));
  if (bytes.has_value()) return Parse(*bytes);
  return Refuse(absl::StatusCode::kNotFound, reason::kUnknownPreset,
                absl::StrCat("no preset ", CleanText(name, kMaxName), "; `h3ctl presets list` shows what there is"),
                {{"preset", CleanText(name, kMaxName)}});
}

absl::StatusOr<v1::ListPresetsResponse> ListPresets(StateStore& state) {
  v1::ListPresetsResponse list;
  H3_ASSIGN_OR_RETURN(const auto records, state.List(kKind));
  for (const auto& [name, bytes] : records) {
    H3_ASSIGN_OR_RETURN(*list.add_presets(), Parse(bytes));
  }
  return list;
}

absl::Status KeepPreset(StateStore& state, const v1::Preset& preset) {
  H3_ASSIGN_OR_RETURN(v1::ListPresetsResponse all, ListPresets(state));
  *all.add_presets() = preset;
  if (all.ByteSizeLong() > kMaxPresetBytes) {
    return RefuseArgument(reason::kBadRequest,
                          absl::StrCat("all presets together would take ", all.ByteSizeLong(), " bytes, at most ", kMaxPresetBytes,
                                       " are kept; remove some, or make this one smaller"),
                          {{"field", "stack"}});
  }
  return state.Put(kKind, preset.name(), preset.SerializeAsString());
}

absl::Status RemovePreset(StateStore& state, const std::string& name) {
  H3_RETURN_IF_ERROR(FindPreset(state, name).status());
  return state.Remove(kKind, name);
}

}  // namespace h3
