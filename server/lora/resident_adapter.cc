#include "server/lora/resident_adapter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/device.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

constexpr int64_t kNoRow = -1;

// For each output row of a term, in the base's stored order, the row of the file's tensor that it takes.
struct RowOrder {
  OutRange range;
  std::vector<int64_t> source;  // Empty: identity. kNoRow: the adapter has no such row (zero).
};

RowOrder OrderRows(const ResidentModel& model, const AdapterTerm& term) {
  const Geometry& g = model.geometry();
  const Site& site = model.sites()[static_cast<size_t>(term.site)];
  const bool interleaved_base = site.kind == SiteKind::kQkv && model.interleaved_qkv();
  RowOrder order{.range = {term.rows.begin, term.rows.count}};
  if (term.row_map == RowMap::kIdentity && !interleaved_base) return order;
  if (term.row_map == RowMap::kDeinterleave && interleaved_base) return order;  // Stored alike.

  // canonical row -> row of the file
  const auto from_file = [&](int64_t canonical) -> int64_t {
    const int64_t row = canonical - term.rows.begin;
    if (row < 0 || row >= term.rows.count) return kNoRow;
    switch (term.row_map) {
      case RowMap::kIdentity: return row;
      case RowMap::kSwapHalves: return (row + term.rows.count / 2) % term.rows.count;
      case RowMap::kDeinterleave: {
        const int64_t part = row / g.inner(), head = row % g.inner() / g.head_dim, channel = row % g.head_dim;
        return (head * 3 + part) * g.head_dim + channel;
      }
    }
    return kNoRow;
  };
  if (!interleaved_base) {
    for (int64_t row = 0; row < term.rows.count; ++row) order.source.push_back(from_file(term.rows.begin + row));
    return order;
  }
  // The base keeps [q0 k0 v0 q1 ...]: the rows of q alone are no range of it, so the term covers the whole projection.
  order.range = {0, site.out};
  for (int64_t row = 0; row < site.out; ++row) {
    const int64_t head = row / (3 * g.head_dim), part = row / g.head_dim % 3, channel = row % g.head_dim;
    order.source.push_back(from_file(part * g.inner() + head * g.head_dim + channel));
  }
  return order;
}

class Loader {
 public:
  Loader(const ResidentModel& model, absl::string_view file) : model_(model), file_(file) {}

  // A tensor of the file on the device. `dtype`: nullopt keeps the stored type (float64 becomes float32). `rows`: its rows in
  // the order of `source`.
  absl::StatusOr<at::Tensor> Copy(const TensorInfo& info, std::optional<c10::ScalarType> dtype,
                                  const std::vector<int64_t>& source = {}) {
    const auto stored = ToScalarType(info.dtype);
    H3_CHECK(stored.has_value() && info.offset + info.bytes <= static_cast<int64_t>(file_.size()));
    const at::Tensor host = at::from_blob(const_cast<char*>(file_.data()) + info.offset, info.shape, at::TensorOptions().dtype(*stored));
    const c10::ScalarType type = dtype.value_or(*stored == c10::ScalarType::Double ? c10::ScalarType::Float : *stored);
    std::vector<int64_t> shape = info.shape;
    if (!source.empty()) shape.front() = static_cast<int64_t>(source.size());
    at::Tensor copy;
    {
      const OwnerScope owner(Owner::kAdapters);
      copy = at::empty(shape, at::TensorOptions().device(model_.device()).dtype(type));
    }
    const OwnerScope owner(Owner::kStaging);
    if (source.empty()) {
      copy.copy_(host);
    } else {
      // One zero row after the last stands for the rows that the adapter has not.
      std::vector<int64_t> index = source;
      for (int64_t& row : index) row = row == kNoRow ? info.shape.front() : row;
      at::Tensor padded = at::zeros(WithRows(info.shape, info.shape.front() + 1), host.options());
      padded.narrow(0, 0, info.shape.front()).copy_(host);
      copy.copy_(padded.index_select(0, at::tensor(index, at::kLong)));
    }
    if (!copy.isfinite().all().item<bool>()) {
      return RefuseArgument(reason::kNotFinite,
                            absl::StrCat("tensor ", info.name, " holds NaN or infinity", host.isfinite().all().item<bool>()
                                             ? absl::StrCat(" after conversion to ", ScalarTypeName(type)) : ""),
                            {{"tensor", info.name}});
    }
    return copy;
  }

 private:
  static std::vector<int64_t> WithRows(std::vector<int64_t> shape, int64_t rows) {
    shape.front() = rows;
    return shape;
  }

  const ResidentModel& model_;
  const absl::string_view file_;
};

// The type of a term's factors on the device; nullopt: as stored.
std::optional<c10::ScalarType> FactorType(const ResidentModel& model, const AdapterTerm& term) {
  switch (model.sites()[static_cast<size_t>(term.site)].kind) {
    case SiteKind::kQkv:
    case SiteKind::kAttnOut:
    case SiteKind::kFc1:
    case SiteKind::kFc2: return model.compute();
    default: return std::nullopt;
  }
}

absl::StatusOr<ResidentTerm> CopyTerm(const ResidentModel& model, const AdapterTerm& term, Loader& loader) {
  const std::optional<c10::ScalarType> dtype = FactorType(model, term);
  const RowOrder order = OrderRows(model, term);
  ResidentTerm resident{.site = term.site,
                        .range = order.range,
                        .rank = term.rank,
                        .alpha = term.alpha,
                        .scale = term.scale,
                        .root_rank = term.root_rank,
                        .scale_source = term.scale_source,
                        .features = term.features};
  if (term.low_rank.has_value()) {
    const LowRank& from = *term.low_rank;
    ResidentLowRank low_rank;
    H3_ASSIGN_OR_RETURN(low_rank.a, loader.Copy(from.a, dtype));
    H3_ASSIGN_OR_RETURN(low_rank.b, loader.Copy(from.b, dtype, order.source));
    low_rank.magnitude_axis = from.magnitude_axis;
    if (from.magnitude_axis != MagnitudeAxis::kNone) {
      const bool rows = from.magnitude_axis == MagnitudeAxis::kRows;
      H3_ASSIGN_OR_RETURN(at::Tensor magnitude,
                          loader.Copy(from.magnitude, c10::ScalarType::Float, rows ? order.source : std::vector<int64_t>()));
      low_rank.magnitude = magnitude.view({-1});
      if (rows && std::count(order.source.begin(), order.source.end(), kNoRow) > 0) {
        const OwnerScope owner(Owner::kAdapters);
        std::vector<float> covered;
        for (const int64_t row : order.source) covered.push_back(row == kNoRow ? 0.0f : 1.0f);
        low_rank.covered = at::tensor(covered, at::kFloat).to(model.device());
      }
    }
    resident.what = std::move(low_rank);
  } else if (term.kronecker.has_value()) {
    const Kronecker& from = *term.kronecker;
    const auto factor = [&](const std::optional<TensorInfo>& whole, const std::optional<TensorInfo>& left,
                            const std::optional<TensorInfo>& right) -> absl::StatusOr<at::Tensor> {
      if (whole.has_value()) return loader.Copy(*whole, c10::ScalarType::Float);
      H3_ASSIGN_OR_RETURN(const at::Tensor l, loader.Copy(*left, c10::ScalarType::Float));
      H3_ASSIGN_OR_RETURN(const at::Tensor r, loader.Copy(*right, c10::ScalarType::Float));
      const OwnerScope owner(Owner::kAdapters);
      return at::mm(l, r);
    };
    ResidentKronecker kronecker;
    H3_ASSIGN_OR_RETURN(kronecker.w1, factor(from.w1, from.w1_a, from.w1_b));
    H3_ASSIGN_OR_RETURN(kronecker.w2, factor(from.w2, from.w2_a, from.w2_b));
    if (!order.source.empty()) {
      std::vector<int64_t> index = order.source;
      for (int64_t& row : index) row = row == kNoRow ? term.rows.count : row;
      const OwnerScope owner(Owner::kAdapters);
      kronecker.row_order = at::tensor(index, at::kLong).to(model.device());
    }
    resident.what = std::move(kronecker);
  } else if (term.difference.has_value()) {
    ResidentDifference difference;
    H3_ASSIGN_OR_RETURN(difference.difference, loader.Copy(term.difference->difference, dtype, order.source));
    resident.what = std::move(difference);
  } else {
    H3_CHECK(term.offset.has_value());
    ResidentOffset offset;
    H3_ASSIGN_OR_RETURN(offset.offset, loader.Copy(term.offset->offset, c10::ScalarType::Float, order.source));
    resident.what = std::move(offset);
  }
  return resident;
}

// False where a term adds nothing whatever it is applied to.
bool HasEffect(const ResidentTerm& term) {
  const auto any = [](const at::Tensor& tensor) { return tensor.any().item<bool>(); };
  if (const auto* low_rank = std::get_if<ResidentLowRank>(&term.what)) {
    return low_rank->magnitude_axis != MagnitudeAxis::kNone || (term.scale != 0 && any(low_rank->a) && any(low_rank->b));
  }
  if (const auto* kronecker = std::get_if<ResidentKronecker>(&term.what)) return term.scale != 0 && any(kronecker->w1) && any(kronecker->w2);
  if (const auto* difference = std::get_if<ResidentDifference>(&term.what)) return any(difference->difference);
  return any(std::get<ResidentOffset>(term.what).offset);
}

ByteCount TensorBytes(const ResidentAdapter& adapter) {
  int64_t bytes = 0;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  };
  for (const ResidentTerm& term : adapter.terms) {
    if (const auto* low_rank = std::get_if<ResidentLowRank>(&term.what)) {
      for (const at::Tensor& t : {low_rank->a, low_rank->b, low_rank->magnitude, low_rank->covered}) add(t);
    } else if (const auto* kronecker = std::get_if<ResidentKronecker>(&term.what)) {
      for (const at::Tensor& t : {kronecker->w1, kronecker->w2, kronecker->row_order}) add(t);
    } else if (const auto* difference = std::get_if<ResidentDifference>(&term.what)) {
      add(difference->difference);
    } else {
      add(std::get<ResidentOffset>(term.what).offset);
    }
  }
  add(adapter.own_table);
  for (const ResidentNormOffset& norm : adapter.norm_offsets) add(norm.offset);
  for (const ResidentCurve& curve : adapter.curves) {
    add(curve.table);
    for (const at::Tensor& t : curve.weights) add(t);
    for (const at::Tensor& t : curve.biases) add(t);
  }
  return ByteCount(bytes);
}

}  // namespace

absl::StatusOr<std::shared_ptr<ResidentAdapter>> MakeResident(const ResidentModel& model, const AdapterManifest& manifest,
                                                                    absl::string_view file, std::string name, std::string digest) {
  return CatchTorch(absl::StrCat("adapter ", name), [&]() -> absl::StatusOr<std::shared_ptr<ResidentAdapter>> {
    auto adapter = std::make_shared<ResidentAdapter>();
    adapter->name = std::move(name);
    adapter->digest = std::move(digest);
    adapter->left_out = manifest.left_out;
    adapter->warnings = manifest.warnings;
    adapter->format = manifest.format;
    Loader loader(model, file);
    for (const AdapterTerm& term : manifest.terms) {
      H3_ASSIGN_OR_RETURN(ResidentTerm resident, CopyTerm(model, term, loader));
      adapter->terms.push_back(std::move(resident));
    }
    for (const NormOffset& norm : manifest.norm_offsets) {
      H3_ASSIGN_OR_RETURN(at::Tensor offset, loader.Copy(norm.offset, c10::ScalarType::Float));
      adapter->norm_offsets.push_back({norm.tensor, offset.view({-1})});
    }
    if (manifest.curve.has_value()) {
      ResidentCurve curve;
      H3_ASSIGN_OR_RETURN(curve.table, loader.Copy(manifest.curve->table, c10::ScalarType::Float));
      for (const TensorInfo& info : manifest.curve->weights) {
        H3_ASSIGN_OR_RETURN(at::Tensor weight, loader.Copy(info, std::nullopt));
        curve.weights.push_back(std::move(weight));
      }
      for (const TensorInfo& info : manifest.curve->biases) {
        H3_ASSIGN_OR_RETURN(at::Tensor bias, loader.Copy(info, std::nullopt));
        curve.biases.push_back(std::move(bias));
      }
      adapter->curves.push_back(std::move(curve));
    }
    if (manifest.own_table.has_value()) {
      H3_ASSIGN_OR_RETURN(adapter->own_table, loader.Copy(*manifest.own_table, c10::ScalarType::Float));
    }
    if (std::any_of(adapter->terms.begin(), adapter->terms.end(),
                    [](const ResidentTerm& term) { return term.features == AdalnFeatures::kGrid; })) {
      const std::vector<std::string>& loss = model.silu_grid()->warnings;
      adapter->warnings.insert(adapter->warnings.end(), loss.begin(), loss.end());
    }
    if (adapter->norm_offsets.empty() && adapter->curves.empty() &&
        std::none_of(adapter->terms.begin(), adapter->terms.end(), HasEffect)) {
      adapter->warnings.push_back("no effect: every delta of the adapter is zero");
    }
    adapter->bytes = TensorBytes(*adapter);
    adapter->shape = ShapeOf(manifest, model.plan_base().form);
    H3_CHECK(adapter->bytes == adapter->shape.bytes);
    return adapter;
  });
}

const ResidentTerm* WholeDifference(const ResidentAdapter& adapter) {
  for (const ResidentTerm& term : adapter.terms) {
    if (std::holds_alternative<ResidentDifference>(term.what)) return &term;
  }
  return nullptr;
}

ByteCount MergedBytes(const ResidentModel& model, const std::vector<const ResidentAdapter*>& adapters) {
  std::vector<const AdapterShape*> shapes;
  for (const ResidentAdapter* adapter : adapters) shapes.push_back(&adapter->shape);
  ByteCount bytes;
  for (const MergedTarget& target : MergedTargets(shapes, model.sites(), model.plan_base().site_bytes)) bytes += target.bytes;
  return bytes;
}

}  // namespace h3
