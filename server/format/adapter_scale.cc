#include "server/format/adapter_scale.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <re2/re2.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

using Json = nlohmann::json;

absl::Status BadScale(absl::string_view what, ErrorDetails details = {}) {
  return RefuseArgument(reason::kBadScale, what, std::move(details));
}

// Alphas are float32 in every trainer: what does not fit there is no alpha.
bool IsAlpha(double value) { return std::isfinite(value) && value >= 0 && value <= std::numeric_limits<float>::max(); }

absl::StatusOr<double> ParseAlpha(absl::string_view text, absl::string_view key) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !IsAlpha(value)) {
    return BadScale(absl::StrCat("metadata ", key, " = \"", text.substr(0, 32), "\" is not a finite number >= 0"),
                    {{"key", std::string(key)}});
  }
  return value;
}

// Two places may say the same thing, never different things.
absl::Status Agree(std::optional<double>& known, double value, absl::string_view what, absl::string_view key) {
  if (known.has_value() && *known != value) {
    return BadScale(absl::StrCat("the metadata contradict each other about ", what, ": ", *known, " and ", value, " (", key,
                                 "); give alpha= in the request"),
                    {{"key", std::string(key)}});
  }
  known = value;
  return absl::OkStatus();
}

// More than any model has modules that could have a pattern each, and longer than any module's name.
constexpr size_t kMaxPatterns = 1024, kMaxPatternBytes = 256;

// PEFT matches a pattern against the end of a module name. RE2 takes time linear in the name, whatever the pattern; a small memory
// limit bounds what compiling takes (counted repetitions can blow up a short pattern).
absl::StatusOr<std::shared_ptr<const RE2>> Compile(const std::string& pattern, size_t known) {
  if (known >= kMaxPatterns) return BadScale(absl::StrCat("more than ", kMaxPatterns, " patterns of alpha or rank"));
  RE2::Options options(RE2::Quiet);
  options.set_max_mem(int64_t{64} << 10);
  if (pattern.size() <= kMaxPatternBytes) {
    auto expression = std::make_shared<const RE2>(absl::StrCat("(.*\\.)?(", pattern, ")"), options);
    if (expression->ok()) return expression;
  }
  return BadScale(absl::StrCat("\"", pattern.substr(0, 32), "\" is no pattern of module names, or too large a one"));
}

template <typename T>
std::optional<T> FirstMatch(const std::vector<std::pair<std::shared_ptr<const RE2>, T>>& patterns, const std::string& module) {
  for (const auto& [expression, value] : patterns) {
    if (RE2::FullMatch(module, *expression)) return value;
  }
  return std::nullopt;
}

class Collector {
 public:
  explicit Collector(std::string section) : section_(std::move(section)) {}

  // One key of the metadata, of the JSON in lora_adapter_metadata, or of adapter_config.json.
  void Take(absl::string_view key, const Json& value, absl::string_view source) { Note(Parse(key, value, source)); }
  // The first problem counts.
  void Note(absl::Status problem) {
    if (result_.problem.ok()) result_.problem = std::move(problem);
  }

  DeclaredScale Finish() {
    result_.alpha = alpha_;
    if (rank_.has_value()) {
      if (*rank_ == std::floor(*rank_) && *rank_ >= 1 && *rank_ <= 1e6) {
        result_.rank = static_cast<int64_t>(*rank_);
      } else {
        Note(BadScale(absl::StrCat("a declared rank of ", *rank_, " is no rank")));
      }
    }
    return std::move(result_);
  }

 private:
  absl::Status Parse(absl::string_view key, const Json& value, absl::string_view source) {
    absl::string_view name = key;
    if (const size_t dot = name.rfind('.'); dot != absl::string_view::npos) {
      if (name.substr(0, dot) != section_) return absl::OkStatus();  // Another component's.
      name = name.substr(dot + 1);
    }
    const auto number = [&]() -> absl::StatusOr<double> {
      if (value.is_string()) return ParseAlpha(value.get<std::string>(), key);
      if (value.is_number() && IsAlpha(value.get<double>())) return value.get<double>();
      // What it is instead is not shown: it may be nested without end.
      return BadScale(absl::StrCat(key, " is not a finite number >= 0"), {{"key", std::string(key)}});
    };
    if (name == "alpha" || name == "lora_alpha" || name == "ss_network_alpha" || name == "network_alpha") {
      H3_ASSIGN_OR_RETURN(const double alpha, number());
      H3_RETURN_IF_ERROR(Agree(alpha_, alpha, "alpha", key));
      if (result_.source.empty()) result_.source = std::string(source);
    } else if (name == "r" || name == "rank" || name == "lora_rank" || name == "ss_network_dim") {
      H3_ASSIGN_OR_RETURN(const double rank, number());
      H3_RETURN_IF_ERROR(Agree(rank_, rank, "the rank", key));
    } else if (name == "use_rslora") {
      const std::string text = value.is_string() ? value.get<std::string>() : "";
      result_.root_rank |= value.is_boolean() ? value.get<bool>()
                                              : absl::EqualsIgnoreCase(text, "true") || absl::EqualsIgnoreCase(text, "yes") || text == "1";
    } else if (name == "alpha_pattern" && value.is_object()) {
      for (const auto& [pattern, alpha] : value.items()) {
        if (!alpha.is_number() || !IsAlpha(alpha.get<double>())) return BadScale(absl::StrCat("alpha_pattern of ", pattern, " is not a finite number >= 0"));
        H3_ASSIGN_OR_RETURN(auto expression, Compile(pattern, result_.alpha_pattern.size()));
        result_.alpha_pattern.emplace_back(std::move(expression), alpha.get<double>());
      }
    } else if (name == "rank_pattern" && value.is_object()) {
      for (const auto& [pattern, rank] : value.items()) {
        if (!rank.is_number_integer()) continue;
        H3_ASSIGN_OR_RETURN(auto expression, Compile(pattern, result_.rank_pattern.size()));
        result_.rank_pattern.emplace_back(std::move(expression), rank.get<int64_t>());
      }
    }
    return absl::OkStatus();
  }

  const std::string section_;
  DeclaredScale result_;
  std::optional<double> alpha_, rank_;
};

template <typename T>
double Load(const std::string& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return static_cast<double>(value);
}

double LoadHalf(const std::string& bytes, bool brain) {
  uint16_t bits;
  std::memcpy(&bits, bytes.data(), sizeof(bits));
  if (brain) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  const int exponent = bits >> 10 & 0x1f;
  const int mantissa = bits & 0x3ff;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25));
}

}  // namespace

std::optional<double> DeclaredScale::AlphaOf(const std::string& module) const {
  const std::optional<double> own = FirstMatch(alpha_pattern, module);
  return own.has_value() ? own : alpha;
}

std::optional<int64_t> DeclaredScale::RankOf(const std::string& module) const {
  const std::optional<int64_t> own = FirstMatch(rank_pattern, module);
  return own.has_value() ? own : rank;
}

DeclaredScale ReadDeclaredScale(const std::map<std::string, std::string>& metadata, const std::string& peft_config,
                                const std::string& section) {
  Collector collector(section);
  for (const auto& [key, value] : metadata) {
    if (key != "lora_adapter_metadata") {
      collector.Take(key, Json(value), absl::StrCat("metadata ", key));
      continue;
    }
    const Json json = Json::parse(value, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) {
      for (const auto& [inner, entry] : json.items()) collector.Take(inner, entry, "lora_adapter_metadata");
    } else {
      collector.Note(BadScale("metadata lora_adapter_metadata is not a JSON object", {{"key", key}}));
    }
  }
  if (!peft_config.empty()) {
    const Json json = Json::parse(peft_config, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) {
      for (const auto& [key, entry] : json.items()) collector.Take(key, entry, "adapter_config.json");
    } else {
      collector.Note(BadScale("adapter_config.json is not a JSON object"));
    }
  }
  return collector.Finish();
}

absl::StatusOr<double> ReadAlphaTensor(const TensorInfo& info, const TensorReader& read) {
  if (std::any_of(info.shape.begin(), info.shape.end(), [](int64_t size) { return size != 1; })) {
    return BadScale(absl::StrCat("alpha ", info.name, " is not one number"), {{"tensor", info.name}});
  }
  H3_ASSIGN_OR_RETURN(const std::string bytes, read(info));
  if (static_cast<int64_t>(bytes.size()) != info.bytes) return BadScale(absl::StrCat("alpha ", info.name, " cannot be read"), {{"tensor", info.name}});
  double value = std::nan("");
  switch (info.dtype) {
    case DType::kF64: value = Load<double>(bytes); break;
    case DType::kF32: value = Load<float>(bytes); break;
    case DType::kF16: value = LoadHalf(bytes, false); break;
    case DType::kBF16: value = LoadHalf(bytes, true); break;
    case DType::kI64: value = Load<int64_t>(bytes); break;
    case DType::kI32: value = Load<int32_t>(bytes); break;
    case DType::kI16: value = Load<int16_t>(bytes); break;
    case DType::kI8: value = Load<int8_t>(bytes); break;
    case DType::kU64: value = Load<uint64_t>(bytes); break;
    case DType::kU32: value = Load<uint32_t>(bytes); break;
    case DType::kU16: value = Load<uint16_t>(bytes); break;
    case DType::kU8: value = Load<uint8_t>(bytes); break;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kBool: return BadScale(absl::StrCat("alpha ", info.name, " has type ", DTypeName(info.dtype)), {{"tensor", info.name}});
  }
  if (!IsAlpha(value)) {
    return BadScale(absl::StrCat("alpha ", info.name, " = ", value, " is not a finite number >= 0"), {{"tensor", info.name}});
  }
  return value;
}

}  // namespace h3
