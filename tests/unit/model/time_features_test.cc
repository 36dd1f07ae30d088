// The table lookup of a pruned model at and beyond its ends, against the formula in float64.
#include "server/model/time_features.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace h3 {
namespace {

// pos = clamp(t, 0, 1) (rows - 1); between row floor(pos), never the last, and the next.
at::Tensor Reference(const at::Tensor& table, double t) {
  const double position = std::clamp(t, 0.0, 1.0) * static_cast<double>(table.size(0) - 1);
  const auto low = std::min<int64_t>(static_cast<int64_t>(std::floor(position)), table.size(0) - 2);
  const at::Tensor wide = table.to(at::kDouble);
  return wide[low] + (wide[low + 1] - wide[low]) * (position - static_cast<double>(low));
}

// Any width and any number of rows; the ends, the nodes, what rounding makes of them, and what lies outside.
TEST(LerpTableTest, EqualsTheFormulaAtEveryKindOfPoint) {
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>(1025, 8), {17, 9}, {2, 16}, {9, 1}}) {
    const at::Tensor table = at::randn({rows, width});
    const float above = std::nextafter(1.0f, 2.0f), below = std::nextafter(1.0f, 0.0f);
    const std::vector<float> points = {0, 1, 0.5f, 1e-6f, 1 - 1e-6f, below, above, -1e-7f, -3, 7, 0.999f, 1.0f / static_cast<float>(rows - 1),
                                       std::numeric_limits<float>::min()};
    const at::Tensor got = LerpTable(table, points);
    ASSERT_EQ(got.sizes(), at::IntArrayRef({static_cast<int64_t>(points.size()), width}));
    for (size_t i = 0; i < points.size(); ++i) {
      const at::Tensor want = Reference(table, points[i]);
      const double error = at::linalg_vector_norm(got[static_cast<int64_t>(i)].to(at::kDouble) - want).item<double>();
      EXPECT_LE(error, 1e-6 * at::linalg_vector_norm(want).item<double>()) << rows << " rows, t = " << points[i];
    }
    // The ends are the end rows, bit for bit.
    EXPECT_TRUE(got[0].equal(table[0]));
    EXPECT_TRUE(got[1].equal(table[rows - 1]));
    EXPECT_TRUE(got[6].equal(table[rows - 1]));
    EXPECT_TRUE(got[8].equal(table[0]));
  }
}

}  // namespace
}  // namespace h3
