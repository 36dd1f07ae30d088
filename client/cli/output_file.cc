#include "client/cli/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/exit_code.h"
#include "server/base/check.h"
#include "server/base/confined_file.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {

namespace fs = std::filesystem;

fs::path FolderOf(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

const char* SafetensorsType(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return "F32";
    case v1::DTYPE_BF16:
      return "BF16";
    case v1::DTYPE_F16:
      return "F16";
    case v1::DTYPE_F64:
      return "F64";
    case v1::DTYPE_I64:
      return "I64";
    default:
      break;
  }
  H3_CHECK(false);  // The client library hands out no other type.
  return "";
}

// Length, JSON, and spaces that bring the data to a multiple of 8.
std::string HeaderBytes(absl::Span<const client::Tensor> tensors) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  uint64_t offset = 0;
  for (const client::Tensor& tensor : tensors) {
    const uint64_t end = offset + tensor.data.size();
    json[tensor.name] = {{"dtype", SafetensorsType(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i));
  return bytes + text;
}

absl::Status WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t done = write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return absl::InternalError(absl::StrCat("cannot write: ", strerror(errno)));
    bytes.remove_prefix(static_cast<size_t>(done));
  }
  return absl::OkStatus();
}

absl::Status WriteTensors(int fd, absl::Span<const client::Tensor> tensors) {
  H3_RETURN_IF_ERROR(WriteAll(fd, HeaderBytes(tensors)));
  for (const client::Tensor& tensor : tensors) H3_RETURN_IF_ERROR(WriteAll(fd, tensor.data));
  return absl::OkStatus();
}

absl::Status WriteTo(const std::string& path, absl::Span<const client::Tensor> tensors) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) return absl::InternalError(absl::StrCat("cannot create it: ", strerror(errno)));
  H3_RETURN_IF_ERROR(WriteTensors(file.get(), tensors));
  if (fsync(file.get()) != 0) return absl::InternalError(absl::StrCat("cannot write: ", strerror(errno)));
  return absl::OkStatus();
}

// A pipe or a device is written into, not replaced.
bool IsStream(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

absl::Status WriteStream(const std::string& path, absl::Span<const client::Tensor> tensors) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0) return absl::InternalError(absl::StrCat("cannot open it: ", strerror(errno)));
  return WriteTensors(file.get(), tensors);
}

absl::Status Name(const std::string& path, const absl::Status& status) {
  return status.ok() ? status : absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

}  // namespace

bool IsStandardOutput(const std::string& path) { return path == "-" || path == "/dev/stdout"; }

absl::Status CheckOutputPath(const std::string& path) {
  const auto refuse = [&path](absl::string_view what) { return UsageError(absl::StrCat("--output ", path, ": ", what)); };
  if (IsStandardOutput(path)) {
    if (isatty(STDOUT_FILENO) != 1) return absl::OkStatus();
    return refuse("the result is binary and standard output is a terminal; send it to a file or a pipe");
  }
  if (path.empty()) return UsageError("--output needs the name of a file");
  struct stat info;
  const bool exists = stat(path.c_str(), &info) == 0;
  if (!exists && errno != ENOENT && errno != ENOTDIR && errno != EACCES) return refuse(strerror(errno));
  if (exists && S_ISDIR(info.st_mode)) return refuse("that is a folder; name a file in it");
  if (exists && S_ISSOCK(info.st_mode)) return refuse("that is a socket; name a file");
  if (exists && access(path.c_str(), W_OK) != 0) return refuse(absl::StrCat("it cannot be written: ", strerror(errno)));
  if (exists && !S_ISREG(info.st_mode)) return absl::OkStatus();
  const fs::path folder = FolderOf(path);
  if (stat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return refuse(absl::StrCat("there is no folder ", folder.string(), "; create it first"));
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return refuse(absl::StrCat("the folder ", folder.string(), " cannot be written: ", strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status WriteSafetensors(const std::string& path, absl::Span<const client::Tensor> tensors) {
  if (IsStandardOutput(path)) return Name("standard output", WriteTensors(STDOUT_FILENO, tensors));
  if (IsStream(path)) return Name(path, WriteStream(path, tensors));
  const fs::path name = fs::path(path).filename();
  const std::string temporary = (FolderOf(path) / absl::StrCat(".", name.string(), ".", getpid(), ".tmp")).string();
  absl::Status status = WriteTo(temporary, tensors);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = absl::InternalError(absl::StrCat("cannot move it into place: ", strerror(errno)));
  }
  if (!status.ok()) unlink(temporary.c_str());
  return Name(path, status);
}

}  // namespace h3::ctl
