#include "server/nn/rope.h"

#include <ATen/ops/empty.h>

#include <cmath>

namespace h3 {

RotaryTable MakeRotaryTable(const std::vector<std::array<double, 3>>& positions, const std::vector<float>& inv_freq,
                            c10::Device device) {
  const auto rows = static_cast<int64_t>(positions.size());
  const auto frequencies = static_cast<int64_t>(inv_freq.size());
  at::Tensor cos = at::empty({rows, 3 * frequencies}, at::kFloat);
  at::Tensor sin = at::empty({rows, 3 * frequencies}, at::kFloat);
  float* c = cos.data_ptr<float>();
  float* s = sin.data_ptr<float>();
  for (const std::array<double, 3>& position : positions) {
    for (const double coordinate : position) {
      for (const float frequency : inv_freq) {
        // The float32 product is the angle; its functions are taken exactly.
        const float angle = static_cast<float>(coordinate) * frequency;
        *c++ = static_cast<float>(std::cos(static_cast<double>(angle)));
        *s++ = static_cast<float>(std::sin(static_cast<double>(angle)));
      }
    }
  }
  return {cos.to(device), sin.to(device)};
}

void Rotate(at::Tensor& x, const RotaryTable& table) {
  const int64_t half = table.cos.size(1);
  const at::Tensor cos = table.cos.unsqueeze(1), sin = table.sin.unsqueeze(1);
  at::Tensor first = x.narrow(2, 0, half), second = x.narrow(2, half, half);
  const at::Tensor old_first = first.clone();
  first.mul_(cos).addcmul_(second, sin, -1);
  second.mul_(cos).addcmul_(old_first, sin);
}

}  // namespace h3
