#include "server/format/adapter_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/text.h"

namespace h3 {
namespace {

constexpr size_t kMaxText = 256;

bool InBlock(const Site& site) {
  const bool linear = site.kind == SiteKind::kQkv || site.kind == SiteKind::kAttnOut || site.kind == SiteKind::kFc1 || site.kind == SiteKind::kFc2;
  return linear && absl::StartsWith(site.name, "blocks.");
}

}  // namespace

std::string ProducerOf(const SafetensorsHeader& header) {
  for (const char* key : {"software", "producer", "trainer", "created_by", "tool", "modelspec.implementation"}) {
    const auto found = header.metadata.find(key);
    if (found == header.metadata.end() || found->second.empty()) continue;
    // Some write {"name": ..., "version": ...}.
    const auto json = nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return CleanText(found->second, kMaxText);
    std::string text = json["name"].get<std::string>();
    if (json.contains("version") && json["version"].is_string()) absl::StrAppend(&text, " ", json["version"].get<std::string>());
    return CleanText(text, kMaxText);
  }
  for (const auto& [key, value] : header.metadata) {
    if (absl::StartsWith(key, "ss_")) return "kohya sd-scripts or musubi-tuner (ss_ metadata)";
  }
  return "";
}

std::map<std::string, std::string> ScheduleHintsOf(const SafetensorsHeader& header) {
  std::map<std::string, std::string> hints;
  for (const auto& [key, value] : header.metadata) {
    const std::string name = absl::AsciiStrToLower(key);
    const bool speaks = absl::StrContains(name, "step") || absl::StrContains(name, "sigma") || absl::StrContains(name, "shift") ||
                        absl::StrContains(name, "sched") || absl::StrContains(name, "cfg") || absl::StrContains(name, "guidance") ||
                        absl::StrContains(name, "nfe");
    // How long it was trained says nothing about sampling.
    const bool training = absl::StartsWith(name, "ss_steps") || absl::StrContains(name, "train_steps") || absl::StrContains(name, "global_step") ||
                          absl::StrContains(name, "lr_scheduler") || absl::StrContains(name, "warmup") || absl::StrContains(name, "accumulation");
    if (speaks && !training) hints[CleanText(key, kMaxText)] = CleanText(value, kMaxText);
  }
  return hints;
}

double ArithmeticPercent(const AdapterManifest& manifest, const Geometry& geometry) {
  const std::vector<Site> sites = Sites(geometry);
  double base = 0, added = 0;
  for (const Site& site : sites) {
    if (InBlock(site)) base += static_cast<double>(site.out) * static_cast<double>(site.in);
  }
  for (const AdapterTerm& term : manifest.terms) {
    const Site& site = sites[static_cast<size_t>(term.site)];
    if (!InBlock(site)) continue;
    if (term.low_rank.has_value()) {
      added += static_cast<double>(term.rank) * static_cast<double>(site.in + term.rows.count);
    } else if (term.kronecker.has_value()) {
      const Kronecker& k = *term.kronecker;
      const auto side = [](const std::optional<TensorInfo>& whole, const std::optional<TensorInfo>& left, const std::optional<TensorInfo>& right) {
        return std::pair(whole.has_value() ? whole->shape[0] : left->shape[0], whole.has_value() ? whole->shape[1] : right->shape[1]);
      };
      const auto [o1, i1] = side(k.w1, k.w1_a, k.w1_b);
      const auto [o2, i2] = side(k.w2, k.w2_a, k.w2_b);
      added += static_cast<double>(i1) * static_cast<double>(o2) * static_cast<double>(i2 + o1);
    }
  }
  return base > 0 ? 100 * added / base : 0;
}

}  // namespace h3
