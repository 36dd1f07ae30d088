// Finds out what a checkpoint is from its headers: container, prefix, row orders, geometry, partition, and where each canonical
// tensor lies. Reads no weight.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/format/geometry.h"
#include "server/format/safetensors.h"

namespace h3 {

enum class Container { kSingleFile, kReferenceDirectory, kDiffusersDirectory };
enum class QkvLayout { kAuto, kStacked, kInterleaved };  // Of attn.qkv_proj rows: [q; k; v], or [q0 k0 v0 q1 k1 v1 ...].
enum class Partition { kUnknown, kFl2va, kRef2va };

absl::string_view ContainerName(Container container);  // "single file", "reference directory", "diffusers directory"
absl::string_view QkvLayoutName(QkvLayout layout);     // "auto", "stacked", "interleaved"
absl::string_view PartitionName(Partition partition);  // "unknown", "fl2va", "ref2va"

// Rows [row_begin, row_begin + rows) of one stored tensor. A bias or a norm counts its elements as rows.
struct StoredRows {
  int file = 0;  // Index into Checkpoint::files.
  TensorInfo tensor;
  int64_t row_begin = 0;
  int64_t rows = 0;
};

// A canonical tensor: its pieces stacked on the row axis. One piece as a rule; a diffusers directory gives three for
// attn.qkv_proj (q, k, v) and two for mlp.fc1 (gate, up: stored the other way round).
struct CheckpointTensor {
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;
  std::vector<StoredRows> pieces;
};

struct Checkpoint {
  std::string name;  // Last component of the path, for people.
  Container container = Container::kSingleFile;
  QkvLayout qkv_layout = QkvLayout::kStacked;  // Never kAuto. Of every qkv_proj, the refiner's included.
  Partition partition = Partition::kUnknown;
  Geometry geometry;
  float eps = 1e-5f;
  std::vector<float> rope_inv_freq;  // From rope.inv_freq, or computed: 1 / theta^(2i / 2n).
  std::vector<std::string> files;    // Paths.
  std::map<std::string, CheckpointTensor> tensors;  // Canonical name -> where. Exactly ExpectedTensors(geometry).

  int64_t TotalBytes() const;  // Of the stored tensors.
};

struct CheckpointOptions {
  QkvLayout qkv_layout = QkvLayout::kAuto;
  Partition partition = Partition::kUnknown;  // kUnknown: as the files declare.
};

// `path`: a safetensors file, or a directory with or without an index. Blocks on the disk.
// NOT_FOUND: no such path. INVALID_ARGUMENT with MALFORMED_FILE (a shard), SHAPE_MISMATCH (tensors contradict each other or
// config.json), BAD_TENSOR (missing, unexpected or non-float tensors, all listed), UNSUPPORTED_BASE (quantised layers, by format name).
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& path, const CheckpointOptions& options = {});

}  // namespace h3
