#include "client/cli/lora_spec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/exit_code.h"
#include "client/cli/words.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {

constexpr std::array<absl::string_view, 8> kOptions = {"video",         "text",  "audio",     "per-evaluation",
                                                       "auto-strength", "alpha", "leave-out", "apply"};

// Of AutoStrength: see types.proto.
constexpr double kDefaultFloor = 0.3, kDefaultCeiling = 1.5;

absl::Status BadSpec(absl::string_view spec, absl::string_view what) {
  return UsageError(absl::StrCat("--lora ", spec, ": ", what, "; expected ", kLoraSpecGrammar));
}

// Position of the comma before the first option, or npos.
size_t FirstOption(absl::string_view spec) {
  size_t first = absl::string_view::npos;
  for (const absl::string_view option : kOptions) first = std::min(first, spec.find(absl::StrCat(",", option, "=")));
  return first;
}

absl::StatusOr<double> Number(absl::string_view spec, absl::string_view what, absl::string_view text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value)) return BadSpec(spec, absl::StrCat(what, " '", text, "' is not a number"));
  return value;
}

absl::StatusOr<std::vector<double>> Numbers(absl::string_view spec, absl::string_view what, absl::string_view text) {
  std::vector<double> values;
  for (const absl::string_view part : absl::StrSplit(text, ':')) {
    H3_ASSIGN_OR_RETURN(values.emplace_back(), Number(spec, what, part));
  }
  return values;
}

// The fewest digits that read back as the same number.
std::string Shortest(double value) {
  std::array<char, 32> text;
  const std::to_chars_result end = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), end.ptr);
}

// "style=0.8,vidoe" is a mistyped option and not a name.
absl::Status CheckName(absl::string_view spec, absl::string_view name) {
  if (name.empty()) return BadSpec(spec, "the adapter's name is missing");
  const size_t comma = name.rfind(',');
  if (comma == absl::string_view::npos) return absl::OkStatus();
  const absl::string_view before = name.substr(0, comma);
  const size_t equals = before.rfind('=');
  double strength = 0;
  if (equals == absl::string_view::npos || !absl::SimpleAtod(before.substr(equals + 1), &strength)) return absl::OkStatus();
  return BadSpec(spec,
                 absl::StrCat("unknown option '", name.substr(comma + 1), "'; there are ", absl::StrJoin(kOptions, ", ")));
}

absl::Status SetOption(absl::string_view spec, absl::string_view key, absl::string_view value, v1::StackEntry& entry) {
  if (key == "per-evaluation") {
    H3_ASSIGN_OR_RETURN(const std::vector<double> factors, Numbers(spec, key, value));
    entry.mutable_per_evaluation()->Assign(factors.begin(), factors.end());
    return absl::OkStatus();
  }
  if (key == "auto-strength") {
    H3_ASSIGN_OR_RETURN(const std::vector<double> bounds, Numbers(spec, key, value));
    if (bounds.size() != 2) return BadSpec(spec, "auto-strength needs FLOOR:CEILING, for example 0.3:1.5");
    entry.mutable_auto_strength()->set_floor(bounds[0]);
    entry.mutable_auto_strength()->set_ceiling(bounds[1]);
    return absl::OkStatus();
  }
  if (key == "leave-out") {
    if (value != "adaln")
      return BadSpec(spec, absl::StrCat("leave-out '", value, "' is not known; only adaln can be left out"));
    entry.add_leave_out(std::string(value));
    return absl::OkStatus();
  }
  if (key == "apply") {
    if (value != "bypass" && value != "materialized") {
      return BadSpec(spec, absl::StrCat("apply '", value, "' is neither bypass nor materialized"));
    }
    entry.set_apply(value == "bypass" ? v1::APPLY_BYPASS : v1::APPLY_MATERIALIZED);
    return absl::OkStatus();
  }
  H3_ASSIGN_OR_RETURN(const double number, Number(spec, key, value));
  if (key == "alpha") {
    entry.set_alpha(number);
  } else if (key == "video") {
    entry.mutable_factors()->set_video(number);
  } else if (key == "text") {
    entry.mutable_factors()->set_text(number);
  } else if (key == "audio") {
    entry.mutable_factors()->set_audio(number);
  } else {
    return BadSpec(spec, absl::StrCat("unknown option '", key, "'; there are ", absl::StrJoin(kOptions, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::StackEntry> ParseLoraSpec(absl::string_view spec) {
  const size_t options = FirstOption(spec);
  const absl::string_view head = spec.substr(0, options);
  const size_t equals = head.rfind('=');
  if (equals == absl::string_view::npos) return BadSpec(spec, "=STRENGTH is missing");
  const absl::string_view name = head.substr(0, equals);
  H3_RETURN_IF_ERROR(CheckName(spec, name));
  v1::StackEntry entry;
  entry.set_adapter(std::string(name));
  H3_ASSIGN_OR_RETURN(const double strength, Number(spec, "strength", head.substr(equals + 1)));
  entry.set_strength(strength);
  if (options == absl::string_view::npos) return entry;

  std::set<absl::string_view> seen;
  for (const absl::string_view option : absl::StrSplit(spec.substr(options + 1), ',')) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(option, absl::MaxSplits('=', 1));
    if (!seen.insert(parts.first).second) return BadSpec(spec, absl::StrCat(parts.first, " is given twice"));
    H3_RETURN_IF_ERROR(SetOption(spec, parts.first, parts.second, entry));
  }
  return entry;
}

std::string FormatLoraSpec(const v1::StackEntry& entry) {
  std::string spec = absl::StrCat(entry.adapter(), "=", Shortest(entry.strength()));
  const auto add = [&spec](absl::string_view key, absl::string_view value) { absl::StrAppend(&spec, ",", key, "=", value); };
  const v1::ModalityFactors& factors = entry.factors();
  if (factors.has_video()) add("video", Shortest(factors.video()));
  if (factors.has_text()) add("text", Shortest(factors.text()));
  if (factors.has_audio()) add("audio", Shortest(factors.audio()));
  if (!entry.per_evaluation().empty()) {
    add("per-evaluation", absl::StrJoin(entry.per_evaluation(), ":",
                                        [](std::string* out, double factor) { absl::StrAppend(out, Shortest(factor)); }));
  }
  if (entry.has_auto_strength()) {
    const v1::AutoStrength& bounds = entry.auto_strength();
    add("auto-strength", absl::StrCat(Shortest(bounds.has_floor() ? bounds.floor() : kDefaultFloor), ":",
                                      Shortest(bounds.has_ceiling() ? bounds.ceiling() : kDefaultCeiling)));
  }
  if (entry.has_alpha()) add("alpha", Shortest(entry.alpha()));
  for (const std::string& part : entry.leave_out()) add("leave-out", part);
  if (entry.apply() != v1::APPLY_UNSPECIFIED) add("apply", Word(entry.apply()));
  return spec;
}

}  // namespace h3::ctl
