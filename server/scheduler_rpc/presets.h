// Named stacks, kept in the scheduler's state.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "h3/v1/presets.pb.h"
#include "server/registry/state_store.h"

namespace h3 {

// INVALID_ARGUMENT / BAD_REQUEST unless it is 1 to 128 letters, digits, and . _ -
absl::Status CheckPresetName(const std::string& name);

// On the file thread. NOT_FOUND / UNKNOWN_PRESET.
absl::StatusOr<v1::Preset> FindPreset(StateStore& state, const std::string& name);
// By name.
absl::StatusOr<v1::ListPresetsResponse> ListPresets(StateStore& state);
// INVALID_ARGUMENT / BAD_REQUEST where all presets together become too large to be listed.
absl::Status KeepPreset(StateStore& state, const v1::Preset& preset);
// NOT_FOUND / UNKNOWN_PRESET.
absl::Status RemovePreset(StateStore& state, const std::string& name);

}  // namespace h3
