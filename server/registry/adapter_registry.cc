#include "server/registry/adapter_registry.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/confined_file.h"
#include "server/base/error.h"
#include "server/base/sha256.h"
#include "server/base/status_macros.h"
#include "server/format/adapter_report.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kSuffix = ".safetensors";
constexpr absl::string_view kDigestPrefix = "sha256:";
constexpr size_t kDigestChars = 64;
constexpr int64_t kMaxListed = 10'000;
constexpr absl::string_view kPeftModel = "adapter_model";
constexpr absl::string_view kPeftConfig = "adapter_config.json";
constexpr int64_t kMaxConfigBytes = 1 << 20;

// Kinds of records in the state store.
constexpr absl::string_view kUploads = "upload";      // name -> digest
constexpr absl::string_view kSettings = "settings";   // digest -> JSON

// Hashes the file in pieces, so that a large adapter takes no memory.
absl::StatusOr<std::string> HashFile(const FileDescriptor& file) {
  Sha256 sha;
  std::string buffer(1 << 20, '\0');
  off_t offset = 0;
  for (;;) {
    const ssize_t got = pread(file.get(), buffer.data(), buffer.size(), offset);
    if (got < 0) return absl::InternalError("cannot read the adapter");
    if (got == 0) return sha.FinishHex();
    sha.Update({buffer.data(), static_cast<size_t>(got)});
    offset += got;
  }
}

int64_t Nanoseconds(const struct timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

absl::Status Unknown(const std::string& name) {
  return Refuse(absl::StatusCode::kNotFound, reason::kUnknownAdapter,
                absl::StrCat("no adapter ", name, "; `h3ctl adapters list` shows what there is"), {{"adapter", name}});
}

// The HEX of "sha256:HEX".
absl::StatusOr<std::string> ParseDigest(const std::string& name) {
  const std::string digest = name.substr(kDigestPrefix.size());
  const bool hex =
      std::all_of(digest.begin(), digest.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (digest.size() == kDigestChars && hex) return digest;
  return RefuseArgument(reason::kUnknownAdapter, "not an adapter name: after sha256: come 64 lower-case hexadecimal digits",
                        {{"adapter", name}});
}

std::string ToJson(const AdapterSettings& settings) {
  nlohmann::json json = nlohmann::json::object();
  if (settings.alpha.has_value()) json["alpha"] = *settings.alpha;
  if (settings.qkv_layout != QkvLayout::kAuto) json["qkv_layout"] = std::string(QkvLayoutName(settings.qkv_layout));
  if (settings.fc1_gate_first.has_value()) json["fc1_gate_first"] = *settings.fc1_gate_first;
  if (settings.partition != Partition::kUnknown) json["partition"] = std::string(PartitionName(settings.partition));
  return json.dump();
}

absl::StatusOr<AdapterSettings> FromJson(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InternalError("the state database holds settings that are no JSON object");
  AdapterSettings settings;
  if (json.contains("alpha") && json["alpha"].is_number()) settings.alpha = json["alpha"].get<double>();
  if (json.contains("fc1_gate_first") && json["fc1_gate_first"].is_boolean()) settings.fc1_gate_first = json["fc1_gate_first"].get<bool>();
  for (const QkvLayout layout : {QkvLayout::kStacked, QkvLayout::kInterleaved}) {
    if (json.value("qkv_layout", "") == QkvLayoutName(layout)) settings.qkv_layout = layout;
  }
  for (const Partition partition : {Partition::kFl2va, Partition::kRef2va}) {
    if (json.value("partition", "") == PartitionName(partition)) settings.partition = partition;
  }
  return settings;
}

// Part of a name after its last '/', and what is before it with the '/'.
std::pair<std::string, std::string> SplitName(const std::string& name) {
  const size_t slash = name.rfind('/');
  return slash == std::string::npos ? std::pair(std::string(), name) : std::pair(name.substr(0, slash + 1), name.substr(slash + 1));
}

}  // namespace

absl::StatusOr<AdapterRegistry::ContentPtr> AdapterRegistry::Read(const std::string& name) {
  if (absl::StartsWith(name, kDigestPrefix)) return ReadByDigest(name);
  const auto config = [&](const std::string& folder) -> absl::StatusOr<std::string> {
    const auto file = OpenConfined(directory_, absl::StrCat(folder, kPeftConfig));
    if (!file.ok()) return "";
    return ReadAll(*file, kMaxConfigBytes);
  };
  if (const auto file = OpenConfined(directory_, name, kSuffix); file.ok()) {
    const auto [folder, leaf] = SplitName(name);
    std::string peft_config;
    if (leaf == kPeftModel) {
      H3_ASSIGN_OR_RETURN(peft_config, config(folder));
    }
    return ReadFile(name, *file, std::move(peft_config), "");
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  if (const auto file = OpenConfined(directory_, absl::StrCat(name, "/", kPeftModel, kSuffix)); file.ok()) {
    H3_ASSIGN_OR_RETURN(std::string peft_config, config(name + "/"));
    return ReadFile(name, *file, std::move(peft_config), "");
  }
  H3_ASSIGN_OR_RETURN(const std::optional<std::string> digest, state_.Get(kUploads, name));
  if (!digest.has_value()) return Unknown(name);
  H3_ASSIGN_OR_RETURN(const FileDescriptor file, content_.Open(*digest));
  return ReadFile(name, file, "", *digest);
}

absl::StatusOr<AdapterRegistry::ContentPtr> AdapterRegistry::ReadFile(const std::string& name, const FileDescriptor& file,
                                                                      std::string peft_config, const std::string& uploaded) {
  struct stat info;
  if (fstat(file.get(), &info) != 0) return Unknown(name);
  const Signature signature{info.st_dev, info.st_ino, info.st_size, Nanoseconds(info.st_mtim), Nanoseconds(info.st_ctim)};
  const auto known = contents_.find(name);
  if (known != contents_.end() && known->second->signature == signature && known->second->peft_config == peft_config) return known->second;
  auto content = std::make_shared<Content>();
  content->signature = signature;
  content->peft_config = std::move(peft_config);
  content->uploaded = !uploaded.empty();
  H3_ASSIGN_OR_RETURN(content->header, ReadSafetensorsHeader(file));
  content->digest = uploaded;
  if (uploaded.empty()) {
    H3_ASSIGN_OR_RETURN(content->digest, HashFile(file));
  }
  for (const TensorInfo& tensor : content->header.tensors) {
    if (tensor.bytes > 8) continue;
    std::string bytes(static_cast<size_t>(tensor.bytes), '\0');
    if (pread(file.get(), bytes.data(), bytes.size(), tensor.offset) != static_cast<ssize_t>(bytes.size()))
      return absl::InternalError("cannot read the adapter");
    content->scalars[tensor.name] = std::move(bytes);
  }
  contents_[name] = content;
  return ContentPtr(content);
}

absl::StatusOr<AdapterRegistry::ContentPtr> AdapterRegistry::ReadByDigest(const std::string& name) {
  H3_ASSIGN_OR_RETURN(const std::string digest, ParseDigest(name));
  if (const std::string known = NameOf(digest); known != name) return Read(known);
  if (const auto file = content_.Open(digest); file.ok()) return ReadFile(name, *file, "", digest);
  // Perhaps in a file that nobody has named yet: each is read once, then its digest is known.
  H3_ASSIGN_OR_RETURN(const std::vector<RegisteredAdapter> adapters, List());
  for (const RegisteredAdapter& adapter : adapters) {
    if (!adapter.digest.empty()) continue;
    auto content = Read(adapter.name);
    if (content.ok() && (*content)->digest == digest) return content;
  }
  return Unknown(name);
}

absl::StatusOr<AdapterSettings> AdapterRegistry::SettingsOf(const Content& content) {
  AdapterSettings settings;
  H3_ASSIGN_OR_RETURN(const std::optional<std::string> kept, state_.Get(kSettings, content.digest));
  if (kept.has_value()) {
    H3_ASSIGN_OR_RETURN(settings, FromJson(*kept));
  }
  settings.peft_config = content.peft_config;
  return settings;
}

absl::StatusOr<RegisteredAdapter> AdapterRegistry::Find(const std::string& name) {
  H3_ASSIGN_OR_RETURN(const ContentPtr content, Read(name));
  H3_ASSIGN_OR_RETURN(AdapterSettings settings, SettingsOf(*content));
  return RegisteredAdapter{.name = absl::StartsWith(name, kDigestPrefix) ? NameOf(content->digest) : name,
                           .digest = content->digest,
                           .file_bytes = content->signature.bytes,
                           .uploaded = content->uploaded,
                           .settings = std::move(settings)};
}

absl::StatusOr<AdapterManifest> AdapterRegistry::Manifest(const Content& content, const StackEntry& entry,
                                                          const AdapterSettings& settings, const BaseFacts& base) const {
  IntakeOptions options;
  options.base_partition = base.partition;
  options.base_has_grid = base.grid_width > 0;
  options.grid_width = base.grid_width;
  options.interleaved_base = base.plan.form.interleaved_qkv;
  options.settings = settings;
  options.alpha = entry.alpha;
  options.leave_out = entry.leave_out;
  options.materialized = entry.apply == Apply::kMaterialized;
  return ReadAdapter(content.header,
                     [&](const TensorInfo& tensor) -> absl::StatusOr<std::string> {
                       const auto found = content.scalars.find(tensor.name);
                       if (found == content.scalars.end())
                         return RefuseArgument(reason::kBadScale, absl::StrCat("alpha ", tensor.name, " is not one number"));
                       return found->second;
                     },
                     base.geometry(), options);
}

absl::StatusOr<ResolvedAdapter> AdapterRegistry::Resolve(const StackEntry& entry, size_t index, const BaseFacts& base) {
  const auto named = [&](absl::Status status) {
    return WithDetail(WithDetail(std::move(status), "adapter", entry.adapter), "field", absl::StrCat("stack[", index, "]"));
  };
  const auto content = Read(entry.adapter);
  if (!content.ok()) return named(content.status());
  if (!entry.digest.empty() && entry.digest != (*content)->digest) {
    return named(
        Refuse(absl::StatusCode::kFailedPrecondition, reason::kAdapterChanged,
               absl::StrCat("adapter ", entry.adapter, " is ", (*content)->digest, " now, the request pins ", entry.digest),
               {{"digest", (*content)->digest}, {"pinned", entry.digest}}));
  }
  H3_ASSIGN_OR_RETURN(AdapterSettings settings, SettingsOf(**content));
  const auto manifest = Manifest(**content, entry, settings, base);
  if (!manifest.ok()) return named(manifest.status());
  ResolvedAdapter resolved{.adapter = entry.adapter, .digest = (*content)->digest, .strength = entry.strength};
  resolved.scales = SummariseScales(*manifest, base.geometry());
  std::set<int> modules;
  for (const AdapterTerm& term : manifest->terms) modules.insert(term.site);
  resolved.modules = static_cast<int64_t>(modules.size());
  resolved.shape = std::make_shared<const AdapterShape>(ShapeOf(*manifest, base.plan.form));
  resolved.bytes = resolved.shape->bytes;
  resolved.left_out = manifest->left_out;
  resolved.warnings = manifest->warnings;
  resolved.video = entry.video;
  resolved.text = entry.text;
  resolved.audio = entry.audio;
  resolved.per_evaluation = entry.per_evaluation;
  resolved.apply = entry.apply;
  resolved.settings = std::move(settings);
  return resolved;
}

absl::StatusOr<HeaderReport> AdapterRegistry::Report(const std::string& name, const BaseFacts& base) {
  HeaderReport report;
  H3_ASSIGN_OR_RETURN(report.adapter, Find(name));
  H3_ASSIGN_OR_RETURN(const ContentPtr content, Read(name));
  report.producer = ProducerOf(content->header);
  report.schedule_hints = ScheduleHintsOf(content->header);
  report.manifest = Manifest(*content, {.adapter = name}, report.adapter.settings, base);
  if (report.manifest.ok()) {
    report.arithmetic_percent = ArithmeticPercent(*report.manifest, base.geometry());
    report.bytes = ShapeOf(*report.manifest, base.plan.form).bytes;
  }
  return report;
}

absl::StatusOr<std::vector<RegisteredAdapter>> AdapterRegistry::List() {
  std::map<std::string, RegisteredAdapter> adapters;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(directory_, fs::directory_options::skip_permission_denied, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::string name = it->path().lexically_relative(directory_).generic_string();
    std::error_code ignored;
    if (!absl::EndsWith(name, kSuffix) || !it->is_regular_file(ignored)) continue;
    name = std::string(absl::StripSuffix(name, kSuffix));
    if (!OpenConfined(directory_, name, kSuffix).ok()) continue;  // A link that leaves the directory, or no name.
    // What PEFT saved is known by its directory's name.
    const auto [folder, leaf] = SplitName(name);
    if (leaf == kPeftModel && !folder.empty() && OpenConfined(directory_, absl::StrCat(folder, kPeftConfig)).ok()) {
      name = folder.substr(0, folder.size() - 1);
    }
    if (static_cast<int64_t>(adapters.size()) == kMaxListed) break;
    adapters[name] = {.name = name, .file_bytes = static_cast<int64_t>(it->file_size(ignored))};
  }
  H3_ASSIGN_OR_RETURN(const auto uploads, state_.List(kUploads));
  for (const auto& [name, digest] : uploads) {
    const auto file = content_.Open(digest);
    struct stat info;
    if (!file.ok() || fstat(file->get(), &info) != 0) continue;
    adapters.try_emplace(name, RegisteredAdapter{.name = name, .digest = digest, .file_bytes = info.st_size, .uploaded = true});
  }
  std::vector<RegisteredAdapter> list;
  for (auto& [name, adapter] : adapters) {
    ContentPtr content;
    {
        if (const auto known = contents_.find(name); known != contents_.end()) content = known->second;
    }
    if (content != nullptr) {
      adapter.digest = content->digest;
      H3_ASSIGN_OR_RETURN(adapter.settings, SettingsOf(*content));
    }
    list.push_back(std::move(adapter));
  }
  return list;
}

absl::StatusOr<std::string> AdapterRegistry::Digest(const std::string& name) {
  if (absl::StartsWith(name, kDigestPrefix)) return ParseDigest(name);
  H3_ASSIGN_OR_RETURN(const ContentPtr content, Read(name));
  return content->digest;
}

std::string AdapterRegistry::NameOf(const std::string& digest) {
  std::vector<std::string> names;
  for (const auto& [name, content] : contents_) {
    if (content->digest == digest && !absl::StartsWith(name, kDigestPrefix)) names.push_back(name);
  }
  // A file may have been replaced since it was read.
  for (const std::string& name : names) {
    const auto now = Read(name);
    if (now.ok() && (*now)->digest == digest) return name;
  }
  return absl::StrCat(kDigestPrefix, digest);
}

absl::Status AdapterRegistry::SetSettings(const std::string& digest, const AdapterSettings& settings) {
  const std::string json = ToJson(settings);
  return json == "{}" ? state_.Remove(kSettings, digest) : state_.Put(kSettings, digest, json);
}

absl::Status AdapterRegistry::CheckUploadName(const std::string& name) const {
  H3_RETURN_IF_ERROR(CheckConfinedName(name));
  if (absl::StartsWith(name, kDigestPrefix) || name.find_first_of("=,") != std::string::npos) {
    // Neither could be written as NAME=STRENGTH,...
    return RefuseArgument(reason::kUnknownAdapter, "a name cannot begin with sha256: or hold = or ,", {{"adapter", name}});
  }
  for (const std::string& path : {absl::StrCat(name, kSuffix), absl::StrCat(name, "/", kPeftModel, kSuffix)}) {
    if (!OpenConfined(directory_, path).ok()) continue;
    return Refuse(absl::StatusCode::kFailedPrecondition, reason::kNameTaken,
                  absl::StrCat("a file of the adapters directory has the name ", name, " already; uploads never write there, take another name"),
                  {{"adapter", name}});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> AdapterRegistry::NameUpload(const std::string& name, const std::string& digest) {
  H3_RETURN_IF_ERROR(CheckUploadName(name));
  H3_ASSIGN_OR_RETURN(const std::optional<std::string> before, state_.Get(kUploads, name));
  H3_RETURN_IF_ERROR(state_.Put(kUploads, name, digest));
  return before.value_or("");
}

absl::Status AdapterRegistry::ForgetUnnamed(const std::string& digest) {
  H3_ASSIGN_OR_RETURN(const auto uploads, state_.List(kUploads));
  for (const auto& [name, named] : uploads) {
    if (named == digest) return absl::OkStatus();
  }
  content_.Remove(digest);
  contents_.erase(absl::StrCat(kDigestPrefix, digest));
  return absl::OkStatus();
}

absl::Status AdapterRegistry::ForgetAllUnnamed(const std::set<std::string>& but) {
  for (const std::string& digest : content_.List()) {
    if (!but.contains(digest)) H3_RETURN_IF_ERROR(ForgetUnnamed(digest));
  }
  return absl::OkStatus();
}

}  // namespace h3
