// DoRA from kept vectors against DoRA by reading the weight: the same norms, and the weight is read once.
#include "server/lora/dora.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "server/tensor/counting_allocator.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

constexpr int64_t kOut = 60, kIn = 48;

// Counts how often the weight is read.
class WatchedLinear final : public BaseLinear {
 public:
  WatchedLinear() : BaseLinear(at::Tensor()), weight_(at::randn({kOut, kIn})) {}
  int64_t out() const override { return kOut; }
  int64_t in() const override { return kIn; }
  c10::ScalarType dtype() const override { return at::kFloat; }
  void Multiply(const at::Tensor&, int64_t, int64_t, at::Tensor&) const override { FAIL() << "nothing is multiplied here"; }
  at::Tensor Rows(int64_t begin, int64_t count) const override {
    rows_read_ += count;
    return weight_.narrow(0, begin, count);
  }
  int64_t rows_read() const { return rows_read_; }
  const at::Tensor& weight() const { return weight_; }

 private:
  const at::Tensor weight_;
  mutable int64_t rows_read_ = 0;
};

Factors Uniform(float factor) { return {{factor, factor, factor}}; }

class DoraTest : public ::testing::TestWithParam<MagnitudeAxis> {
 protected:
  DoraTest() {
    InstallCountingAllocator();
    at::manual_seed(5);
  }
  static bool rows() { return GetParam() == MagnitudeAxis::kRows; }
  static LowRankOp Pair(int64_t rank, OutRange range, float factor) {
    return {at::randn({rank, kIn}), at::randn({range.count, rank}), range, Uniform(factor)};
  }
  static ResidentTerm Term(int64_t rank, OutRange range) {
    ResidentTerm term{.range = range, .rank = rank};
    term.what = ResidentLowRank{.a = at::randn({rank, kIn}), .b = at::randn({range.count, rank}), .magnitude_axis = GetParam(),
                                .magnitude = at::randn({rows() ? range.count : kIn}).abs().add(5)};
    return term;
  }
  // keep and gain as one list of numbers.
  static std::vector<at::Tensor> Tables(const SiteOp& op) {
    if (const auto* by_rows = std::get_if<DoraRowsOp>(&op)) return {by_rows->keep, by_rows->gain};
    const auto& by_columns = std::get<DoraColumnsOp>(op);
    return {by_columns.keep, by_columns.gain};
  }
  static double Difference(const SiteOp& a, const SiteOp& b) {
    double worst = 0;
    for (size_t i = 0; i < 2; ++i) {
      const at::Tensor x = Tables(a)[i], y = Tables(b)[i];
      worst = std::max(worst, (at::linalg_vector_norm(x - y) / at::linalg_vector_norm(y)).item<double>());
    }
    return worst;
  }

  const WatchedLinear base_;
  NormCache cache_;
};

TEST_P(DoraTest, VectorsGiveTheNormsThatAPassOverTheWeightGives) {
  const OutRange whole{0, kOut}, part{10, 30};
  const ResidentTerm first = Term(3, whole), term = Term(4, rows() ? part : whole);
  std::vector<SiteOp> before = {Pair(2, whole, 0.3f), Pair(5, part, -0.8f), Pair(2, {40, 20}, 0.5f)};
  before.push_back(MakeDoraOp(base_, nullptr, before, first, 0.7, {0.6, 0.6, 0.6}));
  before.push_back(OffsetOp{at::randn({kOut}), whole, Uniform(1)});
  for (const auto& strength : {std::array{0.9, 0.9, 0.9}, std::array{0.9, -0.4, 0.1}}) {
    const SiteOp from_vectors = MakeDoraOp(base_, &cache_, before, term, 0.5, strength);
    const SiteOp from_pass = MakeDoraOp(base_, nullptr, before, term, 0.5, strength);
    EXPECT_LE(Difference(from_vectors, from_pass), 1e-6);
  }
}

TEST_P(DoraTest, TheWeightIsReadOnceWhateverTheStrengths) {
  const ResidentTerm term = Term(4, {0, kOut});
  const LowRankOp pair = Pair(2, {0, kOut}, 1);
  const auto make = [&](float before, double strength) {
    const std::vector<SiteOp> ops = {LowRankOp{pair.a, pair.b, pair.range, Uniform(before)}};
    return MakeDoraOp(base_, &cache_, ops, term, 0.5, {strength, strength, strength});
  };
  make(0.3f, 1);
  const int64_t read = base_.rows_read();
  EXPECT_GT(read, 0);
  EXPECT_LE(read, 3 * kOut) << "|W|^2, and once for each pair";
  for (int i = 0; i < 20; ++i) make(0.1f * static_cast<float>(i), 0.05 * i);
  EXPECT_EQ(base_.rows_read(), read);
}

// What the vectors cannot express is read from the weight, and right all the same: LoKr, and a DoRA of the other axis.
TEST_P(DoraTest, WhatVectorsCannotExpressIsReadFromTheWeight) {
  const ResidentTerm term = Term(4, {0, kOut});
  const std::vector<SiteOp> before = {KroneckerOp{at::randn({5, 6}), at::randn({12, 8}), {}, {0, kOut}, Uniform(0.4f)}};
  const SiteOp op = MakeDoraOp(base_, &cache_, before, term, 0.5, {1, 1, 1});
  const auto& kronecker = std::get<KroneckerOp>(before.front());
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  at::Tensor v = base_.weight().to(at::kDouble);
  v = v + 0.4f * kronecker.w1.to(at::kDouble).view({5, 1, 6, 1}).mul(kronecker.w2.to(at::kDouble).view({1, 12, 1, 8})).reshape({kOut, kIn}) +
      0.5 * at::mm(low_rank.b.to(at::kDouble), low_rank.a.to(at::kDouble));
  const at::Tensor gain = low_rank.magnitude.to(at::kDouble) / at::linalg_vector_norm(v, 2, rows() ? 1 : 0);
  const at::Tensor keep = Tables(op)[0].to(at::kDouble).view({-1});
  EXPECT_LE((at::linalg_vector_norm(keep - gain) / at::linalg_vector_norm(gain)).item<double>(), 1e-6) << "at strength 1, keep is m / |V|";
}

TEST_P(DoraTest, TheNormOfItsDeltaIsThatOfADenseOne) {
  const ResidentTerm term = Term(4, {0, kOut});
  const auto& low_rank = std::get<ResidentLowRank>(term.what);
  const at::Tensor w = base_.weight().to(at::kDouble);
  const at::Tensor v = w + 0.5 * at::mm(low_rank.b.to(at::kDouble), low_rank.a.to(at::kDouble));
  const at::Tensor gain = (low_rank.magnitude.to(at::kDouble) / at::linalg_vector_norm(v, 2, rows() ? 1 : 0)).unsqueeze(rows() ? 1 : 0);
  const double dense = (gain * v - w).square().sum().item<double>();
  EXPECT_NEAR(DoraSquaredNorm(base_, cache_, term, 0.5) / dense, 1, 1e-5);
}

TEST_P(DoraTest, VectorsLeaveWithTheirAdapter) {
  ResidentAdapter adapter;
  adapter.terms.push_back(Term(4, {0, kOut}));
  VramLedger& ledger = InstallCountingAllocator();
  const ByteCount before = ledger.Snapshot().of(Owner::kCaches);
  MakeDoraOp(base_, &cache_, {}, adapter.terms.front(), 0.5, {1, 1, 1});
  const ByteCount base_only = ByteCount(4 * (rows() ? kOut : kIn));
  EXPECT_EQ(ledger.Snapshot().of(Owner::kCaches) - before, base_only + base_only);
  cache_.Forget(adapter);
  EXPECT_EQ(ledger.Snapshot().of(Owner::kCaches) - before, base_only);
}

INSTANTIATE_TEST_SUITE_P(Axes, DoraTest, ::testing::Values(MagnitudeAxis::kRows, MagnitudeAxis::kColumns),
                         [](const auto& info) { return info.param == MagnitudeAxis::kRows ? "rows" : "columns"; });

}  // namespace
}  // namespace h3
