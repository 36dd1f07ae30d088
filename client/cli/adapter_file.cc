#include "client/cli/adapter_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "server/base/confined_file.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {

namespace fs = std::filesystem;

// Of the released H3.
constexpr int64_t kGridWidth = 2688;

std::string ReadText(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

Geometry ReleasedGeometry(bool pruned) {
  return {.hidden = 5376,
          .blocks = 50,
          .refiner_blocks = 2,
          .heads = 56,
          .head_dim = 128,
          .ffn = 14336,
          .video_channels = 24,
          .audio_channels = 32,
          .text_width = 5120,
          .time_input = pruned ? 0 : 256,
          .time_hidden = pruned ? 0 : 5376,
          .adaln_width = pruned ? 8 : 2688,
          .curve_rows = pruned ? 1025 : 0,
          .rope_frequencies = 16};
}

absl::StatusOr<AdapterFile> AdapterFile::Open(const std::string& path) {
  std::string file = path, peft_config;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    file = (fs::path(path) / "adapter_model.safetensors").string();
    peft_config = ReadText(fs::path(path) / "adapter_config.json");
  }
  H3_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(file));
  return AdapterFile(std::move(file), std::move(peft_config), std::move(header));
}

absl::StatusOr<AdapterManifest> AdapterFile::Read(const Geometry& geometry, IntakeOptions options) const {
  const TensorReader read = [this](const TensorInfo& info) -> absl::StatusOr<std::string> {
    const FileDescriptor file(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    std::string bytes(static_cast<size_t>(info.bytes), '\0');
    if (pread(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(info.offset)) != static_cast<ssize_t>(bytes.size())) {
      return absl::InternalError(absl::StrCat("cannot read tensor ", info.name));
    }
    return bytes;
  };
  options.base_has_grid = true;
  options.grid_width = kGridWidth;
  options.settings.peft_config = peft_config_;
  return ReadAdapter(header_, read, geometry, options);
}

}  // namespace h3::ctl
