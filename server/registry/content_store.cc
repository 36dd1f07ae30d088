#include "server/registry/content_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kTemporary = "incoming-";
constexpr size_t kDigestChars = 64;

absl::Status DiskFailure(int error) {
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return Refuse(absl::StatusCode::kResourceExhausted, reason::kDiskFull,
                  "the disk of the content store is full; free some space, or give --state another directory");
  }
  return absl::InternalError(absl::StrCat("the content store cannot be written: ", strerror(error)));
}

absl::Status Sync(int fd) { return fsync(fd) == 0 ? absl::OkStatus() : DiskFailure(errno); }

}  // namespace

IncomingContent::~IncomingContent() {
  if (!committed_) unlink(temporary_.c_str());
}

absl::Status IncomingContent::Append(absl::string_view bytes) {
  if (static_cast<int64_t>(bytes.size()) > bytes_ - written_) {
    return RefuseArgument(reason::kMalformedFile, absl::StrCat("more bytes than the ", bytes_, " that were announced"));
  }
  sha_.Update(bytes);
  while (!bytes.empty()) {
    const ssize_t done = pwrite(file_.get(), bytes.data(), bytes.size(), written_);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return DiskFailure(errno);
    written_ += done;
    bytes.remove_prefix(static_cast<size_t>(done));
  }
  return absl::OkStatus();
}

absl::Status IncomingContent::Commit() {
  if (written_ != bytes_) {
    return RefuseArgument(reason::kMalformedFile, absl::StrCat(written_, " bytes came of ", bytes_, " that were announced; send it again"),
                          {{"bytes", absl::StrCat(written_)}, {"expected", absl::StrCat(bytes_)}});
  }
  const std::string digest = sha_.FinishHex();
  if (digest != digest_) {
    return RefuseArgument(reason::kMalformedFile,
                          absl::StrCat("what came has the digest ", digest, ", announced was ", digest_, "; send it again"),
                          {{"digest", digest}, {"expected", digest_}});
  }
  // Content, then name, then directory: after a power loss the name leads to all of the content or is not there.
  H3_RETURN_IF_ERROR(Sync(file_.get()));
  if (rename(temporary_.c_str(), absl::StrCat(directory_, "/", digest_).c_str()) != 0) return DiskFailure(errno);
  committed_ = true;
  const FileDescriptor directory(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return directory.get() < 0 ? DiskFailure(errno) : Sync(directory.get());
}

absl::StatusOr<ContentStore> ContentStore::Create(std::string directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return absl::FailedPreconditionError(absl::StrCat("cannot make the content store: ", error.message()));
  fs::permissions(directory, fs::perms::owner_all, error);
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (absl::StartsWith(it->path().filename().string(), kTemporary)) fs::remove(it->path(), ignored);
  }
  if (error) return absl::FailedPreconditionError(absl::StrCat("cannot read the content store: ", error.message()));
  return ContentStore(std::move(directory));
}

absl::StatusOr<std::unique_ptr<IncomingContent>> ContentStore::Begin(const std::string& digest, int64_t bytes) const {
  std::string temporary = absl::StrCat(directory_, "/", kTemporary, "XXXXXX");
  FileDescriptor file(mkostemp(temporary.data(), O_CLOEXEC));
  if (file.get() < 0) return DiskFailure(errno);
  const int fd = file.get();
  std::unique_ptr<IncomingContent> incoming(new IncomingContent(directory_, temporary, std::move(file), digest, bytes));
  // Says at once that it will not fit, before gigabytes have come. A file system that cannot reserve writes as it goes.
  if (bytes > 0) {
    const int failed = fallocate(fd, 0, 0, bytes) == 0 ? 0 : errno;
    if (failed != 0 && failed != EOPNOTSUPP && failed != ENOSYS) return DiskFailure(failed);
  }
  return incoming;
}

void ContentStore::Remove(const std::string& digest) const {
  if (CheckConfinedName(digest).ok()) unlink(absl::StrCat(directory_, "/", digest).c_str());
}

std::vector<std::string> ContentStore::List() const {
  std::vector<std::string> digests;
  std::error_code error;
  for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    // What lies there beside is not ours.
    if (name.size() == kDigestChars && name.find_first_not_of("0123456789abcdef") == std::string::npos) digests.push_back(std::move(name));
  }
  return digests;
}

}  // namespace h3
