// The adapters of one worker: found by digest, loaded once, pinned while a stack holds them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/format/request.h"
#include "server/lora/merged_weights.h"
#include "server/lora/norm_cache.h"
#include "server/lora/resident_adapter.h"
#include "server/model/resident_model.h"

namespace h3 {

// A snapshot line.
struct StoredAdapter {
  std::string name;
  std::string digest;
  ByteCount bytes;
  int64_t pins = 0;  // Stacks that hold it.
};

struct AdapterStoreOptions {
  std::string directory;  // Where names are looked up.
  std::string blobs;      // Where uploaded content lies, by digest; empty: nowhere.
  ByteCount idle_merged;  // Merged copies that are kept though nobody uses them.
};

// Everything but List and PinnedMergedBytes: on the device thread. Those: any thread.
class AdapterStore {
 public:
  // Borrows the model.
  AdapterStore(const ResidentModel& model, AdapterStoreOptions options)
      : model_(model), options_(std::move(options)), merged_(options_.idle_merged) {}

  // The adapter of a stack entry (its strength and factors are not looked at): resident already, or read, hashed, checked and
  // copied now. Gone with the last handle, unless it is kept. An entry without a digest takes what the file is now.
  // NOT_FOUND / UNKNOWN_ADAPTER; ABORTED / ADAPTER_CHANGED when the file's digest is another; and everything that ReadAdapter and
  // MakeResident refuse.
  absl::StatusOr<std::shared_ptr<const ResidentAdapter>> Read(const StackEntry& entry) ABSL_LOCKS_EXCLUDED(mu_);
  // What Read gave for that entry stays resident, until Unload.
  void Keep(const StackEntry& entry, std::shared_ptr<const ResidentAdapter> adapter) ABSL_LOCKS_EXCLUDED(mu_);

  // Bytes freed. FAILED_PRECONDITION / IN_USE while a stack holds it; NOT_FOUND / UNKNOWN_ADAPTER when it is not resident.
  absl::StatusOr<ByteCount> Unload(const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);

  std::vector<StoredAdapter> List() const ABSL_LOCKS_EXCLUDED(mu_);

  // What a merging runtime would hold a second time for the adapters that are pinned now.
  ByteCount PinnedMergedBytes() const ABSL_LOCKS_EXCLUDED(mu_);

  NormCache& norms() { return norms_; }
  MergedWeights& merged() { return merged_; }

 private:
  // Settings and what is left out make other resident forms of the same content.
  struct Key {
    std::string digest;
    AdapterSettings settings;
    std::vector<std::string> leave_out;
    auto operator<=>(const Key&) const = default;
  };

  std::shared_ptr<const ResidentAdapter> Find(const Key& key) const ABSL_LOCKS_EXCLUDED(mu_);
  // The bytes of an entry's file, and their digest.
  absl::StatusOr<std::pair<std::string, std::string>> ReadContent(const StackEntry& entry) const;

  const ResidentModel& model_;
  const AdapterStoreOptions options_;
  NormCache norms_;
  MergedWeights merged_;
  mutable absl::Mutex mu_;
  std::map<Key, std::shared_ptr<const ResidentAdapter>> adapters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
