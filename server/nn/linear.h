// The base of a linear site: the weight that is never written. One interface, so that a quantised or a streamed weight can take
// a dense one's place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace h3 {

// Const and thread-compatible: one thread at a time computes on a device.
class BaseLinear {
 public:
  virtual ~BaseLinear() = default;

  virtual int64_t out() const = 0;
  virtual int64_t in() const = 0;
  // Type in which the weight is stored.
  virtual c10::ScalarType dtype() const = 0;

  // y [rows, count] = x [rows, in] W[begin .. begin + count]^T, without bias. x is of dtype(), or float32: then the weight is
  // widened in chunks of rows (how modulation is computed in float32 from bfloat16 weights). y is of x's type; its rows may be
  // strided. Rows of W are in stored order, which differs from the canonical one only for an interleaved qkv.
  virtual void Multiply(const at::Tensor& x, int64_t begin, int64_t count, at::Tensor& y) const = 0;

  // Rows [begin, begin + count) of W, stored order, float32 [count, in]: a view where W is float32, else a copy.
  virtual at::Tensor Rows(int64_t begin, int64_t count) const = 0;

  // [out], or undefined.
  const at::Tensor& bias() const { return bias_; }

 protected:
  explicit BaseLinear(at::Tensor bias) : bias_(std::move(bias)) {}

 private:
  const at::Tensor bias_;
};

// A dense weight in one or several pieces stacked on the row axis (a diffusers directory stores q, k and v apart; they stay
// mapped where they are).
class DenseLinear final : public BaseLinear {
 public:
  // `pieces`: [rows, in] each, same type.
  DenseLinear(std::vector<at::Tensor> pieces, at::Tensor bias);

  int64_t out() const override { return out_; }
  int64_t in() const override { return pieces_.front().size(1); }
  c10::ScalarType dtype() const override { return pieces_.front().scalar_type(); }
  void Multiply(const at::Tensor& x, int64_t begin, int64_t count, at::Tensor& y) const override;
  at::Tensor Rows(int64_t begin, int64_t count) const override;
  // The parts of rows [begin, begin + count), in order, as they are stored: views.
  std::vector<at::Tensor> Parts(int64_t begin, int64_t count) const;

 private:

  const std::vector<at::Tensor> pieces_;
  const int64_t out_;
};


// A weight that stays in host memory. Rows come to the device through a staging buffer, a bounded number at a time, and are
// forgotten again: for weights that are read seldom. Counts the buffer under Owner::kStaging.
class HostLinear final : public BaseLinear {
 public:
  // `pieces`: [rows, in] each, same type, on the CPU. `held`: the type that a dense weight would have on the device, through which
  // every value goes, so that the products have the same bits.
  HostLinear(std::vector<at::Tensor> pieces, c10::ScalarType held, c10::Device device, at::Tensor bias);

  int64_t out() const override { return host_.out(); }
  int64_t in() const override { return host_.in(); }
  c10::ScalarType dtype() const override { return held_; }
  void Multiply(const at::Tensor& x, int64_t begin, int64_t count, at::Tensor& y) const override;
  at::Tensor Rows(int64_t begin, int64_t count) const override;

 private:
  // Of the held type, on the device.
  at::Tensor Staged(int64_t begin, int64_t count) const;

  const DenseLinear host_;
  const c10::ScalarType held_;
  const c10::Device device_;
};

}  // namespace h3
