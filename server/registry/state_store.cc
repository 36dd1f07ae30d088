#include "server/registry/state_store.h"

#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <string.h>
#include <sys/file.h>

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

constexpr int kVersion = 1;

absl::Status Failure(sqlite3* db, absl::string_view what) {
  const int code = sqlite3_errcode(db) & 0xff;
  const std::string message = absl::StrCat("the state database cannot ", what, ": ", sqlite3_errmsg(db));
  if (code == SQLITE_FULL) return Refuse(absl::StatusCode::kResourceExhausted, reason::kDiskFull, message);
  return absl::InternalError(message);
}

// A prepared statement with its parameters bound.
class Statement {
 public:
  Statement(sqlite3* db, const char* sql, std::initializer_list<absl::string_view> parameters) : db_(db) {
    ok_ = sqlite3_prepare_v2(db, sql, -1, &statement_, nullptr) == SQLITE_OK;
    int i = 0;
    for (const absl::string_view text : parameters) {
      ++i;
      ok_ = ok_ && sqlite3_bind_blob64(statement_, i, text.data(), text.size(), SQLITE_TRANSIENT) == SQLITE_OK;
    }
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  // True: a row is there.
  absl::StatusOr<bool> Step(absl::string_view what) {
    const int result = ok_ ? sqlite3_step(statement_) : SQLITE_ERROR;
    if (result == SQLITE_ROW) return true;
    if (result == SQLITE_DONE) return false;
    return Failure(db_, what);
  }
  std::string Column(int i) const {
    const void* data = sqlite3_column_blob(statement_, i);
    return data == nullptr ? "" : std::string(static_cast<const char*>(data), static_cast<size_t>(sqlite3_column_bytes(statement_, i)));
  }
  int Number(int i) const { return sqlite3_column_int(statement_, i); }

 private:
  sqlite3* const db_;
  sqlite3_stmt* statement_ = nullptr;
  bool ok_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StateStore>> StateStore::Open(const std::string& path, absl::Duration patience) {
  FileDescriptor lock(open(absl::StrCat(path, ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock.get() < 0) return absl::FailedPreconditionError(absl::StrCat("cannot make the lock of the state database: ", strerror(errno)));
  const absl::Time until = absl::Now() + patience;
  while (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (absl::Now() >= until) return absl::FailedPreconditionError("another process uses this state directory; give each its own");
    absl::SleepFor(absl::Milliseconds(50));
  }
  sqlite3* db = nullptr;
  const int opened = sqlite3_open_v2(path.c_str(), &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  std::unique_ptr<StateStore> store(new StateStore(std::move(lock), db));
  if (opened != SQLITE_OK) return absl::FailedPreconditionError(absl::StrCat("cannot open the state database: ", sqlite3_errmsg(db)));
  for (const char* sql : {"PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL",
                          "CREATE TABLE IF NOT EXISTS records (kind BLOB, key BLOB, value BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID"}) {
    H3_RETURN_IF_ERROR(Statement(db, sql, {}).Step("be set up").status());
  }
  int version = 0;
  {
    Statement read(db, "PRAGMA user_version", {});
    H3_RETURN_IF_ERROR(read.Step("tell its version").status());
    version = read.Number(0);
  }
  if (version > kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the state database has version ", version, ", this program knows ", kVersion));
  }
  H3_RETURN_IF_ERROR(Statement(db, "PRAGMA user_version=1", {}).Step("be marked").status());
  return store;
}

StateStore::~StateStore() { sqlite3_close(db_); }

absl::Status StateStore::Put(absl::string_view kind, absl::string_view key, absl::string_view value) {
  return Statement(db_, "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value", {kind, key, value})
      .Step("be written")
      .status();
}

absl::StatusOr<std::optional<std::string>> StateStore::Get(absl::string_view kind, absl::string_view key) {
  Statement read(db_, "SELECT value FROM records WHERE kind = ? AND key = ?", {kind, key});
  H3_ASSIGN_OR_RETURN(const bool found, read.Step("be read"));
  if (!found) return std::nullopt;
  return read.Column(0);
}

absl::Status StateStore::Remove(absl::string_view kind, absl::string_view key) {
  return Statement(db_, "DELETE FROM records WHERE kind = ? AND key = ?", {kind, key}).Step("be written").status();
}

absl::StatusOr<std::map<std::string, std::string>> StateStore::List(absl::string_view kind) {
  Statement read(db_, "SELECT key, value FROM records WHERE kind = ? ORDER BY key", {kind});
  std::map<std::string, std::string> records;
  for (;;) {
    H3_ASSIGN_OR_RETURN(const bool more, read.Step("be read"));
    if (!more) return records;
    records[read.Column(0)] = read.Column(1);
  }
}

}  // namespace h3
