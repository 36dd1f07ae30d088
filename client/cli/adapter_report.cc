#include "client/cli/adapter_report.h"

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"
#include "server/base/error.h"

namespace h3::ctl {
namespace {

std::string Size(uint64_t bytes) { return Human(ByteCount(static_cast<int64_t>(bytes))); }

// FAILED_PRECONDITION for names that are no code: the adapter is refused, whatever a newer server calls it.
absl::StatusCode CodeNamed(absl::string_view name) {
  for (int code = 1; code <= static_cast<int>(absl::StatusCode::kUnauthenticated); ++code) {
    if (absl::StatusCodeToString(static_cast<absl::StatusCode>(code)) == name) return static_cast<absl::StatusCode>(code);
  }
  return absl::StatusCode::kFailedPrecondition;
}

// "gate_first" as the flags spell it.
template <typename Enum>
std::string FlagWord(Enum value) {
  return absl::StrReplaceAll(Word(value), {{"_", "-"}});
}

}  // namespace

std::string VerdictText(const v1::Verdict& verdict) {
  if (verdict.loads()) return "would load";
  return absl::StrReplaceAll(absl::StrCat("would not load: ", verdict.reason(), " ", verdict.message()),
                             {{"\n", " "}, {"\r", " "}});
}

absl::Status VerdictStatus(const v1::Verdict& verdict) {
  if (verdict.loads()) return absl::OkStatus();
  return Refuse(CodeNamed(verdict.code()), verdict.reason(), verdict.message(),
                {verdict.details().begin(), verdict.details().end()});
}

std::string SettingsText(const v1::AdapterSettings& settings) {
  std::vector<std::string> parts;
  if (settings.has_alpha()) parts.push_back(absl::StrCat("alpha=", settings.alpha()));
  if (settings.qkv_layout() != v1::QKV_LAYOUT_UNSPECIFIED) {
    parts.push_back(absl::StrCat("qkv=", FlagWord(settings.qkv_layout())));
  }
  if (settings.fc1_order() != v1::FC1_ORDER_UNSPECIFIED) parts.push_back(absl::StrCat("fc1=", FlagWord(settings.fc1_order())));
  if (settings.partition() != v1::PARTITION_UNSPECIFIED) {
    parts.push_back(absl::StrCat("partition=", FlagWord(settings.partition())));
  }
  return absl::StrJoin(parts, " ");
}

std::string ScalesText(const google::protobuf::RepeatedPtrField<v1::EffectiveScale>& scales) {
  std::vector<std::vector<std::string>> rows = {{"MODULES", "KIND", "RANK", "ALPHA", "SCALE", "FROM"}};
  for (const v1::EffectiveScale& scale : scales) {
    rows.push_back({absl::StrCat(scale.modules()), scale.module_kind(), absl::StrCat(scale.rank()), absl::StrCat(scale.alpha()),
                    absl::StrCat(scale.scale()), scale.source()});
  }
  return Table(rows, {0, 2, 3, 4});
}

std::string ReportText(const v1::AdapterReport& report) {
  std::vector<std::vector<std::string>> rows;
  const auto row = [&rows](absl::string_view what, std::string value) {
    if (!value.empty()) rows.push_back({absl::StrCat("  ", what), std::move(value)});
  };
  row("name", report.name());
  row("format", absl::StrCat(report.format().empty() ? "not understood" : report.format(),
                             report.producer().empty() ? "" : absl::StrCat(", written by ", report.producer())));
  row("file", absl::StrCat(Size(report.file_bytes()), "  sha256:", report.digest()));
  if (report.modules() > 0) row("modules", absl::StrCat(report.modules()));
  if (report.bytes() > 0) row("on the device", Size(report.bytes()));
  if (report.arithmetic_percent() > 0) {
    row("arithmetic", absl::StrFormat("%.3g %% on top of the blocks' linear layers", report.arithmetic_percent()));
  }
  if (report.relative_strength() > 0) {
    row("strength", absl::StrFormat("at 1 it changes the weights by %.3g %%", 100 * report.relative_strength()));
  }
  for (const v1::KindStrength& kind : report.strengths()) {
    row("", absl::StrFormat("%.3g %% in %s (%d modules)", 100 * kind.relative_strength(), kind.module_kind(), kind.modules()));
  }
  if (report.partition() != v1::PARTITION_UNSPECIFIED) row("partition", Word(report.partition()));
  row("settings", SettingsText(report.settings()));
  // In the order of their keys.
  const std::map<std::string, std::string> hints(report.schedule_hints().begin(), report.schedule_hints().end());
  row("schedule", absl::StrJoin(hints, ", ", absl::PairFormatter("=")));
  row("checked", report.checked_by().empty() ? "by its header alone, not its values"
                                             : absl::StrCat("every value, by ", report.checked_by()));

  std::string text = absl::StrCat(VerdictText(report.verdict()), "\n", Table(rows));
  if (!report.scales().empty()) absl::StrAppend(&text, "\n", ScalesText(report.scales()));
  const auto list = [&text](absl::string_view what, const auto& names) {
    if (!names.empty()) absl::StrAppend(&text, what, ": ", absl::StrJoin(names, ", "), "\n");
  };
  list("left out", report.left_out());
  list("other sections of the file, not used", report.ignored_sections());
  for (const std::string& warning : report.warnings()) absl::StrAppend(&text, "warning: ", warning, "\n");
  return text;
}

}  // namespace h3::ctl
