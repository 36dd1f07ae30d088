// Opens files by names that strangers choose, without letting a name leave its directory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace h3 {

// Owns a descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// INVALID_ARGUMENT / UNKNOWN_ADAPTER unless `name` is a relative path of 1 to 255 bytes of UTF-8 without empty, `.` or `..` parts,
// backslashes, percent signs, control characters or NUL.
absl::Status CheckConfinedName(absl::string_view name);

// Opens the regular file `directory`/`name``suffix` for reading. Every component is opened without following links that leave the
// directory; a FIFO or a device is never opened for data. Blocks on the disk.
// As CheckConfinedName, or NOT_FOUND / UNKNOWN_ADAPTER; messages hold the name and never a path.
absl::StatusOr<FileDescriptor> OpenConfined(const std::string& directory, const std::string& name, absl::string_view suffix = "");

// The whole file from its first byte. RESOURCE_EXHAUSTED above `max_bytes`. Blocks.
absl::StatusOr<std::string> ReadAll(const FileDescriptor& file, int64_t max_bytes);

// Its first `bytes` bytes, or fewer where it ends before. Blocks.
absl::StatusOr<std::string> ReadBegin(const FileDescriptor& file, int64_t bytes);

}  // namespace h3
