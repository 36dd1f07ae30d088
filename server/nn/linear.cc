#include "server/nn/linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <numeric>

#include "server/base/check.h"
#include "server/base/tiling.h"
#include "server/vram/ledger.h"

namespace h3 {

DenseLinear::DenseLinear(std::vector<at::Tensor> pieces, at::Tensor bias)
    : BaseLinear(std::move(bias)),
      pieces_(std::move(pieces)),
      out_(std::accumulate(pieces_.begin(), pieces_.end(), int64_t{0},
                           [](int64_t sum, const at::Tensor& piece) { return sum + piece.size(0); })) {
  for (const at::Tensor& piece : pieces_) H3_CHECK(piece.dim() == 2 && piece.size(1) == in() && piece.scalar_type() == dtype());
}

std::vector<at::Tensor> DenseLinear::Parts(int64_t begin, int64_t count) const {
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (const at::Tensor& piece : pieces_) {
    const int64_t from = std::max(begin, first);
    const int64_t to = std::min(begin + count, first + piece.size(0));
    if (from < to) parts.push_back(piece.narrow(0, from - first, to - from));
    first += piece.size(0);
  }
  return parts;
}

void DenseLinear::Multiply(const at::Tensor& x, int64_t begin, int64_t count, at::Tensor& y) const {
  int64_t done = 0;
  for (const at::Tensor& part : Parts(begin, count)) {
    const int64_t rows = part.size(0);
    // Same type: one product a piece. Otherwise widen a bounded number of rows at a time.
    const int64_t step = part.scalar_type() == x.scalar_type() ? rows : WidenedRows(in());
    for (int64_t row = 0; row < rows; row += step) {
      const int64_t tile = std::min(step, rows - row);
      at::Tensor slice = y.narrow(1, done + row, tile);
      at::mm_out(slice, x, part.narrow(0, row, tile).to(x.scalar_type()).t());
    }
    done += rows;
  }
}

at::Tensor DenseLinear::Rows(int64_t begin, int64_t count) const {
  std::vector<at::Tensor> parts = Parts(begin, count);
  for (at::Tensor& part : parts) part = part.to(at::kFloat);
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

HostLinear::HostLinear(std::vector<at::Tensor> pieces, c10::ScalarType held, c10::Device device, at::Tensor bias)
    : BaseLinear(std::move(bias)), host_(std::move(pieces), at::Tensor()), held_(held), device_(device) {}

at::Tensor HostLinear::Staged(int64_t begin, int64_t count) const {
  const OwnerScope owner(Owner::kStaging);
  at::Tensor staged = at::empty({count, in()}, at::TensorOptions().device(device_).dtype(held_));
  int64_t row = 0;
  for (const at::Tensor& part : host_.Parts(begin, count)) {
    staged.narrow(0, row, part.size(0)).copy_(part);
    row += part.size(0);
  }
  return staged;
}

void HostLinear::Multiply(const at::Tensor& x, int64_t begin, int64_t count, at::Tensor& y) const {
  const int64_t step = WidenedRows(in());
  for (int64_t row = 0; row < count; row += step) {
    const int64_t rows = std::min(step, count - row);
    at::Tensor slice = y.narrow(1, row, rows);
    at::mm_out(slice, x, Staged(begin + row, rows).to(x.scalar_type()).t());
  }
}

at::Tensor HostLinear::Rows(int64_t begin, int64_t count) const { return Staged(begin, count).to(at::kFloat); }

}  // namespace h3
