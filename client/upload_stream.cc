#include <grpcpp/support/sync_stream.h>
#include <openssl/evp.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/call.h"
#include "client/streams.h"
#include "proto/support/status.h"

namespace h3::client {
namespace {

// A file that is read twice, front to back, in pieces: for its digest and for sending.
class Source {
 public:
  // NOT_FOUND / NO_SUCH_FILE: not there, not a regular file, not readable.
  static absl::StatusOr<Source> Open(const std::string& path) {
    const auto refuse = [&path](absl::string_view what) {
      return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_FILE", absl::StrCat(path, ": ", what), {{"file", path}});
    };
    std::error_code error;
    // Asked first: opening a pipe would block.
    if (!std::filesystem::is_regular_file(path, error)) return refuse(error ? error.message() : "not a regular file");
    const auto bytes = static_cast<uint64_t>(std::filesystem::file_size(path, error));
    if (error) return refuse(error.message());
    Source source(path, bytes);
    if (!source.file_.is_open()) return refuse("cannot open it for reading");
    return source;
  }

  uint64_t bytes() const { return bytes_; }

  // The next piece, as much as fits a chunk; empty at the end. ABORTED / FILE_CHANGED: the file is shorter than it was.
  absl::Status Next(std::string& piece) {
    const uint64_t size = std::min<uint64_t>(bytes_ - read_, kChunkBytes);
    piece.resize(size);
    file_.read(piece.data(), static_cast<std::streamsize>(size));
    if (static_cast<uint64_t>(file_.gcount()) != size) {
      return Refuse(absl::StatusCode::kAborted, "FILE_CHANGED",
                    absl::StrCat(path_, " ended, or could not be read, after ", read_ + static_cast<uint64_t>(file_.gcount()),
                                 " of ", bytes_, " bytes; is somebody writing to it?"),
                    {{"file", path_}});
    }
    read_ += size;
    return absl::OkStatus();
  }

  void Rewind() {
    file_.seekg(0);
    read_ = 0;
  }

 private:
  Source(const std::string& path, uint64_t bytes) : path_(path), bytes_(bytes), file_(path, std::ios::binary) {}

  std::string path_;
  uint64_t bytes_;
  std::ifstream file_;
  uint64_t read_ = 0;
};

void Report(const std::function<void(uint64_t, uint64_t)>& event, uint64_t bytes, uint64_t total) {
  if (event) event(bytes, total);
}

// 64 lower-case hex digits. Stops with CANCELLED; the deadline is found passed by the first write.
absl::StatusOr<std::string> Digest(Source& source, const UploadEvents& events, const CallOptions& options) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  bool good = context != nullptr && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  uint64_t hashed = 0;
  for (std::string piece; good && hashed < source.bytes();) {
    if (options.cancel != nullptr && options.cancel->cancelled()) {
      return Refuse(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled before anything was sent");
    }
    if (const absl::Status read = source.Next(piece); !read.ok()) return read;
    good = EVP_DigestUpdate(context.get(), piece.data(), piece.size()) == 1;
    hashed += piece.size();
    Report(events.hashed, hashed, source.bytes());
  }
  std::string digest(32, '\0');
  if (!good || EVP_DigestFinal_ex(context.get(), reinterpret_cast<unsigned char*>(digest.data()), nullptr) != 1) {
    return absl::InternalError("OpenSSL cannot compute SHA-256");
  }
  return absl::BytesToHexString(digest);
}

}  // namespace

absl::StatusOr<v1::UploadAdapterResponse> RunUploadStream(v1::Adapters::StubInterface& stub, const std::string& name,
                                                          const std::string& path, const UploadOptions& upload,
                                                          const CallOptions& options, const std::string& server) {
  Call call(options, server);  // The time that hashing takes is part of the call's.
  absl::StatusOr<Source> source = Source::Open(path);
  if (!source.ok()) return source.status();
  absl::StatusOr<std::string> digest = Digest(*source, upload.events, options);
  if (!digest.ok()) return digest.status();
  source->Rewind();

  v1::UploadAdapterRequest request;
  v1::UploadHeader& header = *request.mutable_header();
  header.set_name(name);
  header.set_bytes(source->bytes());
  header.set_digest(*std::move(digest));
  header.set_check_only(upload.check_only);
  v1::UploadAdapterResponse response;
  const auto stream = stub.UploadAdapter(call.context(), &response);
  absl::Status broken;
  // A write fails where the server has ended the call; Finish says how: with a refusal, or because it has seen enough.
  bool open = stream->Write(request);
  for (uint64_t sent = 0; open && sent < source->bytes();) {
    broken = source->Next(*request.mutable_chunk());
    if (!broken.ok()) break;
    open = stream->Write(request);
    if (!open) break;
    sent += request.chunk().size();
    Report(upload.events.sent, sent, source->bytes());
  }
  if (!broken.ok()) {
    call.context()->TryCancel();
  } else if (open) {
    stream->WritesDone();
  }
  const absl::Status end = call.End(stream->Finish());
  if (!broken.ok()) return broken;
  if (!end.ok()) return end;
  return response;
}

}  // namespace h3::client
