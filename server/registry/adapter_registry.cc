#include "server/registry/adapter_registry.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/confined_file.h"
#include "server/base/error.h"
#include "server/base/sha256.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kSuffix = ".safetensors";
constexpr absl::string_view kDigestPrefix = "sha256:";
constexpr size_t kDigestChars = 64;
constexpr int64_t kMaxListed = 10'000;

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

}  // namespace

absl::StatusOr<std::shared_ptr<const AdapterRegistry::Content>> AdapterRegistry::Read(const std::string& name) {
  if (absl::StartsWith(name, kDigestPrefix)) return ReadByDigest(name);
  H3_ASSIGN_OR_RETURN(const FileDescriptor file, OpenConfined(directory_, name, kSuffix));
  struct stat info;
  if (fstat(file.get(), &info) != 0) return Unknown(name);
  const Signature signature{info.st_dev, info.st_ino, info.st_size, Nanoseconds(info.st_mtim), Nanoseconds(info.st_ctim)};
  {
    absl::MutexLock lock(&mu_);
    const auto known = contents_.find(name);
    if (known != contents_.end() && known->second->signature == signature) return known->second;
  }
  auto content = std::make_shared<Content>();
  content->signature = signature;
  H3_ASSIGN_OR_RETURN(content->header, ReadSafetensorsHeader(file));
  H3_ASSIGN_OR_RETURN(content->digest, HashFile(file));
  for (const TensorInfo& tensor : content->header.tensors) {
    if (tensor.bytes > 8) continue;
    std::string bytes(static_cast<size_t>(tensor.bytes), '\0');
    if (pread(file.get(), bytes.data(), bytes.size(), tensor.offset) != static_cast<ssize_t>(bytes.size()))
      return absl::InternalError("cannot read the adapter");
    content->scalars[tensor.name] = std::move(bytes);
  }
  absl::MutexLock lock(&mu_);
  contents_[name] = content;
  return std::shared_ptr<const Content>(content);
}

absl::StatusOr<std::shared_ptr<const AdapterRegistry::Content>> AdapterRegistry::ReadByDigest(const std::string& name) {
  H3_ASSIGN_OR_RETURN(const std::string digest, ParseDigest(name));
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [known, content] : contents_) {
      if (content->digest == digest) return content;
    }
  }
  // Perhaps in a file that nobody has named yet: each is read once, then its digest is known.
  H3_ASSIGN_OR_RETURN(const std::vector<RegisteredAdapter> adapters, List());
  for (const RegisteredAdapter& adapter : adapters) {
    if (!adapter.digest.empty()) continue;
    auto content = Read(adapter.name);
    if (content.ok() && (*content)->digest == digest) return content;
  }
  return Unknown(name);
}

absl::StatusOr<RegisteredAdapter> AdapterRegistry::Find(const std::string& name) {
  H3_ASSIGN_OR_RETURN(const auto content, Read(name));
  return RegisteredAdapter{.name = absl::StartsWith(name, kDigestPrefix) ? NameOf(content->digest) : name,
                           .digest = content->digest,
                           .file_bytes = content->signature.bytes};
}

absl::StatusOr<ResolvedAdapter> AdapterRegistry::Resolve(const StackEntry& entry, size_t index, const BaseFacts& base) {
  const auto named = [&](absl::Status status) {
    return WithDetail(WithDetail(std::move(status), "adapter", entry.adapter), "field", absl::StrCat("stack[", index, "]"));
  };
  const auto content = Read(entry.adapter);
  if (!content.ok()) return named(content.status());
  if (!entry.digest.empty() && entry.digest != (*content)->digest) {
    return named(
        Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
               absl::StrCat("adapter ", entry.adapter, " is ", (*content)->digest, " now, the request pins ", entry.digest)));
  }
  IntakeOptions options;
  options.base_partition = base.partition;
  options.base_has_grid = base.grid_width > 0;
  options.grid_width = base.grid_width;
  options.alpha = entry.alpha;
  options.leave_out = entry.leave_out;
  const auto manifest =
      ReadAdapter((*content)->header,
                  [&](const TensorInfo& tensor) -> absl::StatusOr<std::string> {
                    const auto found = (*content)->scalars.find(tensor.name);
                    if (found == (*content)->scalars.end())
                      return RefuseArgument(reason::kBadScale, absl::StrCat("alpha ", tensor.name, " is not one number"));
                    return found->second;
                  },
                  base.geometry, options);
  if (!manifest.ok()) return named(manifest.status());
  ResolvedAdapter resolved{.adapter = entry.adapter, .digest = (*content)->digest, .strength = entry.strength};
  resolved.scales = SummariseScales(*manifest, base.geometry);
  std::set<int> modules;
  for (const AdapterTerm& term : manifest->terms) modules.insert(term.site);
  resolved.modules = static_cast<int64_t>(modules.size());
  resolved.bytes = ByteCount(manifest->device_bytes);
  resolved.left_out = manifest->left_out;
  resolved.warnings = manifest->warnings;
  return resolved;
}

absl::StatusOr<std::vector<RegisteredAdapter>> AdapterRegistry::List() {
  std::vector<RegisteredAdapter> adapters;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(directory_, fs::directory_options::skip_permission_denied, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::string name = it->path().lexically_relative(directory_).generic_string();
    std::error_code ignored;
    if (!absl::EndsWith(name, kSuffix) || !it->is_regular_file(ignored)) continue;
    name = std::string(absl::StripSuffix(name, kSuffix));
    if (!OpenConfined(directory_, name, kSuffix).ok()) continue;  // A link that leaves the directory, or no name.
    if (static_cast<int64_t>(adapters.size()) == kMaxListed) break;
    adapters.push_back({.name = name, .file_bytes = static_cast<int64_t>(it->file_size(ignored))});
  }
  std::sort(adapters.begin(), adapters.end(),
            [](const RegisteredAdapter& a, const RegisteredAdapter& b) { return a.name < b.name; });
  absl::MutexLock lock(&mu_);
  for (RegisteredAdapter& adapter : adapters) {
    const auto known = contents_.find(adapter.name);
    if (known != contents_.end()) adapter.digest = known->second->digest;
  }
  return adapters;
}

absl::StatusOr<std::string> AdapterRegistry::Digest(const std::string& name) {
  if (absl::StartsWith(name, kDigestPrefix)) return ParseDigest(name);
  H3_ASSIGN_OR_RETURN(const auto content, Read(name));
  return content->digest;
}

std::string AdapterRegistry::NameOf(const std::string& digest) {
  absl::MutexLock lock(&mu_);
  for (const auto& [name, content] : contents_) {
    if (content->digest == digest) return name;
  }
  return "";
}

}  // namespace h3
