// How the diffusers container names and cuts the canonical tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace h3 {

// A stored tensor's part in a canonical one.
struct CanonicalPiece {
  std::string name;         // Canonical.
  int place = 0;            // Pieces of one canonical tensor stand in this order.
  std::optional<int> half;  // Only this half of the stored rows.
};

// "transformer_blocks.3.attn.to_k.weight" -> {blocks.3.attn.qkv_proj.weight, place 1}. `ff.net.0.proj` holds [up; gate] and gives
// two pieces of mlp.fc1 [gate; up]. A name that is not known comes back as it is.
std::vector<CanonicalPiece> FromDiffusersName(absl::string_view name);

}  // namespace h3
