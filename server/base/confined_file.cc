#include "server/base/confined_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/base/text.h"

namespace h3 {
namespace {

absl::Status NoSuch(absl::string_view name) {
  return Refuse(absl::StatusCode::kNotFound, reason::kUnknownAdapter,
                absl::StrCat("no adapter ", name, "; `h3ctl adapters list` shows what there is"), {{"adapter", std::string(name)}});
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

absl::Status CheckConfinedName(absl::string_view name) {
  const auto refuse = [](absl::string_view why) {
    return RefuseArgument(reason::kUnknownAdapter, absl::StrCat("not an adapter name: ", why));
  };
  if (name.empty() || name.size() > 255) return refuse("it must have 1 to 255 bytes");
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '\\' || c == '%') {
      return refuse("control characters, backslashes and percent signs are not allowed");
    }
  }
  if (!IsText(name)) return refuse("it is not UTF-8");
  for (const absl::string_view part : absl::StrSplit(name, '/')) {
    if (part.empty() || part == "." || part == "..") return refuse("it must be a plain relative path, without empty parts, . or ..");
  }
  return absl::OkStatus();
}

absl::StatusOr<FileDescriptor> OpenConfined(const std::string& directory, const std::string& name, absl::string_view suffix) {
  H3_RETURN_IF_ERROR(CheckConfinedName(name));
  const FileDescriptor root(open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (root.get() < 0) return NoSuch(name);
  open_how how = {};
  how.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;  // A FIFO must not block the open; what it is comes from fstat.
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  FileDescriptor file(static_cast<int>(syscall(SYS_openat2, root.get(), absl::StrCat(name, suffix).c_str(), &how, sizeof(how))));
  struct stat info;
  if (file.get() < 0 || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return NoSuch(name);
  return file;
}

absl::StatusOr<std::string> ReadAll(const FileDescriptor& file, int64_t max_bytes) {
  struct stat info;
  if (fstat(file.get(), &info) != 0) return absl::InternalError("cannot stat an open file");
  if (info.st_size > max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the file has ", info.st_size, " bytes; at most ", max_bytes, " are read"));
  }
  return ReadBegin(file, info.st_size);
}

absl::StatusOr<std::string> ReadBegin(const FileDescriptor& file, int64_t bytes) {
  std::string content(static_cast<size_t>(bytes), '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = pread(file.get(), content.data() + done, std::min<size_t>(content.size() - done, 1 << 24),
                              static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::InternalError(absl::StrCat("cannot read the file: ", strerror(errno)));
    if (got == 0) break;  // The file ends here.
    done += static_cast<size_t>(got);
  }
  content.resize(done);
  return content;
}

}  // namespace h3
