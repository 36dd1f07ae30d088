#include "server/nn/norm.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/mul.h>

#include <limits>

namespace h3 {

at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight, float eps) {
  // The squares' buffer becomes the result's. Their sum is pairwise: a norm reduction would lose 1e-6 over 5376 channels.
  at::Tensor out = x.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).square_();
  at::Tensor scale = out.mean(-1, /*keepdim=*/true).add_(eps);
  // Squares that overflow would make the row zero, a finite answer and a wrong one: NaN is seen at the end.
  scale.masked_fill_(scale.isinf(), std::numeric_limits<float>::quiet_NaN()).rsqrt_();
  return at::mul_out(out, x, scale).mul_(weight);
}

void Modulate(at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift, const at::Tensor& pair) {
  at::Tensor rows = scale.index_select(0, pair);
  x.mul_(rows.add_(1.0));
  at::index_select_out(rows, shift, 0, pair);
  x.add_(rows);
}

void AddGated(at::Tensor& x, const at::Tensor& gate, const at::Tensor& pair, const at::Tensor& y) {
  at::Tensor rows = gate.index_select(0, pair);
  if (x.scalar_type() == at::kFloat) {
    x.addcmul_(rows, y);
  } else {
    x.copy_(rows.mul_(y).add_(x));
  }
}

}  // namespace h3
