#include "server/format/adapter_modules.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

struct Named {
  const TensorInfo* tensor;
  ParsedName name;
};

// Where a trainer's metadata say in words which partition the adapter is for.
Partition PartitionInMetadata(const std::map<std::string, std::string>& metadata) {
  bool fl2va = false, ref2va = false;
  for (const auto& [key, value] : metadata) {
    const std::string name = absl::AsciiStrToLower(key), text = absl::AsciiStrToLower(value);
    if (!absl::StrContains(name, "partition") && !absl::StrContains(name, "base_model") && !absl::StrContains(name, "architecture")) continue;
    fl2va |= absl::StrContains(text, "fl2va");
    ref2va |= absl::StrContains(text, "ref2va");
  }
  return fl2va == ref2va ? Partition::kUnknown : fl2va ? Partition::kFl2va : Partition::kRef2va;
}

// Tensor names -> parts of modules; the kinds that cannot be applied are refused here.
absl::StatusOr<std::vector<Named>> ParseNames(const SafetensorsHeader& header) {
  std::vector<Named> all;
  const TensorInfo* stranger = nullptr;
  int64_t strangers = 0;
  for (const TensorInfo& tensor : header.tensors) {
    std::optional<ParsedName> name = ParseTensorName(tensor.name);
    if (!name.has_value()) {
      if (strangers++ == 0) stranger = &tensor;
      continue;
    }
    if (name->part == Part::kUnsupported) {
      return BadAdapterTensor(reason::kUnsupportedAdapterType, tensor,
                              absl::StrCat("adapters of the kind ", name->unsupported, " cannot be applied at run time"),
                              {{"type", std::string(name->unsupported)}});
    }
    all.push_back({&tensor, std::move(*name)});
  }
  const bool any = std::any_of(all.begin(), all.end(),
                               [](const Named& n) { return n.name.part != Part::kWeight && n.name.part != Part::kBias; });
  if (!any) {
    return RefuseArgument(reason::kNoAdapterTensors,
                          absl::StrCat("none of the file's ", header.tensors.size(), " tensors is part of an adapter",
                                       header.tensors.empty() ? "" : absl::StrCat(" (the first is ", header.tensors.front().name, ")")));
  }
  if (stranger != nullptr) {
    return BadAdapterTensor(reason::kUnknownModule, *stranger,
                            "is no known part of an adapter; nothing may be dropped, so the file is refused",
                            {{"count", absl::StrCat(strangers)}});
  }
  return all;
}

// A file may hold a section for each partition: this base's is taken, the other reported.
absl::Status ChoosePartition(const SafetensorsHeader& header, Partition base, Partition declared, std::vector<Named>& all,
                             AdapterModules& result) {
  const auto has = [&](absl::string_view section) {
    return std::any_of(all.begin(), all.end(), [&](const Named& n) { return n.name.section == section; });
  };
  const bool ref = has("transformer_ref"), plain = has("transformer") || has("");
  result.partition = PartitionInMetadata(header.metadata);
  if (ref && plain) {
    result.section = base == Partition::kRef2va ? "transformer_ref" : "transformer";
    const std::string other = result.section == "transformer" ? "transformer_ref" : "transformer";
    std::erase_if(all, [&](const Named& n) { return (n.name.section == "transformer_ref") != (result.section == "transformer_ref"); });
    result.ignored_sections.push_back(other);
    result.warnings.push_back(absl::StrCat("the file holds both partitions; ", result.section, " is taken, ", other, " ignored",
                                           base == Partition::kUnknown ? " (the base's partition is unknown)" : ""));
    result.partition = result.section == "transformer_ref" ? Partition::kRef2va : Partition::kFl2va;
  } else if (ref) {
    result.section = "transformer_ref";
    result.partition = Partition::kRef2va;
  }
  if (declared != Partition::kUnknown) result.partition = declared;
  if (result.partition == Partition::kUnknown || result.partition == base) return absl::OkStatus();
  if (base != Partition::kUnknown) {
    return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                  absl::StrCat("the adapter is for the ", PartitionName(result.partition), " partition, this base is ", PartitionName(base)),
                  {{"adapter_partition", std::string(PartitionName(result.partition))}, {"base_partition", std::string(PartitionName(base))}});
  }
  result.warnings.push_back(absl::StrCat("the adapter is for the ", PartitionName(result.partition), " partition; the base's is unknown"));
  return absl::OkStatus();
}

// The same bytes as a matrix: [r, in, 1, 1] is [r, in], while [out, 1] stays what it is.
TensorInfo AsMatrix(TensorInfo tensor) {
  while (tensor.shape.size() > 2 && tensor.shape.back() == 1) tensor.shape.pop_back();
  return tensor;
}

void NameFormat(const std::vector<Named>& all, const ModuleNames& names, AdapterModules& result) {
  bool peft = false, lycoris = false, flat = false, diffusers = false;
  for (const Named& n : all) {
    const Target* target = names.Find(n.name);
    peft |= n.name.peft_prefix;
    lycoris |= n.name.lycoris_prefix;
    flat |= n.name.naming == Naming::kFlattened;
    diffusers |= target != nullptr && target->diffusers;
    // DiffSynth writes peft's infix over the reference names, and its qkv rows are per head.
    result.interleaved_qkv |= n.name.default_infix && !n.name.peft_prefix && n.name.section.empty() && target != nullptr && !target->diffusers;
  }
  result.format = lycoris                  ? "lycoris"
                  : peft                   ? "peft"
                  : diffusers              ? "diffusers"
                  : flat                   ? "kohya"
                  : result.interleaved_qkv ? "diffsynth"
                                           : "reference";
}

}  // namespace

absl::Status BadAdapterTensor(absl::string_view reason, const TensorInfo& tensor, absl::string_view what, ErrorDetails details) {
  details["tensor"] = tensor.name;
  return RefuseArgument(reason, absl::StrCat("tensor ", tensor.name, ": ", what), std::move(details));
}

absl::StatusOr<AdapterModules> GroupByModule(const SafetensorsHeader& header, const ModuleNames& names, bool pruned_base,
                                             Partition base, Partition declared) {
  AdapterModules result;
  H3_ASSIGN_OR_RETURN(std::vector<Named> all, ParseNames(header));
  H3_RETURN_IF_ERROR(ChoosePartition(header, base, declared, all, result));
  std::map<std::pair<Naming, std::string>, size_t> index;
  std::vector<std::string> unknown;
  for (const Named& named : all) {
    const ParsedName& name = named.name;
    if (name.part == Part::kTable) {
      if (result.table != nullptr) return BadAdapterTensor(reason::kAmbiguousNames, *named.tensor, "a second adaln_t_table");
      result.table = named.tensor;
      continue;
    }
    const Target* target = names.Find(name);
    if (target == nullptr) {
      if (pruned_base && absl::StrContains(name.module, "time_embedder")) {
        return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                      absl::StrCat("tensor ", named.tensor->name, ": a pruned base has no time embedder to adapt; use a full base"),
                      {{"tensor", named.tensor->name}});
      }
      unknown.push_back(named.tensor->name);
      continue;
    }
    const auto [found, fresh] = index.try_emplace({name.naming, name.module}, result.modules.size());
    if (fresh) result.modules.push_back({.name = name.module, .target = target});
    if (!result.modules[found->second].parts.emplace(name.part, AsMatrix(*named.tensor)).second) {
      return BadAdapterTensor(reason::kAmbiguousNames, *named.tensor, absl::StrCat("module ", name.module, " has this part twice"));
    }
  }
  if (!unknown.empty()) {
    const std::vector<std::string> shown(unknown.begin(), unknown.begin() + std::min<ptrdiff_t>(3, std::ssize(unknown)));
    return RefuseArgument(reason::kUnknownModule,
                          absl::StrCat(unknown.size(), " of ", header.tensors.size(), " tensors name no module of this model (",
                                       names.blocks(), " blocks): ", absl::StrJoin(shown, ", ")),
                          {{"tensor", unknown.front()}, {"count", absl::StrCat(unknown.size())}});
  }
  NameFormat(all, names, result);
  return result;
}

}  // namespace h3
