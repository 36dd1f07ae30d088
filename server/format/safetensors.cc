#include "server/format/safetensors.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxRank = 8;
constexpr int64_t kSignatureBytes = 512;  // Enough of a file to say what else it is.

absl::Status Malformed(absl::string_view what, absl::string_view tensor = "", ErrorDetails details = {}) {
  if (!tensor.empty()) details["tensor"] = std::string(tensor);
  return RefuseArgument(reason::kMalformedFile,
                        absl::StrCat("not a well-formed safetensors file: ", tensor.empty() ? "" : absl::StrCat("tensor ", tensor, ": "), what),
                        std::move(details));
}

// A file of another kind, told by its first bytes: what it is and what to do. Null where they say nothing.
struct OtherFormat {
  absl::string_view looks_like;  // For scripts.
  absl::string_view what;
};

const OtherFormat* RecogniseOther(absl::string_view begin) {
  static constexpr OtherFormat kEmpty = {"empty", "the file is empty; download it again"};
  static constexpr OtherFormat kLfs = {
      "git-lfs-pointer",
      "it is a Git LFS pointer, a few lines that stand for the file; fetch the file itself with `git lfs pull`"};
  static constexpr OtherFormat kHtml = {
      "html",
      "it is a web page saved under this name (a login or error page, as a rule); log in, or take the direct link, and download "
      "it again"};
  static constexpr OtherFormat kZip = {
      "zip",
      "it is a zip archive (PyTorch's .pt, .pth and .ckpt files are zips too); unpack it, or convert the checkpoint to "
      "safetensors"};
  static constexpr OtherFormat kPickle = {
      "pickle", "it is a Python pickle (an old PyTorch .pt, .pth or .ckpt), which is never loaded; convert it to safetensors"};
  static constexpr OtherFormat kGguf = {
      "gguf", "it is a GGUF file (llama.cpp's format), which is not read; get the safetensors version, or convert it"};
  if (begin.empty()) return &kEmpty;
  if (absl::StartsWith(begin, "version https://git-lfs")) return &kLfs;
  if (absl::StartsWith(begin, "GGUF")) return &kGguf;
  if (absl::StartsWith(begin, "PK\x03\x04")) return &kZip;
  if (begin.size() >= 2 && begin[0] == '\x80' && begin[1] >= 2 && begin[1] <= 5) return &kPickle;
  absl::string_view text = begin.substr(0, kSignatureBytes);
  if (absl::StartsWith(text, "\xef\xbb\xbf")) text.remove_prefix(3);
  text = absl::StripLeadingAsciiWhitespace(text);
  for (const absl::string_view tag : {"<!doctype", "<html", "<head", "<body", "<?xml", "<!--"}) {
    if (absl::StartsWithIgnoreCase(text, tag)) return &kHtml;
  }
  return nullptr;
}

// No header is where it should be: told by what the file is instead, or else by `what`.
absl::Status NoHeader(absl::string_view begin, absl::string_view what) {
  const OtherFormat* other = RecogniseOther(begin);
  return other == nullptr ? Malformed(what) : Malformed(other->what, "", {{"looks_like", std::string(other->looks_like)}});
}

absl::Status CutShort(int64_t file_bytes, int64_t missing, absl::string_view missing_text, absl::string_view tensor = "") {
  return Malformed(absl::StrCat("the file is cut short: ", file_bytes, " bytes are there, ", missing_text, missing,
                                " are missing; download it again"),
                   tensor,
                   {{"looks_like", "truncated"}, {"bytes", absl::StrCat(file_bytes)}, {"missing_bytes", absl::StrCat(missing)}});
}

// The header as events: no tree is built, so nesting costs nothing and duplicate keys are seen.
// {"name": {"dtype": "F32", "shape": [..], "data_offsets": [b, e]}, "__metadata__": {"key": "text"}}
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  struct Entry {
    TensorInfo info;
    std::vector<int64_t> offsets;
    bool has_dtype = false, has_shape = false, has_offsets = false;
  };

  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool null() override { return Fail("null where a value is needed"); }
  bool boolean(bool) override { return Fail("true or false where a value is needed"); }
  bool number_float(double, const std::string&) override { return Fail("a fraction where a whole number is needed"); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("binary"); }
  bool number_integer(int64_t value) override { return Number(value); }
  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return Fail("a number above 2^63");
    return Number(static_cast<int64_t>(value));
  }
  bool string(std::string& value) override {
    if (in_metadata_ && depth_ == 2) {
      metadata[key_] = value;
      return true;
    }
    if (depth_ == 2 && field_ == "dtype") {
      const auto dtype = ParseDType(value);
      if (!dtype.has_value()) return Fail(absl::StrCat("unknown dtype ", value.substr(0, 32)));
      entries.back().info.dtype = *dtype;
      entries.back().has_dtype = true;
      return true;
    }
    return Fail("text where it does not belong");
  }
  bool start_object(size_t) override {
    if (depth_ >= 2 || array_) return Fail("nested deeper than a header is");
    if (depth_ == 1) {
      if (!in_metadata_) entries.push_back({.info = {.name = key_}});
      fields_.clear();
    }
    ++depth_;
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ == 1) {
      if (!names_.insert(name).second) return Fail(absl::StrCat("the name ", name.substr(0, 128), " occurs twice"));
      key_ = name;
      in_metadata_ = name == "__metadata__";
      return true;
    }
    if (!fields_.insert(name).second) return Fail(absl::StrCat("the field ", name.substr(0, 128), " occurs twice in ", key_));
    if (in_metadata_) {
      key_ = name;
    } else {
      field_ = name;
      if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") return Fail(absl::StrCat("unknown field ", name.substr(0, 32)));
    }
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ != 2 || array_ || in_metadata_ || field_ == "dtype") return Fail("a list where it does not belong");
    array_ = true;
    (field_ == "shape" ? entries.back().has_shape : entries.back().has_offsets) = true;
    return true;
  }
  bool end_array() override {
    array_ = false;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("the header is not JSON (byte ", position, ")"));
  }

 private:
  bool Fail(std::string what) {
    if (problem.empty()) problem = std::move(what);
    return false;
  }
  bool Number(int64_t value) {
    if (!array_) return Fail("a number where it does not belong");
    if (value < 0) return Fail("a negative number");
    std::vector<int64_t>& list = field_ == "shape" ? entries.back().info.shape : entries.back().offsets;
    if (list.size() >= kMaxRank) return Fail(absl::StrCat("more than ", kMaxRank, " numbers in ", field_));
    list.push_back(value);
    return true;
  }

  int depth_ = 0;
  bool array_ = false;
  bool in_metadata_ = false;
  std::string key_, field_;
  std::set<std::string> names_, fields_;
};

// The byte count that a shape makes, or nullopt where it does not fit int64.
std::optional<int64_t> ShapeBytes(const TensorInfo& info) {
  int64_t bytes = DTypeBytes(info.dtype);
  for (const int64_t size : info.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

}  // namespace

const TensorInfo* SafetensorsHeader::Find(absl::string_view name) const {
  const auto found =
      std::lower_bound(tensors.begin(), tensors.end(), name, [](const TensorInfo& t, absl::string_view n) { return t.name < n; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view begin, int64_t file_bytes) {
  if (begin.size() < kLengthBytes || file_bytes < static_cast<int64_t>(kLengthBytes)) {
    return NoHeader(begin, "shorter than 8 bytes");
  }
  uint64_t length = 0;
  memcpy(&length, begin.data(), kLengthBytes);
  length = le64toh(length);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return NoHeader(begin, absl::StrCat("its header claims ", length, " bytes; at most ", kMaxHeaderBytes, " are read"));
  }
  if (static_cast<int64_t>(length) > file_bytes - static_cast<int64_t>(kLengthBytes) || length > begin.size() - kLengthBytes) {
    const int64_t missing = static_cast<int64_t>(kLengthBytes + length) - file_bytes;
    const bool begun = begin.size() > kLengthBytes && begin[kLengthBytes] == '{';
    if (missing > 0 && begun) return CutShort(file_bytes, missing, "at least ");
    return NoHeader(begin, absl::StrCat("its header claims ", length, " bytes, the file has ", file_bytes));
  }
  const absl::string_view json = begin.substr(kLengthBytes, length);
  if (json.empty() || json.front() != '{') return NoHeader(begin, "the header does not begin with {");
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &reader)) {
    return Malformed(reader.problem.empty() ? "the header is not JSON" : reader.problem);
  }

  SafetensorsHeader header;
  header.file_bytes = file_bytes;
  header.metadata = std::move(reader.metadata);
  const int64_t data_begin = static_cast<int64_t>(kLengthBytes + length);
  int64_t data_end = 0;
  for (const HeaderReader::Entry& entry : reader.entries) {
    if (entry.offsets.size() == 2) data_end = std::max(data_end, entry.offsets[1]);
  }
  for (HeaderReader::Entry& entry : reader.entries) {
    TensorInfo& info = entry.info;
    if (!entry.has_dtype || !entry.has_shape || entry.offsets.size() != 2) {
      return Malformed("needs dtype, shape and two data_offsets", info.name);
    }
    const auto [first, last] = std::pair(entry.offsets[0], entry.offsets[1]);
    if (first > last) return Malformed(absl::StrCat("its bytes ", first, " .. ", last, " end before they begin"), info.name);
    if (last > file_bytes - data_begin) return CutShort(file_bytes, data_end - (file_bytes - data_begin), "", info.name);
    info.offset = data_begin + first;
    info.bytes = last - first;
    if (ShapeBytes(info) != info.bytes) return Malformed(absl::StrCat("its shape does not make its ", info.bytes, " bytes"), info.name);
    header.tensors.push_back(std::move(info));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tuple(a.offset, a.bytes) < std::tuple(b.offset, b.bytes);
  });
  int64_t next = data_begin;
  for (const TensorInfo& info : header.tensors) {
    if (info.offset != next) return Malformed(info.offset < next ? "it overlaps another tensor" : "there is a gap before it", info.name);
    next += info.bytes;
  }
  if (next != file_bytes) return Malformed(absl::StrCat(file_bytes - next, " bytes follow the last tensor"));
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return absl::NotFoundError(absl::StrCat("cannot open the file: ", strerror(errno)));
  return ReadSafetensorsHeader(file);
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const FileDescriptor& file) {
  struct stat info;
  if (fstat(file.get(), &info) != 0) return absl::InternalError("cannot stat an open file");
  if (!S_ISREG(info.st_mode)) return absl::NotFoundError("not a regular file");
  H3_ASSIGN_OR_RETURN(std::string begin, ReadBegin(file, std::min<int64_t>(info.st_size, kSignatureBytes)));
  uint64_t length = 0;
  if (begin.size() >= kLengthBytes) memcpy(&length, begin.data(), kLengthBytes);
  length = le64toh(length);
  // A length that is refused is not worth reading for.
  if (const uint64_t wanted = kLengthBytes + length; length <= static_cast<uint64_t>(kMaxHeaderBytes) && wanted > begin.size()) {
    H3_ASSIGN_OR_RETURN(begin, ReadBegin(file, std::min<int64_t>(info.st_size, static_cast<int64_t>(wanted))));
  }
  return ParseSafetensorsHeader(begin, info.st_size);
}

}  // namespace h3
