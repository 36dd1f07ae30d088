#include "client/cli/presets_command.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/cli/lora_spec.h"
#include "client/cli/proto_json.h"
#include "client/cli/words.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {

std::string UtcTime(double seconds) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::UnixEpoch() + absl::Seconds(seconds), absl::UTCTimeZone());
}

bool Changed(const v1::Preset& preset, const v1::StackEntry& entry) {
  return std::find(preset.changed().begin(), preset.changed().end(), entry.adapter()) != preset.changed().end();
}

std::string LoraOption(const v1::StackEntry& entry) { return absl::StrCat("--lora ", ShellWord(FormatLoraSpec(entry))); }

}  // namespace

absl::Status RunPresetsList(Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::ListPresetsResponse response, context.client.ListPresets(context.Snapshot()));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "REVISION", "SET", "STACK"}};
  for (const v1::Preset& preset : response.presets()) {
    const std::string stack = absl::StrJoin(preset.stack(), "  ", [&](std::string* out, const v1::StackEntry& entry) {
      absl::StrAppend(out, FormatLoraSpec(entry), Changed(preset, entry) ? " (changed)" : "");
    });
    rows.push_back({preset.name(), absl::StrCat(preset.revision()), UtcTime(preset.updated_seconds()), stack});
  }
  context.out << Table(rows, {1}) << std::flush;
  return absl::OkStatus();
}

absl::Status RunPresetsSet(const PresetSetFlags& flags, Context& context) {
  v1::SetPresetRequest request;
  request.set_name(flags.name);
  for (const std::string& spec : flags.lora) {
    H3_ASSIGN_OR_RETURN(*request.add_stack(), ParseLoraSpec(spec));
  }
  if (flags.expected_revision.has_value()) request.set_expected_revision(*flags.expected_revision);
  // No deadline: the adapters are read, and hashed where they are new.
  H3_ASSIGN_OR_RETURN(const v1::SetPresetResponse response, context.client.SetPreset(request, {.cancel = &context.interrupt}));
  context.out << (context.json ? ProtoJson(response) + "\n" : PresetText(response.preset())) << std::flush;
  return absl::OkStatus();
}

absl::Status RunPresetsGet(const std::string& name, Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::GetPresetResponse response, context.client.GetPreset(name, context.Snapshot()));
  context.out << (context.json ? ProtoJson(response) + "\n" : PresetText(response.preset())) << std::flush;
  return absl::OkStatus();
}

absl::Status RunPresetsRemove(const std::string& name, Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::RemovePresetResponse response, context.client.RemovePreset(name, context.Snapshot()));
  context.out << (context.json ? ProtoJson(response) : absl::StrCat("removed ", name)) << std::endl;
  return absl::OkStatus();
}

std::string PresetText(const v1::Preset& preset) {
  std::vector<std::vector<std::string>> rows;
  for (const v1::StackEntry& entry : preset.stack()) {
    rows.push_back({absl::StrCat("  ", LoraOption(entry)), absl::StrCat("sha256:", entry.digest()),
                    Changed(preset, entry) ? "CHANGED" : ""});
  }
  std::string text = absl::StrCat(preset.name(), "  revision ", preset.revision(), ", set ", UtcTime(preset.updated_seconds()),
                                  "\n", Table(rows));
  if (preset.changed().empty()) return text;
  absl::StrAppend(&text, "CHANGED: ", absl::StrJoin(preset.changed(), ", "),
                  " no longer is the file that the preset was set with, so requests with the preset are refused.\n"
                  "Put that file back, or take what the name leads to now:\n  h3ctl presets set ",
                  preset.name());
  for (const v1::StackEntry& entry : preset.stack()) absl::StrAppend(&text, " ", LoraOption(entry));
  absl::StrAppend(&text, " --expected-revision ", preset.revision(), "\n");
  return text;
}

}  // namespace h3::ctl
