// Where an adapter's scale comes from: alpha tensors, file metadata, a PEFT config, or the default; contradictions are refused.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/format/adapter.h"
#include "server/format/safetensors.h"

namespace re2 {
class RE2;
}

namespace h3 {

// alpha and rank as a file's metadata or its PEFT config declare them.
struct DeclaredScale {
  std::optional<double> alpha;
  std::optional<int64_t> rank;
  bool root_rank = false;                       // use_rslora
  // Expressions over module names, as PEFT matches them: the first that matches counts.
  std::vector<std::pair<std::shared_ptr<const re2::RE2>, double>> alpha_pattern;
  std::vector<std::pair<std::shared_ptr<const re2::RE2>, int64_t>> rank_pattern;
  std::string source;                           // "metadata alpha", "adapter_config.json", ...
  // BAD_SCALE: a value that is not a finite number >= 0, or two that contradict each other. It matters only where a module has no alpha
  // of its own: tools write "Dynamic" beside alpha tensors.
  absl::Status problem;

  std::optional<double> AlphaOf(const std::string& module) const;
  std::optional<int64_t> RankOf(const std::string& module) const;
};

// `section`: the component whose entries count ("transformer" or "transformer_ref").
DeclaredScale ReadDeclaredScale(const std::map<std::string, std::string>& metadata, const std::string& peft_config,
                                                const std::string& section);

// The value of an alpha tensor: shape [], [1], [1, 1], ..., any number type. BAD_SCALE otherwise, or where it is not a finite
// number >= 0.
absl::StatusOr<double> ReadAlphaTensor(const TensorInfo& info, const TensorReader& read);

}  // namespace h3
