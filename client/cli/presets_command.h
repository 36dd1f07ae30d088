// `h3ctl presets list | set | get | remove`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/context.h"
#include "h3/v1/presets.pb.h"

namespace h3::ctl {

struct PresetSetFlags {
  std::string name;
  std::vector<std::string> lora;              // SPECs, in stack order.
  std::optional<uint64_t> expected_revision;  // That is to be replaced; 0: none may exist.
};

absl::Status RunPresetsList(Context& context);
// USAGE: a SPEC that does not parse.
absl::Status RunPresetsSet(const PresetSetFlags& flags, Context& context);
absl::Status RunPresetsGet(const std::string& name, Context& context);
absl::Status RunPresetsRemove(const std::string& name, Context& context);

// "--lora SPEC  sha256:..." for each adapter, ready to be pasted; below, what to do about adapters that have changed.
std::string PresetText(const v1::Preset& preset);

}  // namespace h3::ctl
