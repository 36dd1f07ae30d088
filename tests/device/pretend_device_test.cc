// The pretend device itself: it computes what the CPU computes, and it catches the mistakes that it is for.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "server/tensor/device.h"
#include "tests/device/pretend_device.h"

namespace h3::testing {
namespace {

class PretendDeviceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { RegisterPretendDevice(); }
  static c10::Device Device() { return ParseDevice("auto").value(); }
  static at::Tensor Up(const at::Tensor& host) { return host.to(Device()); }
};

TEST_F(PretendDeviceTest, ComputesWhatTheCpuComputes) {
  const c10::InferenceMode inference;
  EXPECT_EQ(Device().str(), "pretend:0");
  const at::Tensor a = at::randn({7, 12}), b = at::randn({12, 5});
  const auto compute = [](const at::Tensor& a, const at::Tensor& b) {
    at::Tensor y = at::cat({a.mm(b), a.mm(b).mul(2.0)}, 1).narrow(1, 1, 6);
    y.add_(1.5);
    return y.index_select(0, at::arange(3, a.options().dtype(at::kLong))).to(at::kDouble).t().contiguous();
  };
  EXPECT_TRUE(compute(Up(a), Up(b)).cpu().equal(compute(a, b)));
  const at::Tensor q = at::randn({1, 2, 9, 8}), k = at::randn({1, 2, 9, 8}), v = at::randn({1, 2, 9, 8});
  EXPECT_TRUE(at::scaled_dot_product_attention(Up(q), Up(k), Up(v)).cpu().equal(at::scaled_dot_product_attention(q, k, v)));
  EXPECT_TRUE(Up(a).equal(Up(a)));
}

}  // namespace
}  // namespace h3::testing
