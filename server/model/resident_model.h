// The one resident model of a process: weights and the sites over them. Immutable after Load; const and safe to read from any
// thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "server/format/checkpoint.h"
#include "server/format/plan.h"
#include "server/nn/linear.h"
#include "server/tensor/stored_weights.h"
#include "server/vram/ledger.h"

namespace h3 {

// The full model's silu(time embedding) for a pruned base: a table over a uniform grid of t, or the time embedder itself (exact).
struct SiluGrid {
  at::Tensor table;  // float [rows, width], or undefined:
  at::Tensor in_weight, in_bias, out_weight, out_bias;
  int64_t width = 0;
  std::vector<std::string> warnings;  // A 16-bit grid states its loss.
};

struct ResidentModelOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  bool copy_weights = false;
  // Type of the block stack; nullopt keeps every tensor's own. Patch projections, time embedder and output heads stay float32,
  // and so do the AdaLN projections of a pruned model, as in the released files.
  std::optional<DType> dtype;
  // The AdaLN projections stay in mapped host memory, from where modulation streams them through a staging buffer.
  bool adaln_on_host = false;
  std::string silu_grid;  // Path of a grid file or of a full H3 file; empty: none. Ignored on a full base.
  // Bytes that the temporaries of a row tile may take: fixes the tile, together with the shapes.
  int64_t workspace_bytes = int64_t{256} << 20;
};

class ResidentModel {
 public:
  // Blocks for as long as reading the weights takes (the fingerprint reads all of them).
  static absl::StatusOr<std::unique_ptr<ResidentModel>> Load(const Checkpoint& checkpoint, VramLedger& ledger,
                                                             const ResidentModelOptions& options);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const Geometry& geometry() const { return checkpoint_.geometry; }
  const std::vector<Site>& sites() const { return sites_; }
  // H3_CHECKs that the name exists.
  int SiteIndex(const std::string& name) const;
  const BaseLinear& linear(int site) const { return *linears_[static_cast<size_t>(site)]; }
  // A norm weight or the table, by canonical name.
  const at::Tensor& tensor(const std::string& name) const { return weights_->Single(name); }
  const std::optional<SiluGrid>& silu_grid() const { return silu_grid_; }
  const StoredWeights& weights() const { return *weights_; }
  // On the device thread: StoredWeights::AuditPiece.
  absl::StatusOr<bool> AuditPiece() { return weights_->AuditPiece(); }

  c10::Device device() const { return options_.device; }
  // Type of the residual stream and of the block linears.
  c10::ScalarType compute() const { return compute_; }
  bool interleaved_qkv() const { return checkpoint_.qkv_layout == QkvLayout::kInterleaved; }
  // What the planner needs to know.
  const PlanBase& plan_base() const { return plan_base_; }
  int64_t workspace_bytes() const { return options_.workspace_bytes; }
  // Rows of one tile of a sequence of `rows` rows: a function of shapes, dtype and configuration only.
  int64_t RowTile(int64_t rows) const;

  const std::string& fingerprint() const { return fingerprint_; }

 private:
  ResidentModel(const Checkpoint& checkpoint, const ResidentModelOptions& options);

  const Checkpoint checkpoint_;
  const ResidentModelOptions options_;
  const std::vector<Site> sites_;
  const PlanBase plan_base_;
  absl::flat_hash_map<std::string, int> site_index_;
  std::unique_ptr<StoredWeights> weights_;
  std::vector<std::unique_ptr<BaseLinear>> linears_;
  std::optional<SiluGrid> silu_grid_;
  c10::ScalarType compute_ = c10::ScalarType::Float;
  std::string fingerprint_;
};

}  // namespace h3
