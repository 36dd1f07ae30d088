#include "server/tensor/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace h3 {
namespace {

// What the SIGBUS handler may look at: lock-free and never freed. A slot is in use while `end` is not 0.
struct Range {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
};
constexpr int kMaxRanges = 1024;  // A reference directory of the released model has 14 shards.
std::array<Range, kMaxRanges> ranges;

void RegisterRange(const char* data, int64_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  for (Range& range : ranges) {
    uintptr_t free_slot = 0;
    if (!range.begin.compare_exchange_strong(free_slot, begin)) continue;
    range.end.store(begin + static_cast<uintptr_t>(size));
    return;
  }
}

void UnregisterRange(const char* data) {
  for (Range& range : ranges) {
    if (range.begin.load() != reinterpret_cast<uintptr_t>(data)) continue;
    range.end.store(0);
    range.begin.store(0);
    return;
  }
}

void OnSigbus(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Range& range : ranges) {
    if (address < range.begin.load() || address >= range.end.load()) continue;
    constexpr char kMessage[] = "fatal: a mapped checkpoint file was truncated while it was served; leaving\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
    _exit(kMappedFileLost);
  }
  ::signal(signal, SIG_DFL);
  raise(signal);
}

int64_t ModificationTime(const struct stat& info) { return info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec; }

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::NotFoundError(absl::StrCat("cannot open the file: ", strerror(errno)));
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) {
    close(fd);
    return absl::NotFoundError("not a regular file, or empty");
  }
  void* data = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(fd);
    return absl::InternalError(absl::StrCat("cannot map the file: ", strerror(error)));
  }
  RegisterRange(static_cast<const char*>(data), info.st_size);
  return std::unique_ptr<MappedFile>(
      new MappedFile(fd, static_cast<const char*>(data), info.st_size, ModificationTime(info)));
}

MappedFile::~MappedFile() {
  UnregisterRange(data_);
  munmap(const_cast<char*>(data_), static_cast<size_t>(size_));
  close(fd_);
}

absl::Status MappedFile::CheckUnchanged() const {
  struct stat info;
  H3_CHECK(fstat(fd_, &info) == 0);
  if (info.st_size == size_ && ModificationTime(info) == mtime_ns_) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("a mapped checkpoint file was changed in place (size ", size_, " -> ", info.st_size,
                                          "); replace files by renaming a new one over them"));
}

void InstallMappedFileGuard() {
  struct sigaction action = {};
  action.sa_sigaction = &OnSigbus;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  H3_CHECK(sigaction(SIGBUS, &action, nullptr) == 0);
}

}  // namespace h3
