#include "server/model/block.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/nn/attention.h"
#include "server/nn/norm.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

// Lines of a modulation, by use.
enum Vector { kAttentionShift, kAttentionScale, kAttentionGate, kMlpShift, kMlpScale, kMlpGate };

class Block {
 public:
  Block(const ResidentModel& model, const std::string& name, const StackProgram& program, const RowContext& rows,
        const at::Tensor& modulation, at::Tensor& x)
      : model_(model), name_(name), program_(program), rows_(rows), modulation_(modulation), x_(x), tile_(model.RowTile(x.size(0))) {}

  void Attention() {
    const Geometry& g = model_.geometry();
    const int64_t total = x_.size(0);
    at::Tensor qkv = at::empty({total, 3 * g.inner()}, x_.options());
    {
      const BoundSite site = Bind("attn.qkv_proj");
      ForEachTile([&](int64_t begin, int64_t count, const RowContext& rows) {
        const at::Tensor normed = Normed("norm1", kAttentionShift, kAttentionScale, begin, count, rows);
        at::Tensor out = qkv.narrow(0, begin, count);
        site.Apply(normed, rows.modality, out);
        for (const int part : {0, 1}) {
          at::Tensor heads = Part(out, part);  // q or k: [rows, heads, head_dim]
          at::Tensor value = HeadNorm(part == 0 ? "attn.q_norm.weight" : "attn.k_norm.weight", rows.modality, heads);
          if (rows.rotary != nullptr) Rotate(value, rows.rotary->Narrow(begin, count));
          heads.copy_(value);
        }
      });
    }
    at::Tensor q = Part(qkv, 0);
    AttendInPlace(q, Part(qkv, 1), Part(qkv, 2), model_.workspace_bytes());
    const BoundSite site = Bind("attn.out_proj");
    ForEachTile([&](int64_t begin, int64_t count, const RowContext& rows) {
      const at::Tensor attended = q.narrow(0, begin, count).reshape({count, g.inner()});
      Residual(site.Apply(attended, rows.modality), kAttentionGate, begin, rows);
    });
  }

  void Mlp() {
    const Geometry& g = model_.geometry();
    const BoundSite fc1 = Bind("mlp.fc1"), fc2 = Bind("mlp.fc2");
    ForEachTile([&](int64_t begin, int64_t count, const RowContext& rows) {
      at::Tensor both;  // [rows, gate; up]
      {
        const at::Tensor normed = Normed("norm2", kMlpShift, kMlpScale, begin, count, rows);
        both = fc1.Apply(normed, rows.modality);
      }
      at::Tensor gate = both.narrow(1, 0, g.ffn);
      at::silu_(gate);
      gate.mul_(both.narrow(1, g.ffn, g.ffn));
      Residual(fc2.Apply(gate, rows.modality), kMlpGate, begin, rows);
    });
  }

 private:
  BoundSite Bind(absl::string_view suffix) const {
    const int site = model_.SiteIndex(absl::StrCat(name_, ".", suffix));
    return BoundSite(model_.linear(site), program_.sites[static_cast<size_t>(site)], x_.scalar_type());
  }

  template <typename F>
  void ForEachTile(F&& body) const {
    const OwnerScope owner(Owner::kWorkspace);
    for (int64_t begin = 0; begin < x_.size(0); begin += tile_) {
      const int64_t count = std::min(tile_, x_.size(0) - begin);
      RowContext rows{.modality = rows_.modality.Narrow(begin, count), .rotary = rows_.rotary};
      if (rows_.pair.defined()) rows.pair = rows_.pair.narrow(0, begin, count);
      body(begin, count, rows);
    }
  }

  // q, k or v of a tile as [rows, heads, head_dim], in either row order of the fused projection.
  at::Tensor Part(const at::Tensor& qkv, int part) const {
    const Geometry& g = model_.geometry();
    return model_.interleaved_qkv() ? qkv.view({qkv.size(0), g.heads, 3, g.head_dim}).select(2, part)
                                    : qkv.view({qkv.size(0), 3, g.heads, g.head_dim}).select(1, part);
  }

  at::Tensor Normed(absl::string_view norm, Vector shift, Vector scale, int64_t begin, int64_t count, const RowContext& rows) const {
    at::Tensor value = NormWithStack(model_, program_, absl::StrCat(name_, ".", norm, ".weight"), rows.modality,
                                     x_.narrow(0, begin, count));
    if (modulation_.defined()) Modulate(value, modulation_.select(1, scale), modulation_.select(1, shift), rows.pair);
    return value.to(x_.scalar_type());
  }

  at::Tensor HeadNorm(absl::string_view weight, const RowModality& rows, const at::Tensor& heads) const {
    return NormWithStack(model_, program_, absl::StrCat(name_, ".", weight), rows, heads);
  }

  void Residual(const at::Tensor& y, Vector gate, int64_t begin, const RowContext& rows) const {
    at::Tensor x = x_.narrow(0, begin, y.size(0));
    if (modulation_.defined()) {
      AddGated(x, modulation_.select(1, gate), rows.pair, y);
    } else {
      x.add_(y);
    }
  }

  const ResidentModel& model_;
  const std::string& name_;
  const StackProgram& program_;
  const RowContext& rows_;
  const at::Tensor& modulation_;
  at::Tensor& x_;
  const int64_t tile_;
};

}  // namespace

at::Tensor NormWithStack(const ResidentModel& model, const StackProgram& program, const std::string& weight, const RowModality& rows,
                         const at::Tensor& x) {
  at::Tensor effective = model.tensor(weight);
  if (const auto difference = program.norms.find(weight); difference != program.norms.end()) {
    at::Tensor by_modality = difference->second.add(effective);  // [1 or 3, n]
    if (by_modality.size(0) > 1) {
      by_modality = rows.tags.defined() ? by_modality.index_select(0, rows.tags) : by_modality.narrow(0, rows.uniform, 1);
    }
    effective = x.dim() == 3 ? by_modality.unsqueeze(1) : by_modality;
  }
  return RmsNorm(x, effective, model.checkpoint().eps);
}

void ApplyBlock(const ResidentModel& model, const std::string& name, const StackProgram& program, const RowContext& rows,
                const at::Tensor& modulation, at::Tensor& x) {
  Block block(model, name, program, rows, modulation, x);
  block.Attention();
  block.Mlp();
}

}  // namespace h3
