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
#include "server/base/tiling.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/device.h"

namespace h3 {
namespace {

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
    : checkpoint_(checkpoint),
      options_(options),
      sites_(Sites(checkpoint.geometry)),
      plan_base_(PlanBaseOf(checkpoint, options.dtype, options.adaln_on_host)) {
  for (size_t i = 0; i < sites_.size(); ++i) site_index_[sites_[i].name] = static_cast<int>(i);
}

absl::StatusOr<std::unique_ptr<ResidentModel>> ResidentModel::Load(const Checkpoint& checkpoint, VramLedger& ledger,
                                                                   const ResidentModelOptions& options) {
  auto model = absl::WrapUnique(new ResidentModel(checkpoint, options));
  StoredWeightsOptions storage{.device = options.device, .copy = options.copy_weights};
  storage.dtype = [&](const std::string& name, const CheckpointTensor& tensor) {
    return HeldType(name, tensor, checkpoint.geometry, options.dtype);
  };
  storage.on_host = [&](const std::string& name) { return options.adaln_on_host && IsAdalnWeight(name); };
  H3_ASSIGN_OR_RETURN(model->weights_, StoredWeights::Load(checkpoint, ledger, storage));
  StoredWeights& weights = *model->weights_;
  for (const Site& site : model->sites_) {
    at::Tensor bias = site.has_bias ? weights.Single(site.name + ".bias") : at::Tensor();
    const std::string name = site.name + ".weight";
    if (storage.on_host(name)) {
      const auto held = ToScalarType(HeldType(name, checkpoint.tensors.at(name), checkpoint.geometry, options.dtype));
      model->linears_.push_back(std::make_unique<HostLinear>(weights.Pieces(name), *held, options.device, std::move(bias)));
    } else {
      model->linears_.push_back(std::make_unique<DenseLinear>(weights.Pieces(name), std::move(bias)));
    }
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
  return h3::RowTile({g.hidden, g.inner(), g.ffn, static_cast<int64_t>(c10::elementSize(compute_))}, options_.workspace_bytes, rows);
}

}  // namespace h3
