// A site with a stack against the same stack merged into a float64 copy of the weight.
#include "server/nn/site.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/kron.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "server/tensor/counting_allocator.h"

namespace h3 {
namespace {

// Sizes that no two dimensions share, so that a transposed or a merged tensor is noticed.
constexpr int64_t kRows = 137, kIn = 48, kOut = 60;

struct Numerics {
  const char* name;
  c10::ScalarType dtype;
  double tolerance;  // Relative Frobenius error: twice the worst that was measured.
};

at::Tensor Random(at::IntArrayRef shape, c10::ScalarType dtype) { return at::randn(shape, at::kFloat).to(dtype); }

double RelativeError(const at::Tensor& got, const at::Tensor& want) {
  return (at::linalg_vector_norm(got.to(at::kDouble) - want) / at::linalg_vector_norm(want)).item<double>();
}

class SiteTest : public ::testing::TestWithParam<Numerics> {
 protected:
  void SetUp() override {
    InstallCountingAllocator();
    at::manual_seed(11);
    weight_ = Random({kOut, kIn}, dtype());
    bias_ = Random({kOut}, dtype());
    x_ = Random({kRows, kIn}, dtype());
    tags_ = at::randint(0, kModalities, {kRows}, at::kLong);
    base_ = std::make_unique<DenseLinear>(std::vector<at::Tensor>{weight_}, bias_);
  }
  c10::ScalarType dtype() const { return GetParam().dtype; }
  LowRankOp Pair(int64_t rank, OutRange range, Factors factors) {
    return {Random({rank, kIn}, dtype()), Random({range.count, rank}, dtype()), range, factors};
  }
  // y of the rows of one modality with W' in float64.
  at::Tensor Reference(const at::Tensor& merged) const {
    return at::mm(x_.to(at::kDouble), merged.t()) + bias_.to(at::kDouble);
  }
  static void Merge(at::Tensor& merged, const LowRankOp& op, int modality) {
    merged.narrow(0, op.range.begin, op.range.count)
        .add_(at::mm(op.b.to(at::kDouble), op.a.to(at::kDouble)), op.factors.of[static_cast<size_t>(modality)]);
  }
  // Rows take the result of their own modality.
  at::Tensor ByModality(const std::array<at::Tensor, kModalities>& results) const {
    at::Tensor out = results[0].clone();
    for (int m = 1; m < kModalities; ++m) {
      const at::Tensor mask = (tags_ == m).unsqueeze(1);
      out = out.where(mask.logical_not(), results[static_cast<size_t>(m)]);
    }
    return out;
  }
  void ExpectClose(const SiteProgram& program, const RowModality& rows, const at::Tensor& want) {
    const double error = RelativeError(BoundSite(*base_, program, dtype()).Apply(x_, rows), want);
    EXPECT_LE(error, GetParam().tolerance);
  }

  at::Tensor weight_, bias_, x_, tags_;
  std::unique_ptr<DenseLinear> base_;
};

TEST_P(SiteTest, WithoutAStackItIsTheBase) { ExpectClose({}, {}, Reference(weight_.to(at::kDouble))); }

TEST_P(SiteTest, AStackEqualsItsMergedForm) {
  SiteProgram program;
  at::Tensor merged = weight_.to(at::kDouble).clone();
  for (const auto& [rank, begin, count, f] : std::vector<std::tuple<int64_t, int64_t, int64_t, float>>{
           {4, 0, kOut, 0.7f}, {3, 20, 20, -1.1f}, {5, 0, kOut, 0.4f}, {2, 20, 20, 0.9f}, {7, 40, 20, 0.2f}}) {
    const LowRankOp op = Pair(rank, {begin, count}, {{f, f, f}});
    Merge(merged, op, 0);
    program.ops.push_back(op);
  }
  ExpectClose(program, {}, Reference(merged));
}

TEST_P(SiteTest, FactorsFollowTheModalityOfEachRow) {
  SiteProgram program;
  std::vector<LowRankOp> ops = {Pair(4, {0, kOut}, {{1.0f, 0.5f, -0.25f}}), Pair(3, {0, kOut}, {{0.3f, 0.0f, 2.0f}}),
                                Pair(2, {10, 30}, {{0.6f, 0.7f, 0.8f}})};
  std::array<at::Tensor, kModalities> results;
  for (int m = 0; m < kModalities; ++m) {
    at::Tensor merged = weight_.to(at::kDouble).clone();
    for (const LowRankOp& op : ops) Merge(merged, op, m);
    results[static_cast<size_t>(m)] = Reference(merged);
  }
  for (const LowRankOp& op : ops) program.ops.emplace_back(op);
  ExpectClose(program, {.tags = tags_}, ByModality(results));
  ExpectClose(program, {.uniform = 2}, results[2]);
}

TEST_P(SiteTest, AKroneckerProductOnARowRangeInAnotherOrder) {
  const at::Tensor w1 = Random({4, 6}, dtype()), w2 = Random({5, 8}, dtype());  // 20 x 48
  const at::Tensor order = at::randperm(20, at::kLong);
  SiteProgram program;
  program.ops.emplace_back(KroneckerOp{w1, w2, order, {30, 20}, {{0.5f, 0.5f, 0.5f}}});
  at::Tensor merged = weight_.to(at::kDouble).clone();
  merged.narrow(0, 30, 20).add_(at::kron(w1.to(at::kDouble), w2.to(at::kDouble)).index_select(0, order), 0.5);
  ExpectClose(program, {}, Reference(merged));
}

TEST_P(SiteTest, AnOffsetIsAddedOnceWithItsStrength) {
  const at::Tensor offset = Random({20}, at::kFloat);
  SiteProgram program;
  program.ops.emplace_back(OffsetOp{offset, {20, 20}, {{0.5f, -1.0f, 2.0f}}});
  std::array<at::Tensor, kModalities> results;
  for (int m = 0; m < kModalities; ++m) {
    at::Tensor& y = results[static_cast<size_t>(m)];
    y = Reference(weight_.to(at::kDouble));
    y.narrow(1, 20, 20).add_(offset.to(at::kDouble), std::array{0.5, -1.0, 2.0}[static_cast<size_t>(m)]);
  }
  ExpectClose(program, {.tags = tags_}, ByModality(results));
}

// A low-rank predecessor, DoRA by rows with other strengths for each modality, a low-rank successor.
TEST_P(SiteTest, DoraByRowsScalesWhatCameBeforeIt) {
  const LowRankOp before = Pair(3, {0, kOut}, {{0.4f, 0.4f, 0.4f}}), after = Pair(2, {0, kOut}, {{0.2f, 0.2f, 0.2f}});
  const LowRankOp dora = Pair(4, {0, kOut}, {});
  const at::Tensor keep = at::randn({kModalities, kOut}, at::kFloat).abs(), gain = at::randn({kModalities, kOut}, at::kFloat);
  std::array<at::Tensor, kModalities> results;
  for (int m = 0; m < kModalities; ++m) {
    at::Tensor merged = weight_.to(at::kDouble).clone();
    Merge(merged, before, m);
    merged.mul_(keep.select(0, m).to(at::kDouble).unsqueeze(1));
    merged.add_(at::mm(dora.b.to(at::kDouble), dora.a.to(at::kDouble)).mul_(gain.select(0, m).to(at::kDouble).unsqueeze(1)));
    Merge(merged, after, m);
    results[static_cast<size_t>(m)] = Reference(merged);
  }
  SiteProgram program;
  program.ops = {before, DoraRowsOp{dora.a, dora.b, dora.range, keep, gain}, after};
  ExpectClose(program, {.tags = tags_}, ByModality(results));
  program.ops = {before, DoraRowsOp{dora.a, dora.b, dora.range, keep.narrow(0, 1, 1), gain.narrow(0, 1, 1)}, after};
  ExpectClose(program, {}, results[1]);
}

TEST_P(SiteTest, DoraByColumnsScalesTheInputOfWhatCameBeforeIt) {
  const LowRankOp before = Pair(3, {0, kOut}, {{0.4f, 0.4f, 0.4f}}), after = Pair(2, {0, kOut}, {{0.2f, 0.2f, 0.2f}});
  const LowRankOp dora = Pair(4, {0, kOut}, {{0.5f, 0.6f, 0.7f}});
  const at::Tensor keep = at::randn({kModalities, kIn}, at::kFloat).abs(), gain = at::randn({kModalities, kIn}, at::kFloat);
  std::array<at::Tensor, kModalities> results;
  for (int m = 0; m < kModalities; ++m) {
    at::Tensor merged = weight_.to(at::kDouble).clone();
    Merge(merged, before, m);
    merged.mul_(keep.select(0, m).to(at::kDouble));
    merged.add_(at::mm(dora.b.to(at::kDouble), dora.a.to(at::kDouble)).mul_(gain.select(0, m).to(at::kDouble)),
                dora.factors.of[static_cast<size_t>(m)]);
    Merge(merged, after, m);
    results[static_cast<size_t>(m)] = Reference(merged);
  }
  SiteProgram program;
  program.ops = {before, DoraColumnsOp{dora.a, dora.b, dora.range, dora.factors, keep, gain}, after};
  ExpectClose(program, {.tags = tags_}, ByModality(results));
}

// Worst seen: float32 2.6e-7, bfloat16 4.2e-3.
INSTANTIATE_TEST_SUITE_P(Cpu, SiteTest,
                         ::testing::Values(Numerics{"f32", at::kFloat, 6e-7}, Numerics{"bf16", at::kBFloat16, 9e-3}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(SiteAllocationTest, NothingOfTheSizeOfTheWeightIsAllocated) {
  InstallCountingAllocator();
  // out x in = 512 x 640 elements; rows x anything is far from it.
  const DenseLinear base({at::randn({512, 640}, at::kFloat)}, {});
  SiteProgram program;
  for (int i = 0; i < 4; ++i) {
    program.ops.emplace_back(LowRankOp{at::randn({8, 640}, at::kFloat), at::randn({512, 8}, at::kFloat), {0, 512}, {{1, 1, 1}}});
  }
  const at::Tensor x = at::randn({129, 640}, at::kFloat);
  std::atomic<int64_t> largest{0};
  SetAllocationObserver([&](ByteCount bytes) { largest = std::max(largest.load(), bytes.value()); });
  BoundSite(base, program, at::kFloat).Apply(x, {});
  SetAllocationObserver(nullptr);
  EXPECT_LT(largest.load(), 512 * 640 * 4);
  EXPECT_GE(largest.load(), 129 * 512 * 4);  // The observer saw the output.
}

TEST(DenseLinearTest, PiecesStackOnTheRowAxis) {
  const at::Tensor whole = at::randn({30, 8}, at::kFloat), x = at::randn({5, 8}, at::kFloat);
  const DenseLinear one({whole}, {}), three({whole.narrow(0, 0, 4), whole.narrow(0, 4, 16), whole.narrow(0, 20, 10)}, {});
  EXPECT_TRUE(three.Rows(2, 20).equal(whole.narrow(0, 2, 20)));
  at::Tensor a = at::zeros({5, 30}, at::kFloat), b = at::zeros({5, 30}, at::kFloat);
  one.Multiply(x, 0, one.out(), a);
  three.Multiply(x, 0, three.out(), b);
  EXPECT_LE(RelativeError(b, a.to(at::kDouble)), 1e-6);
}

}  // namespace
}  // namespace h3
