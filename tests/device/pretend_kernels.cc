// One kernel for nearly every operator: LibTorch's meta kernel tells the shapes of the results, they are allocated, and what is queued
// calls the CPU's kernel on the same pages. By hand only what moves data between devices, and what is a view.
#include "tests/device/pretend_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "server/base/check.h"
#include "tests/device/pretend_memory.h"
#include "tests/device/pretend_stream.h"

namespace h3::testing {
namespace {

using torch::jit::Stack;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

bool IsOurs(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

void KeepWrapped(const at::Tensor& from, at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

at::Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &GetPretendAllocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor EmptyContiguous(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &GetPretendAllocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype, std::nullopt);
}

at::Tensor MetaOf(const at::Tensor& tensor) {
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  KeepWrapped(tensor, meta);
  return meta;
}

// What a queued kernel needs of a tensor: none of it keeps the device's memory, as on a real one.
struct Operand {
  explicit Operand(const at::Tensor& tensor)
      : data(KernelAddress(tensor.numel() == 0 ? nullptr : tensor.const_data_ptr())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        wrapped(tensor.unsafeGetTensorImpl()->is_wrapped_number()) {}

  at::Tensor OnCpu() const {
    at::Tensor tensor = data == nullptr ? at::empty_strided(sizes, strides, at::TensorOptions(dtype))
                                        : at::from_blob(data, sizes, strides, at::TensorOptions(dtype));
    if (wrapped) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  char* data;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool wrapped;
};

// An argument with its tensors replaced by what `change` makes of them.
template <typename F>
c10::IValue Replaced(const c10::IValue& value, F&& change) {
  const auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(one(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void CheckOneDevice(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    Replaced(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(IsOurs(tensor) || tensor.dim() == 0, "Expected all tensors to be on the same device, but ", op.schema().operator_name(),
                  " found at least two devices, ", kDevice, " and ", tensor.device());
      return tensor;
    });
  }
}

// The shapes of what `op` returns, as meta tensors; nullopt where LibTorch has no meta kernel.
std::optional<Stack> Shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  Stack stack;
  for (const c10::IValue& argument : arguments) {
    stack.push_back(argument.isDevice() ? c10::IValue(c10::Device(at::kMeta)) : Replaced(argument, MetaOf));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  return stack;
}

// Keeps nothing of what was in it.
void Resize(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  const at::Tensor fresh = EmptyContiguous(sizes, tensor.scalar_type());
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
}

// Calls the CPU's kernel. `results`: where fresh results go; null ones are returned as they are.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) : op_(op) {
    for (const c10::IValue& argument : arguments) {
      Argument a{.value = argument.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : c10::IValue()};
      const auto keep = [&](const at::Tensor& tensor) {
        // A CPU scalar goes by value, at launch.
        a.operands.push_back(IsOurs(tensor) ? std::variant<Operand, at::Tensor>(Operand(tensor)) : std::variant<Operand, at::Tensor>(Copied(tensor)));
        return tensor;
      };
      const c10::IValue shape = Replaced(argument, keep);
      if (a.operands.empty() && !argument.isDevice()) a.value = argument;
      a.kind = argument.isTensor() ? Kind::kTensor : argument.isTensorList() ? Kind::kList : argument.isOptionalTensorList() ? Kind::kOptionalList : Kind::kOther;
      if (a.kind == Kind::kOptionalList) {
        for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector()) a.present.push_back(tensor.has_value() && tensor->defined());
      }
      arguments_.push_back(std::move(a));
    }
  }

  Stack Run() const {
    const c10::InferenceMode inference;
    Stack stack;
    for (const Argument& argument : arguments_) stack.push_back(OnCpu(argument));
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

 private:
  enum class Kind { kTensor, kList, kOptionalList, kOther };
  struct Argument {
    c10::IValue value;  // Where it holds no tensor.
    std::vector<std::variant<Operand, at::Tensor>> operands;
    std::vector<bool> present;
    Kind kind = Kind::kOther;
  };

  static at::Tensor Copied(const at::Tensor& scalar) {
    at::Tensor copy = at::empty_strided(scalar.sizes(), scalar.strides(), scalar.options());
    std::memcpy(copy.data_ptr(), scalar.const_data_ptr(), scalar.nbytes());
    KeepWrapped(scalar, copy);
    return copy;
  }

  static at::Tensor TensorOf(const std::variant<Operand, at::Tensor>& operand) {
    const auto* ours = std::get_if<Operand>(&operand);
    return ours != nullptr ? ours->OnCpu() : std::get<at::Tensor>(operand);
  }

  static c10::IValue OnCpu(const Argument& argument) {
    if (argument.operands.empty()) return argument.value;
    if (argument.kind == Kind::kTensor) return TensorOf(argument.operands.front());
    if (argument.kind == Kind::kList) {
      c10::List<at::Tensor> list;
      for (const auto& operand : argument.operands) list.push_back(TensorOf(operand));
      return list;
    }
    c10::List<std::optional<at::Tensor>> list;
    size_t next = 0;
    for (const bool present : argument.present) {
      list.push_back(present ? std::optional<at::Tensor>(TensorOf(argument.operands[next++])) : std::nullopt);
    }
    return list;
  }

  const c10::OperatorHandle op_;
  std::vector<Argument> arguments_;
};

// Runs `call` now, after all that was queued before it.
Stack RunAndWait(const c10::OperatorHandle& op, Call call) {
  Stack results;
  Launch([&] { results = call.Run(); });
  Count([&](PretendCounters& c) { ++c.shape_waits[op.schema().name()]; });
  Wait(MarkOf(CurrentStream()));
  return results;
}

at::Tensor UploadResult(const at::Tensor& host) {
  const at::Tensor device = EmptyStrided(host.sizes(), host.strides(), host.scalar_type());
  Launch([to = Operand(device), host] { to.OnCpu().copy_(host); });
  return device;
}

void Fallback(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  CheckOneDevice(op, arguments);
  Count([](PretendCounters& c) { ++c.kernels; });

  const auto& returns = schema.returns();
  const bool tensors_only = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& r) { return r.type()->isSubtypeOf(c10::TensorType::get()); });
  std::optional<Stack> shapes = tensors_only ? Shapes(op, arguments) : std::nullopt;
  std::optional<Stack> values;
  if (!shapes.has_value()) values = RunAndWait(op, Call(op, arguments));

  Stack results;
  std::vector<std::pair<size_t, Operand>> fresh;  // By the place among the results.
  for (size_t i = 0; i < returns.size(); ++i) {
    const c10::AliasInfo* const alias = returns[i].alias_info();
    const c10::IValue& like = shapes.has_value() ? (*shapes)[i] : (*values)[i];
    if (alias == nullptr) {
      if (!like.isTensor() || !like.toTensor().defined()) {
        results.push_back(like);
      } else if (values.has_value()) {
        results.push_back(UploadResult(like.toTensor()));
      } else {
        const at::Tensor result = EmptyStrided(like.toTensor().sizes(), like.toTensor().strides(), like.toTensor().scalar_type());
        fresh.emplace_back(i, Operand(result));
        results.push_back(result);
      }
      continue;
    }
    TORCH_CHECK(alias->isWrite(), schema.operator_name(), " is a view, and the pretend device has no kernel for it");
    for (size_t a = 0; a < count; ++a) {
      const c10::AliasInfo* const written = schema.arguments()[a].alias_info();
      if (written == nullptr || !(*written == *alias)) continue;
      const at::Tensor target = arguments[a].toTensor();
      const at::Tensor& shape = like.toTensor();
      if (target.sizes() != shape.sizes()) Resize(target, shape.sizes());
      results.push_back(target);
      break;
    }
  }
  if (shapes.has_value()) {
    Launch([call = Call(op, arguments), fresh] {
      const Stack made = call.Run();
      const c10::InferenceMode inference;
      for (const auto& [place, target] : fresh) target.OnCpu().copy_(made[place].toTensor());
    });
  }
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

at::Tensor Empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(format.value_or(c10::MemoryFormat::Contiguous) == c10::MemoryFormat::Contiguous, "the pretend device has contiguous tensors only");
  return EmptyContiguous(C10_AS_INTARRAYREF_SLOW(size), c10::dtype_or_default(dtype));
}

at::Tensor EmptyStridedKernel(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                              std::optional<c10::Device>, std::optional<bool>) {
  return EmptyStrided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype));
}

at::Tensor AsStrided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor View(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor ReshapeAlias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& ResizeKernel(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  const c10::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) Resize(self, sizes);
  return self;
}

// As CUDA copies: another type, or holes, on the host's side take a pageable copy there; a copy of pageable memory waits.
at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (IsOurs(from) && IsOurs(to)) {
    Count([](PretendCounters& c) { ++c.kernels; });
    Launch([from = Operand(from), to = Operand(to)] {
      const c10::InferenceMode inference;
      to.OnCpu().copy_(from.OnCpu());
    });
    return to;
  }
  const at::Tensor& host = IsOurs(from) ? to : from;
  if (host.numel() == 0) return to;
  const bool as_it_is = from.scalar_type() == to.scalar_type() && host.is_non_overlapping_and_dense() && from.strides() == to.strides();
  const std::shared_ptr<void> held = as_it_is ? HoldPinned(host.const_data_ptr()) : nullptr;
  const bool pinned = held != nullptr;
  Count([&](PretendCounters& c) {
    const auto bytes = static_cast<int64_t>(host.nbytes());
    (IsOurs(from) ? c.down_bytes : c.up_bytes) += bytes;
    if (pinned) return;
    ++c.pageable_copies;
    c.pageable_bytes += bytes;
  });
  if (IsOurs(from)) {
    // Whoever reads it before its time sees it.
    if (pinned) std::memset(to.data_ptr(), 0xff, to.nbytes());
    Launch([from = Operand(from), to, held] {
      const c10::InferenceMode inference;
      to.copy_(from.OnCpu());
    });
  } else {
    Launch([from, to = Operand(to), held] {
      const c10::InferenceMode inference;
      to.OnCpu().copy_(from);
    });
  }
  if (!pinned || !non_blocking) Wait(MarkOf(CurrentStream()));
  return to;
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  if (IsOurs(to) && to.sizes() != from.sizes()) Resize(to, from.sizes());
  return CopyFrom(from, to, false);
}

c10::Scalar LocalScalar(const at::Tensor& self) {
  c10::Scalar value;
  Launch([&, from = Operand(self)] {
    const c10::InferenceMode inference;
    value = from.OnCpu().item();
  });
  Count([&](PretendCounters& c) { c.down_bytes += static_cast<int64_t>(self.element_size()); });
  Wait(MarkOf(CurrentStream()));
  return value;
}

void RecordStream(at::Tensor& self, c10::Stream stream) { GetPretendAllocator().recordStream(self.storage().data_ptr(), stream); }

int64_t AttentionChoice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                        bool) {
  return static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

// The CPU's own choice and kernel, so that its bits come out.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> Attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias, double dropout, bool causal,
    bool, std::optional<double> scale) {
  TORCH_CHECK(!bias.has_value() && dropout == 0, "the pretend device attends without bias and dropout");
  Count([](PretendCounters& c) { ++c.kernels; });
  // [batch, heads, rows, head_dim], stored by rows.
  const at::Tensor out =
      EmptyContiguous({query.size(0), query.size(2), query.size(1), value.size(3)}, query.scalar_type()).transpose(1, 2);
  Launch([q = Operand(query), k = Operand(key), v = Operand(value), out = Operand(out), causal, scale] {
    const c10::InferenceMode inference;
    out.OnCpu().copy_(at::scaled_dot_product_attention(q.OnCpu(), k.OnCpu(), v.OnCpu(), {}, 0.0, causal, scale));
  });
  return {out, {}, {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

}  // namespace

void RegisterPretendKernels() {
  static auto* const fallback = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  static auto* const aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten->impl("empty.memory_format", TORCH_FN(Empty));
  aten->impl("empty_strided", TORCH_FN(EmptyStridedKernel));
  aten->impl("as_strided", TORCH_FN(AsStrided));
  aten->impl("view", TORCH_FN(View));
  aten->impl("_reshape_alias", TORCH_FN(ReshapeAlias));
  aten->impl("resize_", TORCH_FN(ResizeKernel));
  aten->impl("_copy_from", TORCH_FN(CopyFrom));
  aten->impl("_copy_from_and_resize", TORCH_FN(CopyFromAndResize));
  aten->impl("_local_scalar_dense", TORCH_FN(LocalScalar));
  aten->impl("record_stream", TORCH_FN(RecordStream));
  aten->impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(Attention));
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&AttentionChoice);
}

}  // namespace h3::testing
