// The adapters of one worker: found by digest, loaded once, pinned while a stack holds them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
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

// Acquire and Unload: on the device thread. List: any thread.
class AdapterStore {
 public:
  // `directory`: where names are looked up; borrowed model.
  AdapterStore(const ResidentModel& model, std::string directory) : model_(model), directory_(std::move(directory)) {}

  // The adapter of that name: resident already, or read, hashed, checked and copied now. It stays resident after the handle is
  // gone, until Unload. `digest`: what the file must be; empty: whatever it is now. `leave_out`: as IntakeOptions.
  // NOT_FOUND / UNKNOWN_ADAPTER; ABORTED when the file's digest is another; and everything that ReadAdapter and MakeResident refuse.
  absl::StatusOr<std::shared_ptr<const ResidentAdapter>> Acquire(const std::string& name, const std::string& digest,
                                                                 const std::vector<std::string>& leave_out);

  // Bytes freed. FAILED_PRECONDITION / IN_USE while a stack holds it; NOT_FOUND / UNKNOWN_ADAPTER when it is not resident.
  absl::StatusOr<ByteCount> Unload(const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);

  std::vector<StoredAdapter> List() const ABSL_LOCKS_EXCLUDED(mu_);

  // What a merging runtime would hold a second time for the adapters that are pinned now. Any thread.
  ByteCount PinnedMergedBytes() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What is left out makes another resident form of the same content.
  using Key = std::pair<std::string, std::vector<std::string>>;

  std::shared_ptr<const ResidentAdapter> Find(const Key& key) const ABSL_LOCKS_EXCLUDED(mu_);

  const ResidentModel& model_;
  const std::string directory_;
  mutable absl::Mutex mu_;
  std::map<Key, std::shared_ptr<const ResidentAdapter>> adapters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
