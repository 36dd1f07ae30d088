// The one table of spellings: how trainers name H3's modules and the parts of an adapter. A new spelling is a line in here.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "server/format/adapter.h"
#include "server/format/geometry.h"

namespace h3 {

// What a tensor of an adapter file is to its module.
enum class Part {
  kA,           // lora_A, lora_down
  kB,           // lora_B, lora_up
  kAlpha,
  kMagnitude,   // dora_scale, lora_magnitude_vector
  kLokrW1, kLokrW1A, kLokrW1B, kLokrW2, kLokrW2A, kLokrW2B,
  kOffset,      // diff_b
  kDifference,  // diff: only on 1-D norm weights
  kWeight,      // A whole weight or bias: only of a complete adapter's AdaLN projections.
  kBias,
  kTable,       // adaln_t_table
  kUnsupported, // A kind of adapter that cannot be applied; ParsedName::unsupported names it.
};

enum class Naming { kDotted, kFlattened };

struct ParsedName {
  std::string section;      // "transformer", "transformer_ref", "" ...
  std::string module;       // Without prefix and suffix.
  Part part = Part::kA;
  Naming naming = Naming::kDotted;
  absl::string_view unsupported;   // "LoHa", "OFT", ...
  bool peft_prefix = false;        // base_model.model.
  bool lycoris_prefix = false;
  bool default_infix = false;      // .default.
};

// nullopt: no part of an adapter by its name.
std::optional<ParsedName> ParseTensorName(absl::string_view name);

// Where a module name leads.
struct Target {
  int site = -1;                          // Index into Sites(geometry); -1: a norm weight.
  RowRange rows;
  RowMap row_map = RowMap::kIdentity;
  bool diffusers = false;                 // Spelled as diffusers spells it.
  std::string norm;                       // Canonical tensor name of a norm weight.
};

// Every name under which a trainer may address a module of this geometry. Names are matched whole: the flattened ones hold
// underscores of their own.
class ModuleNames {
 public:
  explicit ModuleNames(const Geometry& geometry);

  const std::vector<Site>& sites() const { return sites_; }
  int64_t blocks() const { return blocks_; }
  // Null when nothing has that name.
  const Target* Find(const ParsedName& name) const;

 private:
  void Add(const std::string& name, Target target);

  const std::vector<Site> sites_;
  const int64_t blocks_;
  absl::flat_hash_map<std::string, Target> dotted_;
  absl::flat_hash_map<std::string, Target> flattened_;
};

}  // namespace h3
