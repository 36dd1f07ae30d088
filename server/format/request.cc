#include "server/format/request.h"

#include <cmath>

#include "absl/strings/str_cat.h"
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

}  // namespace h3
