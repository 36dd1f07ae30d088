// Tensors as they travel: row-major, little-endian bytes with a name, a type and a shape.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "h3/v1/types.pb.h"

namespace h3::client {

// A tensor to send. Borrows its bytes: they must stay until the call that takes it returns.
struct TensorView {
  std::string name;
  v1::DType dtype = v1::DTYPE_F32;
  std::vector<int64_t> shape;
  absl::string_view data;  // Exactly the product of the shape times the width of the type.
};

// A tensor that was received. Owns its bytes.
struct Tensor {
  std::string name;
  v1::DType dtype = v1::DTYPE_F32;
  std::vector<int64_t> shape;
  std::string data;
};

}  // namespace h3::client
