// Full self-attention over the packed rows, head group by head group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace h3 {

// softmax(q k^T / sqrt(head_dim)) v, written over q. q, k, v: [rows, heads, head_dim] views of one buffer, any strides.
// `group_bytes` bounds the temporary: as many heads are computed at a time as fit (at least one).
void AttendInPlace(at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t group_bytes);

}  // namespace h3
