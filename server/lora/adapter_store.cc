#include "server/lora/adapter_store.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/confined_file.h"
#include "server/base/error.h"
#include "server/base/sha256.h"
#include "server/base/status_macros.h"
#include "server/format/adapter.h"
#include "server/tensor/catch_torch.h"

namespace h3 {
namespace {

// Larger than any adapter of this model: a complete one with rank 512 everywhere has about 6 GB.
constexpr int64_t kMaxAdapterBytes = int64_t{16} << 30;

constexpr absl::string_view kAdapterSuffix = ".safetensors";
constexpr absl::string_view kPeftFile = "/adapter_model.safetensors";

bool AlphaGiven(const StackEntry& entry) { return entry.alpha.has_value() || entry.settings.alpha.has_value(); }

absl::Status NotResident(absl::string_view what) {
  return Refuse(absl::StatusCode::kNotFound, reason::kUnknownAdapter, absl::StrCat("adapter ", what, " is not resident"),
                {{"adapter", std::string(what)}});
}

}  // namespace

absl::StatusOr<std::shared_ptr<const HostContent>> AdapterStore::ReadContent(const StackEntry& entry) {
  const auto read = [&](const FileDescriptor& file) -> absl::StatusOr<std::shared_ptr<const HostContent>> {
    H3_ASSIGN_OR_RETURN(const std::string bytes, ReadAll(file, kMaxAdapterBytes));
    return CatchTorch("adapter", [&]() -> absl::StatusOr<std::shared_ptr<const HostContent>> {
      return MakeHostContent(entry.adapter, Sha256Hex(bytes), bytes, model_.device());
    });
  };
  const std::string& name = entry.adapter;
  if (!entry.digest.empty() && !options_.blobs.empty()) {
    // Uploaded content lies under its digest, whatever name leads to it.
    if (const auto blob = OpenConfined(options_.blobs, entry.digest); blob.ok()) {
      H3_ASSIGN_OR_RETURN(auto found, read(*blob));
      if (found->digest != entry.digest) {
        return RefuseArgument(reason::kMalformedFile, absl::StrCat("the stored content of adapter ", name, " is damaged; upload it again"),
                              {{"adapter", name}, {"digest", entry.digest}, {"found", found->digest}});
      }
      host_.Add(found);
      return found;
    }
  }
  if (absl::StartsWith(name, "sha256:")) return NotResident(name);
  auto file = OpenConfined(options_.directory, name, kAdapterSuffix);
  if (!file.ok()) {
    // A directory that PEFT saved is one adapter.
    absl::Status plain = file.status();
    file = OpenConfined(options_.directory, absl::StrCat(name, kPeftFile));
    if (!file.ok()) return plain;
  }
  H3_ASSIGN_OR_RETURN(auto found, read(*file));
  if (!entry.digest.empty() && found->digest != entry.digest) {
    return Refuse(absl::StatusCode::kAborted, reason::kAdapterChanged,
                  absl::StrCat("adapter ", name, " was replaced after the request was accepted; send the request again"),
                  {{"adapter", name}, {"digest", entry.digest}, {"found", found->digest}});
  }
  host_.Add(found);
  return found;
}

absl::Status AdapterStore::Prefetch(const StackEntry& entry) {
  if (host_.budget() == ByteCount(0) || entry.digest.empty() || host_.Has(entry.digest)) return absl::OkStatus();
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [key, resident] : adapters_) {
      if (key.digest == entry.digest) return absl::OkStatus();
    }
  }
  return ReadContent(entry).status();
}

absl::StatusOr<std::shared_ptr<const ResidentAdapter>> AdapterStore::Read(const StackEntry& entry, ByteCount beside) {
  const absl::Time start = absl::Now();
  last_source_ = AdapterSource::kDevice;
  std::shared_ptr<const HostContent> file;
  if (!entry.digest.empty()) {
    if (auto resident = FindFor(entry, entry.digest); resident != nullptr) return resident;
    file = host_.Find(entry.digest);
  }
  const AdapterSource source = file != nullptr ? AdapterSource::kHost : AdapterSource::kDisk;
  if (file == nullptr) {
    H3_ASSIGN_OR_RETURN(file, ReadContent(entry));
  }
  const absl::string_view content = file->view();
  const std::string& digest = file->digest;
  if (auto resident = FindFor(entry, digest); resident != nullptr) return resident;
  // What is wrong with the content stays wrong: it is not kept for another try.
  const auto named = [&](const absl::Status& status) {
    if (ReasonOf(status) != reason::kVramExceeded) host_.Drop(digest);
    return WithDetail(status, "adapter", entry.adapter);
  };
  const auto header = ParseSafetensorsHeader(content, static_cast<int64_t>(content.size()));
  if (!header.ok()) return named(header.status());
  IntakeOptions options;
  options.base_partition = model_.checkpoint().partition;
  options.base_has_grid = model_.silu_grid().has_value();
  options.grid_width = options.base_has_grid ? model_.silu_grid()->width : 0;
  options.interleaved_base = model_.interleaved_qkv();
  options.settings = KeyOf(entry, digest).settings;
  options.leave_out = entry.leave_out;
  options.materialized = entry.apply == Apply::kMaterialized;
  const auto read = [&] {
    return ReadAdapter(
        *header,
        [&](const TensorInfo& info) -> absl::StatusOr<std::string> {
          return std::string(content.substr(static_cast<size_t>(info.offset), static_cast<size_t>(info.bytes)));
        },
        model_.geometry(), options);
  };
  auto manifest = read();
  if (ReasonOf(manifest.status()) == reason::kBadScale && AlphaGiven(entry)) {
    options.alpha = 1;  // Which one does not matter here: stacks put theirs in its place.
    manifest = read();
  }
  if (!manifest.ok()) return named(manifest.status());
  const AdapterShape shape = ShapeOf(*manifest, model_.plan_base().form);
  const ByteCount needed = shape.bytes;
  H3_RETURN_IF_ERROR(MakeRoom(shape, beside, entry.adapter));
  auto resident = MakeResident(model_, *manifest, content, entry.adapter, digest);
  if (!resident.ok()) return named(resident.status());
  misses_.fetch_add(1);
  last_source_ = source;
  if (options_.on_load) options_.on_load(source, absl::Now() - start, needed);
  // Whatever lets go of it last, what was derived from it goes with it.
  (*resident)->own_scale = !options.alpha.has_value();
  std::shared_ptr<const ResidentAdapter> handle(resident->get(), [this, owned = *resident](const ResidentAdapter* adapter) mutable {
    norms_.Forget(*adapter);
    owned.reset();
  });
  alive_.emplace_back(handle, needed);
  return handle;
}

absl::Status AdapterStore::MakeRoom(const AdapterShape& shape, ByteCount beside, const std::string& name) {
  const ByteCount needed = shape.bytes;
  std::erase_if(alive_, [](const auto& made) { return made.first.expired(); });
  const auto on_device = [&] { return options_.make_room ? options_.make_room(name, needed + shape.load_staging, beside) : absl::OkStatus(); };
  if (!options_.budget.has_value()) return on_device();
  const ByteCount budget = *options_.budget;
  const auto refuse = [&](absl::StatusCode code, ByteCount held, absl::string_view what, ErrorDetails details) {
    details.insert({{"adapter", name}, {"needed_bytes", absl::StrCat(needed.value())}, {"budget_bytes", absl::StrCat(budget.value())},
                    {"held_bytes", absl::StrCat(held.value())}});
    return Refuse(code, reason::kVramExceeded,
                  absl::StrCat("adapter ", name, " needs ", needed.value(), " bytes, ", what, " ", held.value(), " of the ", budget.value(),
                               " that adapters may take (--adapter-memory)"),
                  std::move(details));
  };
  if (beside + needed > budget) return refuse(absl::StatusCode::kFailedPrecondition, beside, "the rest of its stack takes", {});
  for (;;) {
    ByteCount held;
    for (const auto& [adapter, bytes] : alive_) held += adapter.expired() ? ByteCount(0) : bytes;
    if (held + needed <= budget) return on_device();
    if (!EvictIdle()) {
      return refuse(absl::StatusCode::kResourceExhausted, held, "requests that run hold", {{"retry_seconds", "1"}});
    }
  }
}

bool AdapterStore::EvictIdle() {
  std::shared_ptr<const ResidentAdapter> evicted;  // Freed after the lock.
  absl::MutexLock lock(&mu_);
  auto oldest = adapters_.end();
  for (auto it = adapters_.begin(); it != adapters_.end(); ++it) {
    if (it->second.adapter.use_count() > 1) continue;
    if (oldest == adapters_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
  }
  if (oldest == adapters_.end()) return false;
  evicted = std::move(oldest->second.adapter);
  adapters_.erase(oldest);
  evictions_.fetch_add(1);
  return true;
}

ByteCount AdapterStore::IdleBytes() const {
  absl::MutexLock lock(&mu_);
  ByteCount idle;
  for (const auto& [key, resident] : adapters_) {
    if (resident.adapter.use_count() == 1) idle += resident.adapter->bytes;
  }
  return idle;
}

std::shared_ptr<const ResidentAdapter> AdapterStore::FindFor(const StackEntry& entry, const std::string& digest) {
  Key key = KeyOf(entry, digest);
  auto resident = Find(key);
  if (resident == nullptr && AlphaGiven(entry)) {
    key.own_scale = false;
    resident = Find(key);
  }
  if (resident == nullptr || (entry.apply != Apply::kMaterialized && WholeDifference(*resident) != nullptr)) return nullptr;
  hits_.fetch_add(1);
  return resident;
}

AdapterStore::Key AdapterStore::KeyOf(const StackEntry& entry, const std::string& digest) {
  Key key{digest, entry.settings, entry.leave_out};
  key.settings.alpha.reset();  // A number of the stack's, not of the tensors.
  return key;
}

void AdapterStore::Keep(const StackEntry& entry, std::shared_ptr<const ResidentAdapter> adapter) {
  Key key = KeyOf(entry, adapter->digest);
  key.own_scale = adapter->own_scale;
  absl::MutexLock lock(&mu_);
  adapters_.try_emplace(std::move(key), Resident{std::move(adapter), ++uses_});
}

TierCounters AdapterStore::Counters(Tier tier) const {
  if (tier == Tier::kHost) return host_.counters();
  return {hits_.load(), misses_.load(), evictions_.load()};
}

absl::StatusOr<ByteCount> AdapterStore::Unload(const std::string& digest) {
  std::vector<std::shared_ptr<const ResidentAdapter>> removed;  // Freed after the lock.
  ByteCount freed;
  merged_.Drop(digest);
  absl::MutexLock lock(&mu_);
  for (const auto& [key, resident] : adapters_) {
    const auto& adapter = resident.adapter;
    if (key.digest == digest && adapter.use_count() > 1) {
      return Refuse(absl::StatusCode::kFailedPrecondition, reason::kInUse,
                    absl::StrCat("adapter ", adapter->name, " is used by ", adapter.use_count() - 1,
                                 " running stack(s); unload it when they are done"),
                    {{"adapter", adapter->name}, {"pins", absl::StrCat(adapter.use_count() - 1)}});
    }
  }
  for (auto it = adapters_.begin(); it != adapters_.end();) {
    if (it->first.digest != digest) {
      ++it;
      continue;
    }
    freed += it->second.adapter->bytes;
    removed.push_back(std::move(it->second.adapter));
    it = adapters_.erase(it);
  }
  host_.Drop(digest);
  if (removed.empty()) return NotResident(absl::StrCat("sha256:", digest));
  return freed;
}

std::vector<AdapterResidency> AdapterStore::List() const {
  std::vector<AdapterResidency> list;
  absl::MutexLock lock(&mu_);
  for (const auto& [key, resident] : adapters_) {
    const auto& adapter = resident.adapter;
    list.push_back({adapter->name, adapter->digest, adapter->bytes, adapter.use_count() - 1, Tier::kDevice});
  }
  for (AdapterResidency& host : host_.List()) list.push_back(std::move(host));
  return list;
}

ByteCount AdapterStore::PinnedMergedBytes() const {
  absl::MutexLock lock(&mu_);
  std::vector<const ResidentAdapter*> pinned;
  for (const auto& [key, resident] : adapters_) {
    if (resident.adapter.use_count() > 1) pinned.push_back(resident.adapter.get());
  }
  return MergedBytes(model_, pinned);
}

std::shared_ptr<const ResidentAdapter> AdapterStore::Find(const Key& key) {
  absl::MutexLock lock(&mu_);
  const auto found = adapters_.find(key);
  if (found == adapters_.end()) return nullptr;
  found->second.last_use = ++uses_;
  return found->second.adapter;
}

}  // namespace h3
