// A file mapped read-only. Renaming another over it or deleting it is harmless: the mapping keeps the old content. Changing it
// in place or truncating it is not, and is noticed.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace h3 {

class MappedFile {
 public:
  // NOT_FOUND: no such regular file. The descriptor stays open as long as the object.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return data_; }
  int64_t size() const { return size_; }

  // DATA_LOSS when the mapped file's size or modification time is no longer what it was. Cheap (one fstat).
  absl::Status CheckUnchanged() const;

 private:
  MappedFile(int fd, const char* data, int64_t size, int64_t mtime_ns) : fd_(fd), data_(data), size_(size), mtime_ns_(mtime_ns) {}

  const int fd_;
  const char* const data_;
  const int64_t size_;
  const int64_t mtime_ns_;
};

// From now on a SIGBUS inside any MappedFile (its file was truncated) ends the process with exit code kMappedFileLost and one
// line on stderr, instead of a core dump. Another SIGBUS keeps its default action. Call once, before threads start.
inline constexpr int kMappedFileLost = 74;
void InstallMappedFileGuard();

}  // namespace h3
