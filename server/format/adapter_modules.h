// First half of the intake: the tensors of an adapter file, grouped by the module of the model that they address. Names only;
// what the tensors are worth is judged in adapter.cc.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/error.h"
#include "server/format/adapter_names.h"
#include "server/format/checkpoint.h"
#include "server/format/safetensors.h"

namespace h3 {

// The parts of one module, as one spelling of its name gives them.
struct AdapterModule {
  std::string name;  // As the file spells it, without prefix.
  const Target* target = nullptr;
  std::map<Part, TensorInfo> parts;  // Matrices as two dimensions: see GroupByModule.

  const TensorInfo* Find(Part part) const {
    const auto found = parts.find(part);
    return found == parts.end() ? nullptr : &found->second;
  }
};

// Points into the header and the names that it was made from.
struct AdapterModules {
  std::vector<AdapterModule> modules;
  const TensorInfo* table = nullptr;  // adaln_t_table
  std::string section = "transformer";  // The component whose metadata count: "transformer" or "transformer_ref".
  Partition partition = Partition::kUnknown;  // Declared.
  std::string format;  // As AdapterManifest's.
  bool interleaved_qkv = false;  // The producer writes fused qkv rows per head.
  std::vector<std::string> ignored_sections;
  std::vector<std::string> warnings;
};

// Tools that treat linear layers as 1x1 convolutions write [r, in, 1, 1]: trailing ones beyond two dimensions are dropped here.
// `base`: the base's partition; `declared`: in place of what the file declares, unless unknown.
// INVALID_ARGUMENT with NO_ADAPTER_TENSORS, UNKNOWN_MODULE, AMBIGUOUS_NAMES, UNSUPPORTED_ADAPTER_TYPE; FAILED_PRECONDITION /
// BASE_MISMATCH.
absl::StatusOr<AdapterModules> GroupByModule(const SafetensorsHeader& header, const ModuleNames& names, bool pruned_base,
                                             Partition base, Partition declared);

// INVALID_ARGUMENT with the tensor in message and details.
absl::Status BadAdapterTensor(absl::string_view reason, const TensorInfo& tensor, absl::string_view what, ErrorDetails details = {});

}  // namespace h3
