#include "server/model/resident_model.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/device.h"

namespace h3 {
namespace {

// float32 in the released files, and whatever --dtype says: they are small, or everything depends on them.
bool StaysFloat32(absl::string_view name, const Geometry& geometry) {
  return absl::StartsWith(name, "video_patch_proj") || absl::StartsWith(name, "audio_patch_proj") ||
         absl::StartsWith(name, "time_embedder") || absl::StartsWith(name, "final_layer.video_out") ||
         absl::StartsWith(name, "final_layer.audio_out") || name == "adaln_t_table" ||
         (geometry.pruned() && absl::StrContains(name, "adaln_proj"));
}

// A tensor of a helper file as float32 (or its own 16-bit type) on the device.
absl::StatusOr<at::Tensor> CopyTensor(const MappedFile& file, const TensorInfo& info, c10::Device device) {
  const auto dtype = ToScalarType(info.dtype);
  if (!dtype.has_value() || !IsFloat(info.dtype)) {
    return RefuseArgument(reason::kBadTensor, absl::StrCat("silu grid: tensor ", info.name, " has type ", DTypeName(info.dtype),
                                                           "; float32, float16 or bfloat16 is needed"));
  }
  at::Tensor out = at::empty(info.shape, at::TensorOptions().device(device).dtype(at::kFloat));
  out.copy_(at::from_blob(const_cast<char*>(file.data()) + info.offset, info.shape, at::TensorOptions().dtype(*dtype)));
  if (!out.isfinite().all().item<bool>()) {
    return RefuseArgument(reason::kNotFinite, absl::StrCat("silu grid: tensor ", info.name, " is not finite"));
  }
  return out;
}

absl::StatusOr<SiluGrid> LoadSiluGrid(const std::string& path, c10::Device device) {
  H3_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(path));
  H3_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  SiluGrid grid;
  const auto load = [&](const TensorInfo& info, at::Tensor& into) -> absl::Status {
    H3_ASSIGN_OR_RETURN(into, CopyTensor(*file, info, device));
    return absl::OkStatus();
  };
  // A full H3 file in the grid's place, under whatever common prefix: the time embedder gives the grid exactly.
  for (const TensorInfo& info : header.tensors) {
    if (absl::EndsWith(info.name, "time_embedder.proj_in.weight")) H3_RETURN_IF_ERROR(load(info, grid.in_weight));
    if (absl::EndsWith(info.name, "time_embedder.proj_in.bias")) H3_RETURN_IF_ERROR(load(info, grid.in_bias));
    if (absl::EndsWith(info.name, "time_embedder.proj_out.weight")) H3_RETURN_IF_ERROR(load(info, grid.out_weight));
    if (absl::EndsWith(info.name, "time_embedder.proj_out.bias")) H3_RETURN_IF_ERROR(load(info, grid.out_bias));
  }
  const int parts = grid.in_weight.defined() + grid.in_bias.defined() + grid.out_weight.defined() + grid.out_bias.defined();
  if (parts == 4) {
    if (grid.in_weight.dim() != 2 || grid.out_weight.dim() != 2 || grid.in_weight.size(1) % 2 != 0 ||
        grid.out_weight.size(1) != grid.in_weight.size(0) || grid.in_bias.numel() != grid.in_weight.size(0) ||
        grid.out_bias.numel() != grid.out_weight.size(0)) {
      return RefuseArgument(reason::kShapeMismatch, "silu grid: the time embedder's tensors contradict each other");
    }
    grid.width = grid.out_weight.size(0);
    return grid;
  }
  if (parts != 0) return RefuseArgument(reason::kBadTensor, "silu grid: the time embedder is incomplete; all four tensors are needed");
  const TensorInfo* table = header.Find("silu_t_emb_grid");
  if (table == nullptr && header.tensors.size() == 1) table = &header.tensors.front();
  if (table == nullptr || table->shape.size() != 2 || table->shape[0] < 2) {
    return RefuseArgument(reason::kBadTensor,
                          "silu grid: neither a tensor silu_t_emb_grid [rows >= 2, width] nor a full model's time_embedder is in "
                          "the file");
  }
  H3_RETURN_IF_ERROR(load(*table, grid.table));
  grid.width = table->shape[1];
  if (table->dtype != DType::kF32 && table->dtype != DType::kF64) {
    grid.warnings.push_back(absl::StrCat("the silu grid is stored in ", DTypeName(table->dtype), ": its rounding costs about ",
                                         table->dtype == DType::kBF16 ? "5e-4" : "8e-5",
                                         " in the output; a full H3 file in its place is exact"));
  }
  return grid;
}

}  // namespace

ResidentModel::ResidentModel(const Checkpoint& checkpoint, const ResidentModelOptions& options)
    : checkpoint_(checkpoint), options_(options), sites_(Sites(checkpoint.geometry)) {
  for (size_t i = 0; i < sites_.size(); ++i) site_index_[sites_[i].name] = static_cast<int>(i);
}

absl::StatusOr<std::unique_ptr<ResidentModel>> ResidentModel::Load(const Checkpoint& checkpoint, VramLedger& ledger,
                                                                   const ResidentModelOptions& options) {
  auto model = absl::WrapUnique(new ResidentModel(checkpoint, options));
  StoredWeightsOptions storage{.device = options.device, .copy = options.copy_weights};
  storage.dtype = [&](const std::string& name) -> std::optional<c10::ScalarType> {
    if (!options.dtype.has_value()) return std::nullopt;
    return StaysFloat32(name, checkpoint.geometry) ? c10::ScalarType::Float : *options.dtype;
  };
  H3_ASSIGN_OR_RETURN(model->weights_, StoredWeights::Load(checkpoint, ledger, storage));
  const StoredWeights& weights = *model->weights_;
  for (const Site& site : model->sites_) {
    at::Tensor bias = site.has_bias ? weights.Single(site.name + ".bias") : at::Tensor();
    model->linears_.push_back(std::make_unique<DenseLinear>(weights.Pieces(site.name + ".weight"), std::move(bias)));
  }
  model->compute_ = model->linear(model->SiteIndex("blocks.0.attn.qkv_proj")).dtype();
  for (size_t i = 0; i < model->sites_.size(); ++i) {
    const SiteKind kind = model->sites_[i].kind;
    const bool block_linear = kind == SiteKind::kQkv || kind == SiteKind::kAttnOut || kind == SiteKind::kFc1 || kind == SiteKind::kFc2;
    if (block_linear && model->linears_[i]->dtype() != model->compute_) {
      return RefuseArgument(reason::kBadTensor,
                            absl::StrCat(model->sites_[i].name, " is ", ScalarTypeName(model->linears_[i]->dtype()),
                                         " but blocks.0.attn.qkv_proj is ", ScalarTypeName(model->compute_),
                                         "; the block stack must have one type (give --dtype to convert)"),
                            {{"tensor", model->sites_[i].name}});
    }
  }
  if (!options.silu_grid.empty() && checkpoint.geometry.pruned()) {
    const OwnerScope owner(Owner::kBaseWeights);
    auto grid = CatchTorch("silu grid", [&] { return LoadSiluGrid(options.silu_grid, options.device); });
    // Of two files that are opened at the start, say which.
    if (absl::IsNotFound(grid.status())) return absl::NotFoundError(absl::StrCat("--silu-grid: ", grid.status().message()));
    if (!grid.ok()) return grid.status();
    model->silu_grid_ = *std::move(grid);
  }
  model->fingerprint_ = weights.Fingerprint();
  return model;
}

int ResidentModel::SiteIndex(const std::string& name) const {
  const auto found = site_index_.find(name);
  H3_CHECK(found != site_index_.end());
  return found->second;
}

int64_t ResidentModel::RowTile(int64_t rows) const {
  const Geometry& g = geometry();
  const int64_t element = static_cast<int64_t>(c10::elementSize(compute_));
  // The largest set of temporaries that a row needs at once: float32 q and k while they are normed and rotated, or the MLP's
  // [gate; up] with the normed row and the gathered modulation.
  const int64_t attention = 3 * 4 * g.inner() + 3 * 4 * g.hidden;
  const int64_t mlp = 2 * element * g.ffn + 3 * 4 * g.hidden + element * g.hidden;
  const int64_t fits = options_.workspace_bytes / std::max(attention, mlp);
  // Below 128 rows a product takes another path in the BLAS and its bits change.
  return std::min(rows, std::max<int64_t>(128, fits / 128 * 128));
}

}  // namespace h3
