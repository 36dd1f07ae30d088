// What a stack does at one linear site. y = W x, then the stack's operations in request order, then offsets and the bias:
//   low rank      y[range] += f B (A x)                                        (LoRA)
//   Kronecker     y[range] += f kron(w1, w2) x                                 (LoKr)
//   DoRA, rows    y[range] <- keep * y[range] + gain * (B (A x))               keep = 1 - s + s g, gain = s g alpha/r
//   DoRA, columns in y[range] the base and all earlier operations see keep * x; then y[range] += f B (A (gain * x))
//   offset        y[range] += f o, like the bias: no DoRA scales it              (diff_b)
// Nothing of the size of W is ever made. Source of the formulas: design.md section 4. A request may ask for a merged copy instead
// (apply=materialized): then `merged` takes the base's place and only what comes after it is applied at run time.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <variant>
#include <vector>

#include "server/nn/linear.h"

namespace h3 {

// Modalities of packed rows: 0 video, 1 text, 2 audio.
inline constexpr int kModalities = 3;

// A factor for each modality of a row; strength, alpha / rank and everything else are in it.
struct Factors {
  std::array<float, kModalities> of{};
  bool uniform() const { return of[0] == of[1] && of[1] == of[2]; }
  bool zero() const { return of[0] == 0 && of[1] == 0 && of[2] == 0; }
};

// Output rows [begin, begin + count) in the base's stored order.
struct OutRange {
  int64_t begin = 0;
  int64_t count = 0;
  bool operator==(const OutRange&) const = default;
};

struct LowRankOp {
  at::Tensor a;  // [rank, in]
  at::Tensor b;  // [range.count, rank]
  OutRange range;
  Factors factors;
};

struct KroneckerOp {
  at::Tensor w1;         // [o1, i1]
  at::Tensor w2;         // [o2, i2]; o1 o2 = rows of the product, i1 i2 = in
  // int64 [range.count]: the row of the product that each output row takes, one past the last for zero; undefined: identity.
  at::Tensor row_order;
  OutRange range;
  Factors factors;
};

struct OffsetOp {
  at::Tensor offset;  // [range.count]
  OutRange range;
  Factors factors;
};

struct DoraRowsOp {
  at::Tensor a, b;  // As in LowRankOp.
  OutRange range;
  at::Tensor keep;  // float32 [1 or 3 (by modality), range.count]
  at::Tensor gain;  // The same shape.
};

struct DoraColumnsOp {
  at::Tensor a, b;
  OutRange range;   // Norms of columns are over these rows.
  Factors factors;  // s alpha / r
  at::Tensor keep;  // float32 [1 or 3, in]
  at::Tensor gain;
};

// A whole difference, as large as the weight. Only a merged copy takes it; no BoundSite does.
struct DifferenceOp {
  at::Tensor difference;  // [range.count, in]
  OutRange range;
  Factors factors;
};

using SiteOp = std::variant<LowRankOp, KroneckerOp, OffsetOp, DoraRowsOp, DoraColumnsOp, DifferenceOp>;

// The operations of a whole stack at one site, in request order. Empty: the base alone.
struct SiteProgram {
  std::shared_ptr<const BaseLinear> merged;  // Null: the base.
  std::vector<SiteOp> ops;

  bool empty() const { return merged == nullptr && ops.empty(); }
};

// The modality of the rows that go through a site: the same for all, or one a row.
struct RowModality {
  int uniform = 0;
  at::Tensor tags;  // int64 [rows] on the device; undefined: `uniform`.

  RowModality Narrow(int64_t begin, int64_t count) const {
    return tags.defined() ? RowModality{uniform, tags.narrow(0, begin, count)} : *this;
  }
};

// A site ready to be applied to any number of row tiles: the low-rank pairs of one row range are concatenated once, in a scratch
// of adapter size that lives as long as this object. Borrows the base and the program. Counts what it allocates under
// Owner::kWorkspace.
class BoundSite {
 public:
  // `compute`: type of x and y.
  BoundSite(const BaseLinear& base, const SiteProgram& program, c10::ScalarType compute);

  // y [rows, out], x [rows, in]: of the compute type, rows may be strided.
  void Apply(const at::Tensor& x, const RowModality& rows, at::Tensor& y) const;
  // A fresh y.
  at::Tensor Apply(const at::Tensor& x, const RowModality& rows) const;

  // Apply in two halves, for a caller that computes the base's part itself (modulation widens weights in chunks): what the base
  // must be given instead of x, and what is added to its product. The bias is in neither. Not where a DoRA by columns covers a
  // part of the rows.
  at::Tensor BaseInput(const at::Tensor& x, const RowModality& rows) const;
  void AddTerms(const at::Tensor& x, const RowModality& rows, at::Tensor& y) const;

  int64_t out() const { return base_.out(); }

 private:
  // Several additive pairs on one row range as one pair.
  struct Pair {
    at::Tensor a;        // [sum of ranks, in]
    at::Tensor b;        // [count, sum of ranks]
    OutRange range;
    float factor = 1;    // Of a single pair whose rows all take the same.
    at::Tensor columns;  // Otherwise: [1 or 3 (by modality), sum of ranks], the factor of each column of A x.
  };
  // Operations between which no order has to be kept, except that a DoRA operation stands alone.
  struct Step {
    std::vector<Pair> pairs;
    std::vector<const KroneckerOp*> kroneckers;
    const DoraRowsOp* dora_rows = nullptr;
    const DoraColumnsOp* dora_columns = nullptr;
  };

  // Output rows whose base sees the same input: all of them, unless a DoRA by columns covers a part.
  struct Segment {
    OutRange range;
    std::vector<Step> steps;
  };

  // Takes its steps from these operations, which must outlive it; none of them reaches beyond the range.
  Segment MakeSegment(OutRange range, const std::vector<const SiteOp*>& ops) const;
  void AddOffsets(const RowModality& rows, at::Tensor& y) const;
  // What each step sees of x, then what the base sees.
  std::vector<at::Tensor> Inputs(const Segment& segment, const at::Tensor& x, const RowModality& rows) const;
  void ApplyStep(const Step& step, const at::Tensor& x, const RowModality& rows, at::Tensor& y) const;

  const std::shared_ptr<const BaseLinear> merged_;
  const BaseLinear& base_;
  const c10::ScalarType compute_;
  std::deque<SiteOp> narrowed_;  // Operations cut at the borders of segments.
  std::vector<Segment> segments_;
  std::vector<const OffsetOp*> offsets_;
};

}  // namespace h3
