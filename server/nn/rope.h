// Three-axis rotary embedding of the packed positions, split-half pairing.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

namespace h3 {

// Angles of each row: axis (t, h, w) x frequency, as cosines and sines, float32 [rows, 3 * frequencies] on the device.
struct RotaryTable {
  at::Tensor cos;
  at::Tensor sin;

  RotaryTable Narrow(int64_t begin, int64_t count) const { return {cos.narrow(0, begin, count), sin.narrow(0, begin, count)}; }
};

// Positions are rounded to float32 before they meet the frequencies, as the released model does.
RotaryTable MakeRotaryTable(const std::vector<std::array<double, 3>>& positions, const std::vector<float>& inv_freq,
                            c10::Device device);

// Rotates the first 2 * 3 * frequencies channels of each head in place: channel i with i + 3 * frequencies. x: float32
// [rows, heads, head_dim].
void Rotate(at::Tensor& x, const RotaryTable& table);

}  // namespace h3
