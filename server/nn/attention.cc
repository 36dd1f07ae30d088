#include "server/nn/attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>

#include "server/base/tiling.h"
#include "server/vram/ledger.h"

namespace h3 {

void AttendInPlace(at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t group_bytes) {
  const OwnerScope owner(Owner::kWorkspace);
  const int64_t heads = q.size(1);
  const int64_t step = HeadGroup(group_bytes, q.size(0), q.size(2), static_cast<int64_t>(q.element_size()), heads);
  const auto group = [&](const at::Tensor& x, int64_t head, int64_t count) {
    return x.narrow(1, head, count).transpose(0, 1).unsqueeze(0);  // [1, heads, rows, head_dim]
  };
  for (int64_t head = 0; head < heads; head += step) {
    const int64_t count = std::min(step, heads - head);
    const at::Tensor out =
        at::scaled_dot_product_attention(group(q, head, count), group(k, head, count), group(v, head, count));
    q.narrow(1, head, count).transpose(0, 1).unsqueeze(0).copy_(out);
  }
}

}  // namespace h3
