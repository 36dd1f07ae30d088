#include "client/cli/request_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/exit_code.h"
#include "server/base/confined_file.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/format/layout.h"
#include "server/format/safetensors.h"

namespace h3::ctl {
namespace {

absl::Status NoSuchFile(absl::string_view what) { return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_FILE", what); }

absl::StatusOr<v1::DType> WireType(const TensorInfo& tensor) {
  switch (tensor.dtype) {
    case DType::kF64:
      return v1::DTYPE_F64;
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kBF16:
      return v1::DTYPE_BF16;
    case DType::kI64:
      return v1::DTYPE_I64;
    default:
      return RefuseArgument(reason::kBadTensor,
                            absl::StrCat("tensor ", tensor.name, " is ", DTypeName(tensor.dtype),
                                         "; a request carries F64, F32, F16, BF16 or I64"),
                            {{"tensor", tensor.name}, {"dtype", std::string(DTypeName(tensor.dtype))}});
  }
}

absl::Status SetSize(absl::string_view field, int64_t value, int32_t& into) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    return RefuseArgument(reason::kBadLayout, absl::StrCat("layout: ", field, " = ", value, " is not a count"),
                          {{"field", std::string(field)}});
  }
  into = static_cast<int32_t>(value);
  return absl::OkStatus();
}

absl::StatusOr<v1::Reference> ToProto(const Reference& reference) {
  v1::Reference proto;
  switch (reference.kind) {
    case ReferenceKind::kImage:
      proto.set_kind(v1::REFERENCE_KIND_IMAGE);
      break;
    case ReferenceKind::kVideo:
      proto.set_kind(v1::REFERENCE_KIND_VIDEO);
      break;
    case ReferenceKind::kAudio:
      proto.set_kind(v1::REFERENCE_KIND_AUDIO);
      break;
  }
  int32_t frames = 0, height = 0, width = 0, audio = 0;
  H3_RETURN_IF_ERROR(SetSize("refs.latent_frames", reference.latent_frames, frames));
  H3_RETURN_IF_ERROR(SetSize("refs.latent_height", reference.latent_height, height));
  H3_RETURN_IF_ERROR(SetSize("refs.latent_width", reference.latent_width, width));
  H3_RETURN_IF_ERROR(SetSize("refs.audio_latents", reference.audio_latents, audio));
  proto.set_latent_frames(frames);
  proto.set_latent_height(height);
  proto.set_latent_width(width);
  proto.set_audio_latents(audio);
  return proto;
}

absl::StatusOr<v1::Layout> ToProto(const Layout& layout) {
  v1::Layout proto;
  for (const Keyframe keyframe : layout.keyframes) {
    proto.add_keyframes(keyframe == Keyframe::kFirst ? v1::KEYFRAME_FIRST : v1::KEYFRAME_LAST);
  }
  for (const Reference& reference : layout.references) {
    H3_ASSIGN_OR_RETURN(*proto.add_references(), ToProto(reference));
  }
  int32_t text = 0, frames = 0, height = 0, width = 0, audio = 0;
  H3_RETURN_IF_ERROR(SetSize("text_tokens", layout.text_tokens, text));
  H3_RETURN_IF_ERROR(SetSize("latent_frames", layout.latent_frames, frames));
  H3_RETURN_IF_ERROR(SetSize("latent_height", layout.latent_height, height));
  H3_RETURN_IF_ERROR(SetSize("latent_width", layout.latent_width, width));
  H3_RETURN_IF_ERROR(SetSize("audio_latents", layout.audio_latents, audio));
  proto.set_text_tokens(text);
  proto.set_latent_frames(frames);
  proto.set_latent_height(height);
  proto.set_latent_width(width);
  proto.set_audio_latents(audio);
  return proto;
}

bool IsTarget(absl::string_view name) { return name == "target_video" || name == "target_audio_rows"; }

// "condition_video.10" -> {"condition_video.", 10}: numbers in their order, 2 before 10.
std::pair<absl::string_view, int> NumberedName(absl::string_view name) {
  for (const absl::string_view prefix : {"condition_video.", "condition_audio."}) {
    absl::string_view number = name;
    int n = 0;
    if (absl::ConsumePrefix(&number, prefix) && absl::SimpleAtoi(number, &n)) return {prefix, n};
  }
  return {name, -1};
}

bool IsCondition(absl::string_view name) {
  return name == "text" || name == "text_token_tags" || absl::StartsWith(name, "condition_video.") ||
         absl::StartsWith(name, "condition_audio.");
}

}  // namespace

// The whole file, read-only. A request of any size is announced to the server before a byte of it is read.
class RequestFile::Mapping {
 public:
  static absl::StatusOr<std::shared_ptr<const Mapping>> Open(const std::string& path) {
    const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat info;
    if (file.get() < 0 || fstat(file.get(), &info) != 0) return NoSuchFile(absl::StrCat("cannot open: ", strerror(errno)));
    if (!S_ISREG(info.st_mode)) return NoSuchFile("not a regular file");
    auto mapping = std::make_shared<Mapping>();
    if (info.st_size == 0) return mapping;
    const auto size = static_cast<size_t>(info.st_size);
    void* const begin = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (begin == MAP_FAILED) return absl::InternalError(absl::StrCat("cannot map: ", strerror(errno)));
    mapping->bytes_ = absl::string_view(static_cast<const char*>(begin), size);
    return mapping;
  }

  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
  }

  absl::string_view bytes() const { return bytes_; }

 private:
  absl::string_view bytes_;
};

RequestFile::RequestFile(std::shared_ptr<const Mapping> mapping) : mapping_(std::move(mapping)) {}

absl::StatusOr<RequestFile> RequestFile::Open(const std::string& path) {
  absl::StatusOr<std::shared_ptr<const Mapping>> mapping = Mapping::Open(path);
  if (!mapping.ok()) return Annotate(mapping.status(), path);
  RequestFile request(*std::move(mapping));
  if (const absl::Status status = request.Read(request.mapping_->bytes()); !status.ok()) return Annotate(status, path);
  return request;
}

absl::Status RequestFile::Read(absl::string_view bytes) {
  H3_ASSIGN_OR_RETURN(const SafetensorsHeader header, ParseSafetensorsHeader(bytes, static_cast<int64_t>(bytes.size())));
  const auto json = header.metadata.find("layout");
  if (json == header.metadata.end()) {
    return RefuseArgument(
        reason::kBadLayout,
        "no `layout` in the file's metadata; a request file holds one as JSON, as the files in tests/golden/inputs do");
  }
  H3_ASSIGN_OR_RETURN(const RequestLayout layout, ParseRequestLayout(json->second));
  H3_ASSIGN_OR_RETURN(layout_, ToProto(layout.layout));
  base_sigma_ = layout.base_sigma;
  video_shift_ = layout.video_shift;
  audio_shift_ = layout.audio_shift;
  for (const TensorInfo& tensor : header.tensors) {
    const bool target = IsTarget(tensor.name);
    if (!target && !IsCondition(tensor.name)) continue;
    H3_ASSIGN_OR_RETURN(const v1::DType dtype, WireType(tensor));
    (target ? targets_ : conditions_)
        .push_back({.name = tensor.name,
                    .dtype = dtype,
                    .shape = tensor.shape,
                    .data = bytes.substr(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes))});
  }
  std::sort(conditions_.begin(), conditions_.end(),
            [](const auto& a, const auto& b) { return NumberedName(a.name) < NumberedName(b.name); });
  return absl::OkStatus();
}

}  // namespace h3::ctl
