// Uploaded content: files named by the SHA-256 of what they hold, in one directory. A file is there whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/confined_file.h"
#include "server/base/sha256.h"

namespace h3 {

// Content that is coming in: a temporary file beside the store's. Gone when it is not committed. One thread at a time; blocks on
// the disk.
class IncomingContent {
 public:
  ~IncomingContent();
  IncomingContent(const IncomingContent&) = delete;
  IncomingContent& operator=(const IncomingContent&) = delete;

  // RESOURCE_EXHAUSTED / DISK_FULL. INVALID_ARGUMENT / MALFORMED_FILE beyond the announced bytes.
  absl::Status Append(absl::string_view bytes);
  // All of it has come: on the disk under its digest when this returns. INVALID_ARGUMENT / MALFORMED_FILE when bytes are missing
  // or the digest is another.
  absl::Status Commit();

 private:
  friend class ContentStore;
  IncomingContent(std::string directory, std::string temporary, FileDescriptor file, std::string digest, int64_t bytes)
      : directory_(std::move(directory)), temporary_(std::move(temporary)), file_(std::move(file)), digest_(std::move(digest)), bytes_(bytes) {}

  const std::string directory_, temporary_;
  const FileDescriptor file_;
  const std::string digest_;
  const int64_t bytes_;
  int64_t written_ = 0;
  Sha256 sha_;
  bool committed_ = false;
};

// Thread-safe: it has no state beside the directory.
class ContentStore {
 public:
  // Creates the directory (0700) and removes what an earlier process left unfinished. FAILED_PRECONDITION when it cannot.
  static absl::StatusOr<ContentStore> Create(std::string directory);

  // `digest`: hex SHA-256, checked by the caller to be one; `bytes`: the size that is announced; room for it is taken on the disk
  // at once. RESOURCE_EXHAUSTED / DISK_FULL.
  absl::StatusOr<std::unique_ptr<IncomingContent>> Begin(const std::string& digest, int64_t bytes) const;
  // NOT_FOUND / UNKNOWN_ADAPTER.
  absl::StatusOr<FileDescriptor> Open(const std::string& digest) const { return OpenConfined(directory_, digest); }
  bool Has(const std::string& digest) const { return Open(digest).ok(); }
  void Remove(const std::string& digest) const;
  // Digests of everything in it.
  std::vector<std::string> List() const;

  const std::string& directory() const { return directory_; }

 private:
  explicit ContentStore(std::string directory) : directory_(std::move(directory)) {}

  std::string directory_;
};

}  // namespace h3
