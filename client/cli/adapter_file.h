// An adapter file of this machine, as the offline commands read it: its header, and the few bytes of it that say a scale.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/format/adapter.h"
#include "server/format/geometry.h"
#include "server/format/request.h"
#include "server/format/safetensors.h"

namespace h3::ctl {

// Sizes of the released H3, full or pruned (h3-format.md, section 1).
Geometry ReleasedGeometry(bool pruned);

class AdapterFile {
 public:
  // `path`: a safetensors file, or a directory as PEFT saves it. Blocks on the disk. NOT_FOUND; INVALID_ARGUMENT / MALFORMED_FILE.
  static absl::StatusOr<AdapterFile> Open(const std::string& path);

  const SafetensorsHeader& header() const { return header_; }
  // What it is on a base of this geometry; blocks on the disk. Whether a base has a silu grid is not the file's business: one is
  // taken for granted, and the PEFT configuration beside the file is read. Refuses an adapter for the reasons a server would.
  absl::StatusOr<AdapterManifest> Read(const Geometry& geometry, IntakeOptions options = {}) const;

 private:
  AdapterFile(std::string path, std::string peft_config, SafetensorsHeader header)
      : path_(std::move(path)), peft_config_(std::move(peft_config)), header_(std::move(header)) {}

  std::string path_;
  std::string peft_config_;
  SafetensorsHeader header_;
};

}  // namespace h3::ctl
