#include "server/base/bytes.h"

#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/error.h"

namespace h3 {

absl::StatusOr<ByteCount> ParseBytes(absl::string_view text) {
  const std::map<absl::string_view, int64_t> units = {{"KiB", int64_t{1} << 10}, {"MiB", int64_t{1} << 20}, {"GiB", int64_t{1} << 30}, {"TiB", int64_t{1} << 40}};
  absl::string_view digits = text;
  double factor = 1;
  for (const auto& [unit, bytes] : units) {
    if (absl::ConsumeSuffix(&digits, unit)) factor = static_cast<double>(bytes);
  }
  double value = 0;
  if (!absl::SimpleAtod(digits, &value) || !(value > 0) || value * factor > 1e18) {
    return RefuseArgument(reason::kBadRequest, absl::StrCat("\"", text, "\" is not a number of bytes such as 80GiB"));
  }
  return ByteCount(static_cast<int64_t>(value * factor));
}

}  // namespace h3
