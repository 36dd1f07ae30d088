#include "server/lora/adapter_store.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/confined_file.h"
#include "server/base/error.h"
#include "server/base/sha256.h"
#include "server/base/status_macros.h"
#include "server/format/adapter.h"

namespace h3 {
namespace {

// Larger than any adapter of this model: a complete one with rank 512 everywhere has about 6 GB.
constexpr int64_t kMaxAdapterBytes = int64_t{16} << 30;

absl::Status NotResident(absl::string_view what) {
  return Refuse(absl::StatusCode::kNotFound, reason::kUnknownAdapter, absl::StrCat("adapter ", what, " is not resident"),
                {{"adapter", std::string(what)}});
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ResidentAdapter>> AdapterStore::Acquire(const std::string& name, const std::string& digest,
                                                                             const std::vector<std::string>& leave_out) {
  if (!digest.empty()) {
    if (auto resident = Find({digest, leave_out}); resident != nullptr) return resident;
  }
  if (absl::StartsWith(name, "sha256:")) return NotResident(name);
  H3_ASSIGN_OR_RETURN(const FileDescriptor file, OpenConfined(directory_, name, ".safetensors"));
  H3_ASSIGN_OR_RETURN(const std::string content, ReadAll(file, kMaxAdapterBytes));
  const std::string actual = Sha256Hex(content);
  if (!digest.empty() && actual != digest) {
    return Refuse(absl::StatusCode::kAborted, reason::kUnknownAdapter,
                  absl::StrCat("adapter ", name, " was replaced after the request was accepted; send the request again"),
                  {{"adapter", name}, {"digest", digest}, {"found", actual}});
  }
  if (auto resident = Find({actual, leave_out}); resident != nullptr) return resident;

  const auto named = [&](const absl::Status& status) { return WithDetail(status, "adapter", name); };
  const auto header = ParseSafetensorsHeader(content, static_cast<int64_t>(content.size()));
  if (!header.ok()) return named(header.status());
  IntakeOptions options;
  options.base_partition = model_.checkpoint().partition;
  options.base_has_grid = model_.silu_grid().has_value();
  options.grid_width = options.base_has_grid ? model_.silu_grid()->width : 0;
  options.leave_out = leave_out;
  const auto manifest = ReadAdapter(
      *header,
      [&](const TensorInfo& info) -> absl::StatusOr<std::string> {
        return content.substr(static_cast<size_t>(info.offset), static_cast<size_t>(info.bytes));
      },
      model_.geometry(), options);
  if (!manifest.ok()) return named(manifest.status());
  auto resident = MakeResident(model_, *manifest, content, name, actual);
  if (!resident.ok()) return named(resident.status());
  absl::MutexLock lock(&mu_);
  adapters_[{actual, leave_out}] = *resident;
  return *resident;
}

absl::StatusOr<ByteCount> AdapterStore::Unload(const std::string& digest) {
  std::vector<std::shared_ptr<const ResidentAdapter>> removed;  // Freed after the lock.
  ByteCount freed;
  absl::MutexLock lock(&mu_);
  for (const auto& [key, adapter] : adapters_) {
    if (key.first == digest && adapter.use_count() > 1) {
      return Refuse(absl::StatusCode::kFailedPrecondition, reason::kInUse,
                    absl::StrCat("adapter ", adapter->name, " is used by ", adapter.use_count() - 1,
                                 " running stack(s); unload it when they are done"),
                    {{"adapter", adapter->name}, {"pins", absl::StrCat(adapter.use_count() - 1)}});
    }
  }
  for (auto it = adapters_.begin(); it != adapters_.end();) {
    if (it->first.first != digest) {
      ++it;
      continue;
    }
    freed += it->second->bytes;
    removed.push_back(std::move(it->second));
    it = adapters_.erase(it);
  }
  if (removed.empty()) return NotResident(absl::StrCat("sha256:", digest));
  return freed;
}

std::vector<StoredAdapter> AdapterStore::List() const {
  absl::MutexLock lock(&mu_);
  std::vector<StoredAdapter> list;
  for (const auto& [key, adapter] : adapters_) {
    list.push_back({adapter->name, adapter->digest, adapter->bytes, adapter.use_count() - 1});
  }
  return list;
}

ByteCount AdapterStore::PinnedMergedBytes() const {
  absl::MutexLock lock(&mu_);
  std::vector<const ResidentAdapter*> pinned;
  for (const auto& [key, adapter] : adapters_) {
    if (adapter.use_count() > 1) pinned.push_back(adapter.get());
  }
  return MergedBytes(model_, pinned);
}

std::shared_ptr<const ResidentAdapter> AdapterStore::Find(const Key& key) const {
  absl::MutexLock lock(&mu_);
  const auto found = adapters_.find(key);
  return found == adapters_.end() ? nullptr : found->second;
}

}  // namespace h3
