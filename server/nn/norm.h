// RMS normalisation with float32 statistics, and the AdaLN modulation of rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace h3 {

// x [..., n] -> float32 [..., n]: x / sqrt(mean(x^2) + eps) * weight. `weight`: [n], or [..., n] where it differs by row; any
// float type. Allocates the result and one value a row.
at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight, float eps);

// x <- x * (1 + scale[pair]) + shift[pair], in place. x: float32 [rows, n]; scale, shift: float32 [pairs, n]; pair: int64 [rows].
void Modulate(at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift, const at::Tensor& pair);

// x <- x + gate[pair] * y, in place, in float32. x: [rows, n]; gate: float32 [pairs, n]; y: [rows, n] of x's type.
void AddGated(at::Tensor& x, const at::Tensor& gate, const at::Tensor& pair, const at::Tensor& y);

}  // namespace h3
