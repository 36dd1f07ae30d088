#include "server/format/adapter_shape.h"

#include <algorithm>
#include <set>

#include "absl/strings/match.h"

namespace h3 {
namespace {

bool IsBlockLinear(SiteKind kind) {
  return kind == SiteKind::kQkv || kind == SiteKind::kAttnOut || kind == SiteKind::kFc1 || kind == SiteKind::kFc2;
}

int64_t Elements(const TensorInfo& info) {
  int64_t elements = 1;
  for (const int64_t size : info.shape) elements *= size;
  return elements;
}

// Float64 is kept as float32.
int64_t KeptBytes(const TensorInfo& info) { return info.dtype == DType::kF64 ? 4 : DTypeBytes(info.dtype); }

bool IsTextName(absl::string_view name) {
  return absl::StartsWith(name, "condition_proj") || absl::StartsWith(name, "token_refiner.");
}

// How a term's rows lie in a base: their range, and whether they are picked one by one, some of them perhaps from nowhere.
struct KeptRows {
  RowRange range;
  bool picked = false;
  bool gaps = false;
};

KeptRows RowsOf(const AdapterTerm& term, const Site& site, const BaseForm& base) {
  const bool interleaved = site.kind == SiteKind::kQkv && base.interleaved_qkv;
  const bool alike = (term.row_map == RowMap::kIdentity && !interleaved) || (term.row_map == RowMap::kDeinterleave && interleaved);
  if (alike) return {.range = term.rows};
  // The base keeps [q0 k0 v0 q1 ...]: the rows of q alone are no range of it, so the term covers the whole projection.
  const RowRange range = interleaved ? RowRange{0, site.out} : term.rows;
  return {range, true, interleaved && term.rows.count < site.out};
}

int64_t KroneckerBytes(const Kronecker& k) {
  const auto factor = [](const std::optional<TensorInfo>& whole, const std::optional<TensorInfo>& left, const std::optional<TensorInfo>& right) {
    return 4 * (whole.has_value() ? whole->shape[0] * whole->shape[1] : left->shape[0] * right->shape[1]);
  };
  return factor(k.w1, k.w1_a, k.w1_b) + factor(k.w2, k.w2_a, k.w2_b);
}

}  // namespace

AdapterShape ShapeOf(const AdapterManifest& manifest, const BaseForm& base) {
  const std::vector<Site> sites = Sites(base.geometry);
  AdapterShape shape;
  int64_t bytes = 0;
  int64_t staging = 0;
  const auto stage = [&](const TensorInfo& info, bool picked) {
    // Whether it is finite: absolute values and three masks; picked rows: a padded copy and the rows.
    staging = std::max(staging, Elements(info) * (4 + 3) + (picked ? 2 * info.bytes + 8 * info.shape.front() : 0));
  };
  for (const AdapterTerm& from : manifest.terms) {
    const Site& site = sites[static_cast<size_t>(from.site)];
    const KeptRows rows = RowsOf(from, site, base);
    const int64_t count = rows.range.count;
    const auto element = [&](const TensorInfo& info) { return IsBlockLinear(site.kind) ? DTypeBytes(base.compute) : KeptBytes(info); };
    TermShape term{.site = from.site, .rows = rows.range, .own_features = from.features != AdalnFeatures::kBase};
    if (from.low_rank.has_value()) {
      const LowRank& low_rank = *from.low_rank;
      term.kind = low_rank.magnitude_axis == MagnitudeAxis::kNone   ? TermKind::kLowRank
                  : low_rank.magnitude_axis == MagnitudeAxis::kRows ? TermKind::kDoraRows
                                                                    : TermKind::kDoraColumns;
      term.rank = low_rank.a.shape[0];
      term.element_bytes = element(low_rank.a);
      stage(low_rank.a, false);
      stage(low_rank.b, rows.picked);
      bytes += Elements(low_rank.a) * element(low_rank.a) + count * low_rank.b.shape[1] * element(low_rank.b);
      if (term.kind == TermKind::kDoraRows) bytes += 4 * count * (rows.gaps ? 2 : 1);
      if (term.kind == TermKind::kDoraColumns) bytes += 4 * low_rank.a.shape[1];
    } else if (from.kronecker.has_value()) {
      const Kronecker& k = *from.kronecker;
      term.kind = TermKind::kKronecker;
      term.element_bytes = 4;
      const int64_t o1 = k.w1.has_value() ? k.w1->shape[0] : k.w1_a->shape[0], i1 = k.w1.has_value() ? k.w1->shape[1] : k.w1_b->shape[1];
      const int64_t o2 = k.w2.has_value() ? k.w2->shape[0] : k.w2_a->shape[0];
      term.kronecker_inner = i1 * o2;
      term.kronecker_rows = o1 * o2;
      term.reordered = rows.picked;
      for (const auto* factor : {&k.w1, &k.w1_a, &k.w1_b, &k.w2, &k.w2_a, &k.w2_b}) {
        // A product's factors lie beside it.
        if (factor->has_value()) stage(**factor, false), staging += 4 * Elements(**factor);
      }
      bytes += KroneckerBytes(k) + (rows.picked ? 8 * count : 0);
    } else if (from.difference.has_value()) {
      term.kind = TermKind::kDifference;
      term.element_bytes = element(from.difference->difference);
      stage(from.difference->difference, rows.picked);
      bytes += count * from.difference->difference.shape[1] * term.element_bytes;
    } else {
      term.kind = TermKind::kOffset;
      term.element_bytes = 4;
      bytes += 4 * count;
    }
    shape.terms.push_back(term);
  }
  for (const NormOffset& norm : manifest.norm_offsets) {
    shape.norm_elements += norm.offset.shape[0];
    shape.text_norms |= IsTextName(norm.tensor);
  }
  bytes += 4 * shape.norm_elements;
  if (manifest.own_table.has_value()) bytes += 4 * Elements(*manifest.own_table);
  if (manifest.curve.has_value()) {
    shape.curve = true;
    bytes += 4 * Elements(manifest.curve->table);
    for (const auto* list : {&manifest.curve->weights, &manifest.curve->biases}) {
      for (const TensorInfo& info : *list) stage(info, false), bytes += Elements(info) * KeptBytes(info);
    }
  }
  shape.bytes = ByteCount(bytes);
  shape.load_staging = ByteCount(staging);
  return shape;
}

bool IsTextSite(const Site& site) { return IsTextName(site.name); }

std::vector<MergedTarget> MergedTargets(const std::vector<const AdapterShape*>& adapters, const std::vector<Site>& sites,
                                        const std::vector<int64_t>& site_element_bytes) {
  std::set<int> targets;
  for (const AdapterShape* adapter : adapters) {
    for (const TermShape& term : adapter->terms) {
      if (term.kind != TermKind::kOffset) targets.insert(term.site);
    }
  }
  std::vector<MergedTarget> merged;
  for (const int site : targets) {
    const Site& s = sites[static_cast<size_t>(site)];
    merged.push_back({site, ByteCount(s.out * s.in * site_element_bytes[static_cast<size_t>(site)])});
  }
  return merged;
}

}  // namespace h3
