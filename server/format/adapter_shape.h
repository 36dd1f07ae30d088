// What an adapter takes on a device and what a forward holds for it, from its header alone: the planner's view of an adapter.
#pragma once

#include <cstdint>
#include <vector>

#include "server/base/bytes.h"
#include "server/format/adapter.h"
#include "server/format/dtype.h"
#include "server/format/geometry.h"

namespace h3 {

// What of a resident base decides how an adapter is kept on it.
struct BaseForm {
  Geometry geometry;
  DType compute = DType::kBF16;  // Of the block linears and the residual stream.
  bool interleaved_qkv = false;
};

enum class TermKind { kLowRank, kDoraRows, kDoraColumns, kKronecker, kOffset, kDifference };

struct TermShape {
  int site = 0;
  TermKind kind = TermKind::kLowRank;
  RowRange rows;              // Output rows in the base's stored order.
  int64_t rank = 0;           // Of low-rank kinds.
  int64_t element_bytes = 0;  // Of the factors on the device.
  // Kronecker: columns of w1 times rows of w2 (the product in between), and rows of the whole product.
  int64_t kronecker_inner = 0, kronecker_rows = 0;
  bool reordered = false;     // Kronecker: rows are picked from the product.
  bool own_features = false;  // An AdaLN term on the silu grid, or on a table of its own.
};

struct AdapterShape {
  std::vector<TermShape> terms;  // In site order.
  ByteCount bytes;               // On the device, all tensors.
  ByteCount load_staging;        // Beside them while it is loaded: the check of the largest tensor, its rows being picked.
  int64_t norm_elements = 0;     // Of all norm offsets.
  bool text_norms = false;       // Some of them in the text stream.
  bool curve = false;            // A complete pruned adapter's modulation.
};

AdapterShape ShapeOf(const AdapterManifest& manifest, const BaseForm& base);

// True where the site is part of the text stream: condition_proj and the refiner.
bool IsTextSite(const Site& site);

// What a merging runtime would hold a second time for these adapters: the weight of each distinct target once, in the type that
// the base has it in (`adaln`: of the AdaLN projections; others but the block linears and condition_proj are float32).
struct MergedTarget {
  int site = 0;
  ByteCount bytes;
};
std::vector<MergedTarget> MergedTargets(const std::vector<const AdapterShape*>& adapters, const std::vector<Site>& sites,
                                        const std::vector<int64_t>& site_element_bytes);

}  // namespace h3
