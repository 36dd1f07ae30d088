// The adapters of one worker: found by digest, loaded once, pinned while a stack holds them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/format/request.h"
#include "server/lora/host_tier.h"
#include "server/lora/merged_weights.h"
#include "server/lora/norm_cache.h"
#include "server/lora/resident_adapter.h"
#include "server/model/resident_model.h"

namespace h3 {

struct AdapterStoreOptions {
  std::string directory;  // Where names are looked up.
  std::string blobs;      // Where uploaded content lies, by digest; empty: nowhere.
  ByteCount idle_merged;  // Merged copies that are kept though nobody uses them.
  // Bytes that adapters may take on the device. What nobody holds goes, least recently used first, before another comes in; it is
  // never exceeded. Absent: no limit.
  std::optional<ByteCount> budget;
  ByteCount host_budget;  // Content of adapters that is kept in host memory.
  // Called before `needed` bytes are taken for an adapter of that name: makes room for them on the device (EvictIdle frees what
  // nobody holds) or says why there is none. `beside`: as for Read. Null: there is always room.
  std::function<absl::Status(const std::string& name, ByteCount needed, ByteCount beside)> make_room;
  // An adapter came to the device. Null: nobody asks.
  std::function<void(AdapterSource from, absl::Duration took, ByteCount bytes)> on_load;
};

// On the device thread, but for what says [any].
class AdapterStore {
 public:
  // Borrows the model.
  AdapterStore(const ResidentModel& model, AdapterStoreOptions options)
      : model_(model), options_(std::move(options)), merged_(options_.idle_merged), host_(options_.host_budget) {}

  // The adapter of a stack entry (its strength and factors are not looked at): resident already, or read, hashed, checked and
  // copied now. Gone with the last handle, unless it is kept. An entry without a digest takes what the file is now.
  // Handles are let go of on the device thread, before the store. `beside`: bytes of adapters that the caller will hold together with it.
  // NOT_FOUND / UNKNOWN_ADAPTER; ABORTED / ADAPTER_CHANGED when the file's digest is another; VRAM_EXCEEDED with FAILED_PRECONDITION
  // when it can never fit the budget, RESOURCE_EXHAUSTED while others hold what would have to go; and everything that ReadAdapter
  // and MakeResident refuse.
  absl::StatusOr<std::shared_ptr<const ResidentAdapter>> Read(const StackEntry& entry, ByteCount beside = ByteCount(0))
      ABSL_LOCKS_EXCLUDED(mu_);
  // What Read gave for that entry stays resident, until Unload.
  void Keep(const StackEntry& entry, std::shared_ptr<const ResidentAdapter> adapter) ABSL_LOCKS_EXCLUDED(mu_);

  // Bytes freed. FAILED_PRECONDITION / IN_USE while a stack holds it; NOT_FOUND / UNKNOWN_ADAPTER when it is not resident.
  absl::StatusOr<ByteCount> Unload(const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);

  // [any] Reads the content of an entry with a digest into the host tier, where it is not and fits. Blocks on the disk.
  absl::Status Prefetch(const StackEntry& entry);

  // Frees the adapter that nobody has used for longest; false: all are in use.
  bool EvictIdle() ABSL_LOCKS_EXCLUDED(mu_);
  // [any] Bytes of adapters that EvictIdle would free.
  ByteCount IdleBytes() const ABSL_LOCKS_EXCLUDED(mu_);

  // From where the last Read took its adapter.
  AdapterSource last_source() const { return last_source_; }

  // [any] Both tiers.
  std::vector<AdapterResidency> List() const ABSL_LOCKS_EXCLUDED(mu_);

  // [any] What a merging runtime would hold a second time for the adapters that are pinned now.
  ByteCount PinnedMergedBytes() const ABSL_LOCKS_EXCLUDED(mu_);

  TierCounters Counters(Tier tier) const;  // [any]
  const HostTier& host() const { return host_; }
  const std::optional<ByteCount>& budget() const { return options_.budget; }

  NormCache& norms() { return norms_; }
  MergedWeights& merged() { return merged_; }

 private:
  // Settings and what is left out make other resident forms of the same content.
  struct Key {
    std::string digest;
    AdapterSettings settings;
    std::vector<std::string> leave_out;
    bool own_scale = true;  // False: the file's own alphas contradict each other; a stack must give one.
    auto operator<=>(const Key&) const = default;
  };

  static Key KeyOf(const StackEntry& entry, const std::string& digest);
  // What is resident and serves the entry; counts a hit.
  std::shared_ptr<const ResidentAdapter> FindFor(const StackEntry& entry, const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);

  struct Resident {
    std::shared_ptr<const ResidentAdapter> adapter;
    int64_t last_use = 0;
  };

  // Counts as a use.
  std::shared_ptr<const ResidentAdapter> Find(const Key& key) ABSL_LOCKS_EXCLUDED(mu_);
  // Evicts until it fits the budget and the device.
  absl::Status MakeRoom(const AdapterShape& shape, ByteCount beside, const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // [any] The bytes of an entry's file, from the disk, with their digest. Kept in the host tier where they fit.
  absl::StatusOr<std::shared_ptr<const HostContent>> ReadContent(const StackEntry& entry);

  const ResidentModel& model_;
  const AdapterStoreOptions options_;
  NormCache norms_;
  MergedWeights merged_;
  HostTier host_;
  AdapterSource last_source_ = AdapterSource::kDevice;
  mutable absl::Mutex mu_;
  std::map<Key, Resident> adapters_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<std::weak_ptr<const ResidentAdapter>, ByteCount>> alive_;  // Every adapter that was made: kept, or only held.
  int64_t uses_ = 0;
  std::atomic<int64_t> hits_{0}, misses_{0}, evictions_{0};
};

}  // namespace h3
