#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <gtest/gtest.h>

#include <cmath>

#include "server/nn/attention.h"
#include "server/nn/norm.h"
#include "server/nn/rope.h"

namespace h3 {
namespace {

double RelativeError(const at::Tensor& got, const at::Tensor& want) {
  return (at::linalg_vector_norm(got.to(at::kDouble) - want) / at::linalg_vector_norm(want)).item<double>();
}

TEST(RmsNormTest, EqualsTheFormulaInFloat64) {
  const at::Tensor x = at::randn({9, 40}, at::kFloat).mul_(3), weight = at::randn({40}, at::kFloat);
  const at::Tensor wide = x.to(at::kDouble);
  const at::Tensor want = wide * (wide.square().mean(-1, true) + 1e-5).rsqrt() * weight.to(at::kDouble);
  EXPECT_LE(RelativeError(RmsNorm(x, weight, 1e-5f), want), 2e-7);
}

TEST(RmsNormTest, TakesItsStatisticsOfBfloat16RowsInFloat32) {
  // 4096 equal values: a bfloat16 sum of squares would stop growing at 256.
  const at::Tensor x = at::rand({2, 4096}, at::kFloat).add_(1).to(at::kBFloat16), weight = at::randn({4096}, at::kFloat);
  const at::Tensor wide = x.to(at::kDouble);
  const at::Tensor want = wide * (wide.square().mean(-1, true) + 1e-5).rsqrt() * weight.to(at::kDouble);
  EXPECT_LE(RelativeError(RmsNorm(x, weight, 1e-5f), want), 2e-7);
}

TEST(ModulateTest, EachRowTakesItsLine) {
  at::Tensor x = at::randn({7, 5}, at::kFloat);
  const at::Tensor scale = at::randn({3, 5}, at::kFloat), shift = at::randn({3, 5}, at::kFloat), pair = at::randint(0, 3, {7}, at::kLong);
  const at::Tensor want = x * (scale.index_select(0, pair) + 1) + shift.index_select(0, pair);
  Modulate(x, scale, shift, pair);
  EXPECT_LE(RelativeError(x, want.to(at::kDouble)), 2e-7);
}

TEST(RotateTest, TurnsPairsAndLeavesTheRestOfAHead) {
  const std::vector<std::array<double, 3>> positions = {{0, 0, 0}, {3.5, -2, 7}};
  const RotaryTable table = MakeRotaryTable(positions, {1.0f, 0.25f}, at::kCPU);
  const at::Tensor x = at::randn({2, 3, 16}, at::kFloat);  // Rotates 12 of 16 channels.
  at::Tensor y = x.clone();
  Rotate(y, table);
  EXPECT_TRUE(y.select(0, 0).equal(x.select(0, 0)));  // Position 0 turns nothing.
  EXPECT_TRUE(y.narrow(2, 12, 4).equal(x.narrow(2, 12, 4)));
  const double angle = -2 * 0.25;  // Axis h, second frequency: channel 3 with channel 9.
  const double first = x[1][2][3].item<float>(), second = x[1][2][9].item<float>();
  EXPECT_NEAR(y[1][2][3].item<float>(), first * std::cos(angle) - second * std::sin(angle), 1e-6);
  EXPECT_NEAR(y[1][2][9].item<float>(), second * std::cos(angle) + first * std::sin(angle), 1e-6);
}

// In both row orders of a fused projection, with one head at a time and with all at once.
TEST(AttendInPlaceTest, EqualsSoftmaxInFloat64) {
  for (const bool interleaved : {false, true}) {
    for (const int64_t budget : {int64_t{1}, int64_t{1} << 20}) {
      const at::Tensor buffer = interleaved ? at::randn({33, 4, 3, 8}, at::kFloat) : at::randn({33, 3, 4, 8}, at::kFloat);
      const auto part = [&](int i) { return interleaved ? buffer.select(2, i) : buffer.select(1, i); };
      const auto heads = [&](int i) { return part(i).transpose(0, 1).to(at::kDouble); };
      const at::Tensor scores = at::matmul(heads(0), heads(1).transpose(1, 2)) / std::sqrt(8.0);
      const at::Tensor want = at::matmul(at::softmax(scores, -1), heads(2)).transpose(0, 1);
      at::Tensor q = part(0);
      AttendInPlace(q, part(1), part(2), budget);
      EXPECT_LE(RelativeError(q, want), 5e-7) << interleaved << budget;
    }
  }
}

}  // namespace
}  // namespace h3
