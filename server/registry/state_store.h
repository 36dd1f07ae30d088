// Small records that must survive: kind and key to bytes, in SQLite (WAL, synchronous=FULL: a Put that returned is on the disk).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/confined_file.h"

struct sqlite3;

namespace h3 {

// One thread at a time. Every method blocks on the disk. A full disk is RESOURCE_EXHAUSTED / DISK_FULL and changes nothing;
// anything else that goes wrong is INTERNAL.
class StateStore {
 public:
  // Creates the file where it is missing, and holds a lock on `path`.lock: what lies beside it has one owner. Waits up to `patience` for
  // an owner that is just ending. FAILED_PRECONDITION when it cannot be opened, is another's, or was written by a newer version.
  static absl::StatusOr<std::unique_ptr<StateStore>> Open(const std::string& path, absl::Duration patience = absl::Seconds(5));
  ~StateStore();

  absl::Status Put(absl::string_view kind, absl::string_view key, absl::string_view value);
  absl::StatusOr<std::optional<std::string>> Get(absl::string_view kind, absl::string_view key);
  // Also where there is no such record.
  absl::Status Remove(absl::string_view kind, absl::string_view key);
  // By key.
  absl::StatusOr<std::map<std::string, std::string>> List(absl::string_view kind);

 private:
  StateStore(FileDescriptor lock, sqlite3* db) : lock_(std::move(lock)), db_(db) {}

  const FileDescriptor lock_;
  sqlite3* const db_;
};

}  // namespace h3
