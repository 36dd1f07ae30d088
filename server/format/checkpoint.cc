#include "server/format/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/base/confined_file.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/format/checkpoint_names.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr float kDefaultEps = 1e-5f;
constexpr double kRopeTheta = 10000.0;
constexpr int64_t kReleasedRopeFrequencies = 16;

absl::Status BadCheckpoint(absl::string_view reason, absl::string_view what, ErrorDetails details = {}) {
  return RefuseArgument(reason, absl::StrCat("checkpoint: ", what), std::move(details));
}

// The first few names and how many there are.
std::string Listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  const std::vector<std::string> shown(names.begin(), names.begin() + static_cast<int64_t>(std::min(kShown, names.size())));
  return absl::StrCat(absl::StrJoin(shown, ", "), names.size() > kShown ? absl::StrCat(", ... (", names.size(), " in all)") : "");
}

// A small JSON file beside the weights, or null where there is none. MALFORMED_FILE where it is not an object.
absl::StatusOr<Json> ReadJson(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return Json();
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return BadCheckpoint(reason::kMalformedFile, absl::StrCat(path.filename().string(), " is not a JSON object"));
  return json;
}

// The text under `key`, or `otherwise` where there is none: a stranger's file may hold anything there.
std::string TextIn(const Json& json, const char* key, const std::string& otherwise = "") {
  if (!json.is_object()) return otherwise;
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : otherwise;
}

struct RawTensor {
  int file = 0;
  TensorInfo info;
};

struct RawFiles {
  Container container = Container::kSingleFile;
  std::vector<std::string> files;
  std::map<std::string, RawTensor> tensors;  // By stored name.
  Json config;
};

absl::Status AddFile(const fs::path& path, RawFiles& raw) {
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(path.string());
  if (!header.ok()) return WithDetail(header.status(), "file", path.filename().string());
  const int file = static_cast<int>(raw.files.size());
  raw.files.push_back(path.string());
  for (TensorInfo& info : header->tensors) {
    const std::string name = info.name;
    if (!raw.tensors.emplace(name, RawTensor{file, std::move(info)}).second) {
      return BadCheckpoint(reason::kBadTensor, absl::StrCat("tensor ", name, " is in two shards"), {{"tensor", name}});
    }
  }
  return absl::OkStatus();
}

// The shards of a directory: those of its index, or every safetensors file in it.
absl::StatusOr<std::vector<fs::path>> Shards(const fs::path& directory) {
  std::set<std::string> names;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (absl::EndsWith(name, ".safetensors.index.json")) {
      H3_ASSIGN_OR_RETURN(const Json index, ReadJson(entry.path()));
      const auto map = index.find("weight_map");
      if (map == index.end() || !map->is_object()) return BadCheckpoint(reason::kMalformedFile, absl::StrCat(name, " has no weight_map"));
      std::set<std::string> indexed;
      for (const auto& [tensor, file] : map->items()) {
        if (!file.is_string() || !CheckConfinedName(file.get<std::string>()).ok()) {
          return BadCheckpoint(reason::kMalformedFile, absl::StrCat(name, " names no plain file for ", tensor));
        }
        indexed.insert(file.get<std::string>());
      }
      names = std::move(indexed);
      break;
    }
    if (absl::EndsWith(name, ".safetensors")) names.insert(name);
  }
  if (names.empty()) return Refuse(absl::StatusCode::kNotFound, reason::kMalformedFile, "checkpoint: the directory holds no safetensors file");
  std::vector<fs::path> paths;
  for (const std::string& name : names) paths.push_back(directory / name);
  return paths;
}

absl::StatusOr<RawFiles> ReadHeaders(const std::string& path) {
  RawFiles raw;
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    if (!fs::exists(path, error)) return absl::NotFoundError("checkpoint: no such file or directory");
    H3_RETURN_IF_ERROR(AddFile(path, raw));
    return raw;
  }
  H3_ASSIGN_OR_RETURN(raw.config, ReadJson(fs::path(path) / "config.json"));
  H3_ASSIGN_OR_RETURN(const std::vector<fs::path> shards, Shards(path));
  if (raw.config.is_object() && raw.config.contains("_class_name") && !raw.config["_class_name"].is_string()) {
    return BadCheckpoint(reason::kMalformedFile, "config.json has a _class_name that is no text");
  }
  const std::string class_name = TextIn(raw.config, "_class_name");
  const bool diffusers = class_name == "MiniMaxH3Transformer3DModel" ||
                         (class_name.empty() && absl::StartsWith(shards.front().filename().string(), "diffusion_pytorch_model"));
  if (!class_name.empty() && !diffusers && class_name != "MiniMaxH3DiTModel") {
    return BadCheckpoint(reason::kUnsupportedBase, absl::StrCat("config.json is of a ", class_name, ", not of a MiniMax-H3 transformer"));
  }
  raw.container = diffusers ? Container::kDiffusersDirectory : Container::kReferenceDirectory;
  for (const fs::path& shard : shards) H3_RETURN_IF_ERROR(AddFile(shard, raw));
  return raw;
}

absl::StatusOr<std::string> ReadBytes(const std::string& path, const TensorInfo& info) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string bytes(static_cast<size_t>(info.bytes), '\0');
  if (file.get() < 0 || pread(file.get(), bytes.data(), bytes.size(), info.offset) != static_cast<ssize_t>(bytes.size())) {
    return BadCheckpoint(reason::kMalformedFile, absl::StrCat("cannot read tensor ", info.name));
  }
  return bytes;
}

// UNSUPPORTED_BASE with the format's name where layers are quantised.
absl::Status RefuseQuantised(const RawFiles& raw) {
  for (const auto& [name, tensor] : raw.tensors) {
    if (absl::EndsWith(name, ".comfy_quant")) {
      std::string format = "unknown";
      if (tensor.info.bytes < 4096) {
        H3_ASSIGN_OR_RETURN(const std::string text, ReadBytes(raw.files[static_cast<size_t>(tensor.file)], tensor.info));
        const Json json = Json::parse(text, nullptr, false);
        format = TextIn(json, "format", format);
      }
      return BadCheckpoint(reason::kUnsupportedBase,
                           absl::StrCat("layer ", absl::StripSuffix(name, ".comfy_quant"), " is quantised (", format,
                                        "); only float32, float16 and bfloat16 bases are served"),
                           {{"format", format}, {"tensor", name}});
    }
  }
  for (const auto& [name, tensor] : raw.tensors) {
    if (IsFloat(tensor.info.dtype)) continue;
    return BadCheckpoint(reason::kUnsupportedBase,
                         absl::StrCat("tensor ", name, " has type ", DTypeName(tensor.info.dtype), "; quantised bases are not served"),
                         {{"format", std::string(DTypeName(tensor.info.dtype))}, {"tensor", name}});
  }
  return absl::OkStatus();
}

// Stored tensors under their canonical names. Those outside the common prefix are not the transformer's.
absl::StatusOr<std::map<std::string, CheckpointTensor>> Canonicalise(const RawFiles& raw) {
  const bool diffusers = raw.container == Container::kDiffusersDirectory;
  const std::string anchor = diffusers ? "context_embedder.weight" : "condition_proj.weight";
  std::optional<std::string> prefix;
  for (const auto& [name, tensor] : raw.tensors) {
    if (name != anchor && !absl::EndsWith(name, "." + anchor)) continue;
    if (prefix.has_value()) return BadCheckpoint(reason::kBadTensor, absl::StrCat("two tensors end in ", anchor));
    prefix = name.substr(0, name.size() - anchor.size());
  }
  if (!prefix.has_value()) {
    return BadCheckpoint(reason::kBadTensor, absl::StrCat("no tensor ", anchor, ": this is no MiniMax-H3 transformer"), {{"tensor", anchor}});
  }
  std::map<std::string, CheckpointTensor> tensors;
  std::map<std::string, std::map<int, StoredRows>> pieces;  // Canonical name -> place -> rows.
  for (const auto& [stored, raw_tensor] : raw.tensors) {
    absl::string_view name = stored;
    if (!absl::ConsumePrefix(&name, *prefix)) continue;
    const int64_t rows = raw_tensor.info.shape.empty() ? 1 : raw_tensor.info.shape.front();
    for (const CanonicalPiece& piece : diffusers ? FromDiffusersName(name) : std::vector<CanonicalPiece>{{std::string(name), 0}}) {
      StoredRows part{raw_tensor.file, raw_tensor.info, 0, rows};
      if (piece.half.has_value()) {
        part.rows = rows / 2;
        part.row_begin = *piece.half * part.rows;
      }
      pieces[piece.name].emplace(piece.place, std::move(part));
    }
  }
  for (auto& [name, parts] : pieces) {
    CheckpointTensor tensor;
    for (auto& [place, part] : parts) {
      if (tensor.pieces.empty()) {
        tensor.dtype = part.tensor.dtype;
        tensor.shape = part.tensor.shape;
        if (!tensor.shape.empty()) tensor.shape.front() = 0;
      }
      if (part.tensor.dtype != tensor.dtype) {
        return BadCheckpoint(reason::kBadTensor, absl::StrCat("the parts of ", name, " have different types"), {{"tensor", name}});
      }
      if (!tensor.shape.empty()) tensor.shape.front() += part.rows;
      tensor.pieces.push_back(std::move(part));
    }
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

using Tensors = std::map<std::string, CheckpointTensor>;

int64_t Dim(const Tensors& tensors, const std::string& name, size_t axis) {
  const auto found = tensors.find(name);
  return found == tensors.end() || found->second.shape.size() <= axis ? 0 : found->second.shape[axis];
}

int64_t CountBlocks(const Tensors& tensors, const std::string& prefix) {
  int64_t count = 0;
  while (tensors.contains(absl::StrCat(prefix, count, ".attn.qkv_proj.weight"))) ++count;
  return count;
}

Geometry ReadGeometry(const Tensors& tensors) {
  Geometry g;
  g.hidden = Dim(tensors, "video_patch_proj.weight", 0);
  g.blocks = CountBlocks(tensors, "blocks.");
  g.refiner_blocks = CountBlocks(tensors, "token_refiner.blocks.");
  g.head_dim = Dim(tensors, "blocks.0.attn.q_norm.weight", 0);
  g.heads = g.head_dim == 0 ? 0 : Dim(tensors, "blocks.0.attn.qkv_proj.weight", 0) / 3 / g.head_dim;
  g.ffn = Dim(tensors, "blocks.0.mlp.fc1.weight", 0) / 2;
  g.video_channels = Dim(tensors, "video_patch_proj.weight", 1) / 4;
  g.audio_channels = Dim(tensors, "audio_patch_proj.weight", 1);
  g.text_width = Dim(tensors, "condition_proj.weight", 1);
  g.time_input = Dim(tensors, "time_embedder.proj_in.weight", 1);
  g.time_hidden = Dim(tensors, "time_embedder.proj_in.weight", 0);
  g.adaln_width = Dim(tensors, "blocks.0.adaln_proj.linear.weight", 1);
  g.curve_rows = Dim(tensors, "adaln_t_table", 0);
  return g;
}

absl::Status CheckTensors(const Tensors& tensors, const Geometry& geometry) {
  if (geometry.hidden == 0 || geometry.blocks == 0 || geometry.heads == 0 || geometry.ffn == 0 || geometry.adaln_width == 0) {
    return BadCheckpoint(reason::kBadTensor,
                         "video_patch_proj, blocks.0.attn.{qkv_proj, q_norm}, blocks.0.mlp.fc1 or blocks.0.adaln_proj.linear is missing");
  }
  std::vector<std::string> missing, wrong, unexpected;
  std::set<std::string> known;
  for (const TensorShape& expected : ExpectedTensors(geometry)) {
    known.insert(expected.name);
    const auto found = tensors.find(expected.name);
    if (found == tensors.end()) {
      missing.push_back(expected.name);
    } else if (found->second.shape != expected.shape) {
      wrong.push_back(absl::StrCat(expected.name, " [", absl::StrJoin(found->second.shape, ", "), "] instead of [",
                                   absl::StrJoin(expected.shape, ", "), "]"));
    }
  }
  for (const auto& [name, tensor] : tensors) {
    if (!known.contains(name) && name != "rope.inv_freq") unexpected.push_back(name);
  }
  if (!missing.empty()) return BadCheckpoint(reason::kBadTensor, absl::StrCat("missing: ", Listed(missing)), {{"tensor", missing.front()}});
  if (!wrong.empty()) return BadCheckpoint(reason::kShapeMismatch, absl::StrCat("shapes contradict each other: ", Listed(wrong)));
  if (!unexpected.empty()) {
    return BadCheckpoint(reason::kBadTensor, absl::StrCat("tensors that this model has no place for: ", Listed(unexpected)),
                         {{"tensor", unexpected.front()}});
  }
  return absl::OkStatus();
}

// config.json may say nothing that the tensors contradict.
absl::Status CheckConfig(const Json& config, const Geometry& g) {
  if (!config.is_object()) return absl::OkStatus();
  const std::vector<std::pair<const char*, int64_t>> facts = {
      {"hidden_size", g.hidden},          {"num_layers", g.blocks},
      {"token_refiner_num_layers", g.refiner_blocks}, {"num_refiner_layers", g.refiner_blocks},
      {"num_attention_heads", g.heads},   {"attention_head_dim", g.head_dim},
      {"ffn_hidden_size", g.ffn},         {"ffn_dim", g.ffn},
      {"latents_dim", g.video_channels},  {"in_channels", g.video_channels},
      {"audio_latents_dim", g.audio_channels}, {"audio_in_channels", g.audio_channels},
      {"text_dim", g.text_width}};
  for (const auto& [key, value] : facts) {
    const auto found = config.find(key);
    if (found == config.end()) continue;
    if (!found->is_number_integer() || found->get<int64_t>() != value) {
      return BadCheckpoint(reason::kShapeMismatch, absl::StrCat("config.json says ", key, " = ", found->dump(), ", the tensors say ", value),
                           {{"field", key}});
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<float> ReadEps(const Json& config) {
  float eps = kDefaultEps;
  if (!config.is_object()) return eps;
  std::set<double> values;
  for (const char* key : {"norm_eps", "qk_norm_eps", "final_norm_eps"}) {
    if (config.contains(key) && config[key].is_number()) values.insert(config[key].get<double>());
  }
  if (values.size() > 1) return BadCheckpoint(reason::kUnsupportedBase, "config.json has different eps for different norms");
  return values.empty() ? eps : static_cast<float>(*values.begin());
}

absl::StatusOr<std::vector<float>> ReadRope(const RawFiles& raw, Tensors& tensors, const Geometry& g) {
  std::vector<float> frequencies;
  if (const auto stored = tensors.find("rope.inv_freq"); stored != tensors.end()) {
    const StoredRows& piece = stored->second.pieces.front();
    if (piece.tensor.dtype != DType::kF32 || piece.tensor.shape.size() != 1) {
      return BadCheckpoint(reason::kBadTensor, "rope.inv_freq must be a float32 vector", {{"tensor", "rope.inv_freq"}});
    }
    H3_ASSIGN_OR_RETURN(const std::string bytes, ReadBytes(raw.files[static_cast<size_t>(piece.file)], piece.tensor));
    frequencies.resize(bytes.size() / sizeof(float));
    std::memcpy(frequencies.data(), bytes.data(), bytes.size());
    tensors.erase(stored);
  } else {
    int64_t count = kReleasedRopeFrequencies;
    double theta = kRopeTheta;
    if (raw.config.is_object()) {
      if (raw.config.contains("rope_freq_dim") && raw.config["rope_freq_dim"].is_number_integer()) count = raw.config["rope_freq_dim"].get<int64_t>();
      if (raw.config.contains("rope_theta") && raw.config["rope_theta"].is_number()) theta = raw.config["rope_theta"].get<double>();
    }
    for (int64_t i = 0; i < count && i < g.head_dim; ++i) {
      const float exponent = static_cast<float>(2 * i) / static_cast<float>(2 * count);
      frequencies.push_back(1.0f / std::pow(static_cast<float>(theta), exponent));
    }
  }
  const auto count = static_cast<int64_t>(frequencies.size());
  if (count == 0 || 6 * count > g.head_dim) {
    return BadCheckpoint(reason::kShapeMismatch, absl::StrCat(count, " rotary frequencies turn 6 x ", count, " channels, a head has ", g.head_dim));
  }
  for (const float f : frequencies) {
    if (!std::isfinite(f)) return BadCheckpoint(reason::kNotFinite, "rope.inv_freq is not finite", {{"tensor", "rope.inv_freq"}});
  }
  return frequencies;
}

// What the files say: model_index.json of the official repository, then the folder's name.
Partition DeclaredPartition(const fs::path& path) {
  const fs::path directory = fs::is_directory(path) ? path : path.parent_path();
  for (const fs::path& place : {directory, directory.parent_path()}) {
    const absl::StatusOr<Json> index = ReadJson(place / "model_index.json");
    if (!index.ok() || !index->is_object() || !index->contains("_minimax_h3")) continue;
    const std::string partition = TextIn((*index)["_minimax_h3"], "partition");
    if (absl::EqualsIgnoreCase(partition, "fl2va")) return Partition::kFl2va;
    if (absl::EqualsIgnoreCase(partition, "ref2va")) return Partition::kRef2va;
  }
  if (directory.filename() == "transformer_ref") return Partition::kRef2va;
  if (directory.filename() == "transformer" && fs::exists(directory.parent_path() / "transformer_ref")) return Partition::kFl2va;
  return Partition::kUnknown;
}

}  // namespace

absl::string_view ContainerName(Container container) {
  switch (container) {
    case Container::kSingleFile: return "single file";
    case Container::kReferenceDirectory: return "reference directory";
    case Container::kDiffusersDirectory: return "diffusers directory";
  }
  return "unknown";
}

absl::string_view QkvLayoutName(QkvLayout layout) {
  switch (layout) {
    case QkvLayout::kAuto: return "auto";
    case QkvLayout::kStacked: return "stacked";
    case QkvLayout::kInterleaved: return "interleaved";
  }
  return "unknown";
}

absl::string_view PartitionName(Partition partition) {
  switch (partition) {
    case Partition::kUnknown: return "unknown";
    case Partition::kFl2va: return "fl2va";
    case Partition::kRef2va: return "ref2va";
  }
  return "unknown";
}

int64_t Checkpoint::TotalBytes() const {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    int64_t elements = 1;
    for (const int64_t size : tensor.shape) elements *= size;
    bytes += elements * DTypeBytes(tensor.dtype);
  }
  return bytes;
}

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& path, const CheckpointOptions& options) {
  H3_ASSIGN_OR_RETURN(const RawFiles raw, ReadHeaders(path));
  H3_RETURN_IF_ERROR(RefuseQuantised(raw));
  Checkpoint checkpoint;
  fs::path plain = fs::path(path).lexically_normal();
  if (!plain.has_filename()) plain = plain.parent_path();
  checkpoint.name = plain.filename().string();
  checkpoint.container = raw.container;
  checkpoint.files = raw.files;
  H3_ASSIGN_OR_RETURN(checkpoint.tensors, Canonicalise(raw));
  checkpoint.geometry = ReadGeometry(checkpoint.tensors);
  H3_RETURN_IF_ERROR(CheckTensors(checkpoint.tensors, checkpoint.geometry));
  H3_RETURN_IF_ERROR(CheckConfig(raw.config, checkpoint.geometry));
  H3_ASSIGN_OR_RETURN(checkpoint.eps, ReadEps(raw.config));
  H3_ASSIGN_OR_RETURN(checkpoint.rope_inv_freq, ReadRope(raw, checkpoint.tensors, checkpoint.geometry));
  checkpoint.geometry.rope_frequencies = static_cast<int64_t>(checkpoint.rope_inv_freq.size());
  checkpoint.qkv_layout = options.qkv_layout;
  if (checkpoint.qkv_layout == QkvLayout::kAuto) {
    checkpoint.qkv_layout = raw.container == Container::kReferenceDirectory ? QkvLayout::kInterleaved : QkvLayout::kStacked;
  } else if (raw.container == Container::kDiffusersDirectory && checkpoint.qkv_layout == QkvLayout::kInterleaved) {
    return BadCheckpoint(reason::kBadRequest, "a diffusers directory stores q, k and v apart; it has no interleaved layout");
  }
  checkpoint.partition = options.partition != Partition::kUnknown ? options.partition : DeclaredPartition(plain);
  return checkpoint;
}

}  // namespace h3
