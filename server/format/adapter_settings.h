// What is known about an adapter beside its file. Kept by digest, never part of the content's identity.
#pragma once

#include <optional>
#include <string>

#include "server/format/checkpoint.h"

namespace h3 {

struct AdapterSettings {
  std::optional<double> alpha;               // In place of every alpha that the file declares.
  QkvLayout qkv_layout = QkvLayout::kAuto;   // Of stored rows of a fused attn.qkv_proj; kAuto: as the producer writes it.
  std::optional<bool> fc1_gate_first;        // Of stored rows of mlp.fc1; absent: as the file says, or its naming implies.
  Partition partition = Partition::kUnknown; // In place of what the file declares.
  std::string peft_config;                   // The text of an adapter_config.json beside the file, or empty.

  auto operator<=>(const AdapterSettings&) const = default;
};

}  // namespace h3
