// torch's view of the activations: checks, shapes and registration (schemas: flexops/ops/activation.py).

#include "common/binding.h"

#include "activation/activation.h"

namespace flexops {
namespace {

using Maybe = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

void check_like(const char* op, const char* argument, const Tensor& tensor, Dtype dtype, const Tensor& like, const char* name) {
  check_device(op, argument, tensor, name, like);
  FLEXOPS_CHECK(tensor.dtype() == dtype, op, ": ", argument, " must be ", dtype_name(dtype), ", as ", name, ", got ",
                dtype_name(tensor.dtype()));
}

/// How far apart rows of the last dimension are; makes a contiguous copy if that is not one number, or elements are not neighbours.
int64_t row_stride(Tensor& x) {
  const int64_t dim = x.dim(), columns = dim ? x.size(-1) : 1;
  if (x.is_contiguous()) return columns;
  const int64_t *sizes = x.sizes(), *strides = x.strides();
  int64_t stride = 0, expected = -1;  // of the next dimension that has more than one element
  bool regular = columns <= 1 || strides[dim - 1] == 1;
  for (int64_t d = dim - 2; d >= 0 && regular; --d) {
    if (sizes[d] == 1) continue;
    if (expected == -1) stride = strides[d];
    regular = expected == -1 || strides[d] == expected;
    expected = strides[d] * sizes[d];
  }
  if (regular && stride < (int64_t{1} << 32)) return expected == -1 ? columns : stride;
  x = contiguous(x);
  return columns;
}

Activation gelu_of(bool tanh) { return tanh ? Activation::gelu_tanh : Activation::gelu_erf; }

#if FLEXOPS_DEVICE_CPU
constexpr int64_t kGrain = 16384;  // elements that are worth a thread
int64_t grain_for(int64_t elements) { return elements < kGrain ? kGrain / (elements > 0 ? elements : 1) : 1; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
#endif

// ---- act(x + bias) --------------------------------------------------------------------------------------------------

/// What forward and backward share. The tensors are replaced by what the kernels can take.
BiasedActivation make_biased(const char* op, Activation activation, Tensor& x, Maybe& bias) {
  BiasedActivation c = {};
  c.activation = activation;
  c.type = c.bias_type = element_type(op, "x", x.dtype());
  FLEXOPS_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  c.columns = x.size(-1);
  c.rows = c.columns ? x.numel() / c.columns : 0;
  if (bias) {
    c.bias_type = element_type(op, "bias", bias->dtype());
    check_device(op, "bias", *bias, "x", x);
    FLEXOPS_CHECK(bias->dim() == 1 && bias->size(0) == c.columns, op, ": bias must have shape [", c.columns, "], got ", shape_text(*bias));
    const bool in_place = bias->is_contiguous() && reinterpret_cast<uintptr_t>(bias->data()) % 16 == 0;
    if (!in_place) {
      Tensor moved = empty_like_contiguous(*bias, bias->dtype());
      copy(moved, *bias);
      *bias = std::move(moved);
    }
    c.bias = bias->data();
  }
  c.x_stride = row_stride(x);
  c.x = x.data();
  c.slices = 1;
  return c;
}

Tensor biased(const char* op, Activation activation, Tensor& x, Maybe& bias) {
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  Tensor out = empty_like_contiguous(x, x.dtype());
  BiasedActivation c = make_biased(op, activation, x, bias);
  c.out = out.data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, biased_activation_cuda(c, current_stream(x)));
#else
  parallel_for(0, c.rows * activation_tiles(c.columns), grain_for(least(c.columns, kActivationColumns)),
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(biased_activation_cpu)(c, begin, end); });
#endif
  return out;
}

Two biased_backward(const char* op, Activation activation, Tensor& grad, Tensor& x, Maybe& bias, bool bias_gradient) {
  check_like(op, "grad", grad, x.dtype(), x, "x");
  FLEXOPS_CHECK(same_shape(grad, x), op, ": grad must have x's shape ", shape_text(x), ", got ", shape_text(grad));
  FLEXOPS_CHECK(bias || !bias_gradient, op, ": bias_gradient must be false without a bias");
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  Tensor out = empty_like_contiguous(x, x.dtype());
  const Dtype bias_dtype = bias ? bias->dtype() : x.dtype();
  BiasedActivation c = make_biased(op, activation, x, bias);
  c.grad_stride = row_stride(grad);
  c.grad = grad.data(), c.out = out.data();
#if FLEXOPS_DEVICE_CPU
  c.slice_rows = bias_gradient ? least(64, (c.rows + 63) / 64 * 8) : 1;  // enough slices for many threads, few enough to add up
  const int64_t slices = c.rows ? (c.rows + c.slice_rows - 1) / c.slice_rows : 0;
#endif
  const int64_t length = bias_gradient ? c.columns : 0;
  Tensor bias_grad = empty(&length, 1, bias_dtype, x), sums;
  if (bias_gradient) {
    c.bias_grad = bias_grad.data();
#if FLEXOPS_DEVICE_CUDA
    c.slices = bias_slices_cuda(c);
#else
    c.slices = slices;
#endif
    if (c.slices != 1) {
      const int64_t sizes[2] = {c.slices, c.columns};
      sums = empty(sizes, 2, Dtype::f32, x);
      c.sums = sums.data<float>();
    }
  }
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, biased_activation_cuda(c, current_stream(x)));
#else
  const int64_t tiles = activation_tiles(c.columns);
  parallel_for(0, slices * tiles, grain_for(least(c.columns, kActivationColumns) * c.slice_rows),
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(biased_activation_backward_cpu)(c, begin, end); });
  if (bias_gradient && c.slices != 1) {
    parallel_for(0, tiles, grain_for(least(c.columns, kActivationColumns) * c.slices),
                 [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(bias_gradient_cpu)(c, begin, end); });
  }
#endif
  return {std::move(out), std::move(bias_grad)};
}

// ---- act(gate) * up -------------------------------------------------------------------------------------------------

/// As above. `columns` are the result's.
GatedActivation make_gated(const char* op, Activation activation, Tensor& gate, Maybe& up, bool interleaved) {
  GatedActivation c = {};
  c.activation = activation;
  c.type = element_type(op, "gate", gate.dtype());
  FLEXOPS_CHECK(gate.dim() >= 1, op, ": gate must have at least one dimension");
  c.columns = gate.size(-1);
  if (up) {
    FLEXOPS_CHECK(!interleaved, op, ": interleaved must be false if up is given");
    check_like(op, "up", *up, gate.dtype(), gate, "gate");
    FLEXOPS_CHECK(same_shape(*up, gate), op, ": up must have gate's shape ", shape_text(gate), ", got ", shape_text(*up));
  } else {
    FLEXOPS_CHECK(c.columns % 2 == 0, op, ": gate must have an even last dimension if up is not given, got ", c.columns);
    c.columns /= 2;
  }
  c.rows = c.columns ? gate.numel() / gate.size(-1) : 0;
  c.pairs = interleaved;
  c.gate_stride = row_stride(gate);
  c.gate = gate.data();
  if (up) {
    c.up_stride = row_stride(*up);
    c.up = up->data();
  } else if (!interleaved) {
    c.up_stride = c.gate_stride;
    c.up = static_cast<const char*>(c.gate) + c.columns * dtype_size(gate.dtype());
  }
  return c;
}

Tensor gated(const char* op, Activation activation, Tensor& gate, Maybe& up, bool interleaved) {
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(gate);
#endif
  GatedActivation c = make_gated(op, activation, gate, up, interleaved);
  std::vector<int64_t> sizes(gate.sizes(), gate.sizes() + gate.dim());
  sizes.back() = c.columns;
  Tensor out = empty(sizes.data(), static_cast<int64_t>(sizes.size()), gate.dtype(), gate);
  c.out = out.data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, gated_activation_cuda(c, current_stream(gate)));
#else
  parallel_for(0, c.rows * activation_tiles(c.columns), grain_for(least(c.columns, kActivationColumns)),
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(gated_activation_cpu)(c, begin, end); });
#endif
  return out;
}

/// The gradients of gate and up. `over_grad`: the gate's is written over `grad`. `again`: then what the forward pass gave, else nothing.
Three gated_backward(const char* op, Activation activation, Tensor& grad, Tensor& gate, Maybe& up, bool interleaved, bool over_grad = false,
                     bool again = false) {
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(gate);
#endif
  FLEXOPS_CHECK(!over_grad || grad.is_contiguous(), op, ": grad must be contiguous, since it is written");
  Tensor gate_grad = over_grad ? grad : empty_like_contiguous(gate, gate.dtype());
  const int64_t nothing = 0;
  Tensor up_grad = up ? empty_like_contiguous(gate, gate.dtype()) : empty(&nothing, 1, gate.dtype(), gate);
  Tensor out = again ? empty_like_contiguous(grad, gate.dtype()) : empty(&nothing, 1, gate.dtype(), gate);
  GatedActivation c = make_gated(op, activation, gate, up, interleaved);
  check_like(op, "grad", grad, gate.dtype(), gate, "gate");
  FLEXOPS_CHECK(grad.dim() == gate.dim() && grad.size(-1) == c.columns && grad.numel() == c.rows * c.columns, op,
                ": grad must have the result's shape, got ", shape_text(grad));
  c.grad_stride = row_stride(grad);
  c.grad = grad.data();
  c.gate_grad = gate_grad.data();
  if (again) c.out = out.data();
  c.out_stride = gate.size(-1);
  if (up) {
    c.up_grad = up_grad.data();
  } else if (!interleaved) {
    c.up_grad = static_cast<char*>(c.gate_grad) + c.columns * dtype_size(gate.dtype());
  }
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, gated_activation_cuda(c, current_stream(gate)));
#else
  parallel_for(0, c.rows * activation_tiles(c.columns), grain_for(least(c.columns, kActivationColumns)),
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(gated_activation_backward_cpu)(c, begin, end); });
#endif
  return {std::move(gate_grad), std::move(up_grad), std::move(out)};
}

Two first_two(Three all) { return {std::move(std::get<0>(all)), std::move(std::get<1>(all))}; }

// ---- the operators --------------------------------------------------------------------------------------------------

Tensor bias_gelu(Tensor x, Maybe bias, bool tanh) { return biased("flexops::bias_gelu", gelu_of(tanh), x, bias); }
Two bias_gelu_backward(Tensor grad, Tensor x, Maybe bias, bool tanh, bool bias_gradient) {
  return biased_backward("flexops::bias_gelu_backward", gelu_of(tanh), grad, x, bias, bias_gradient);
}
Tensor bias_silu(Tensor x, Maybe bias) { return biased("flexops::bias_silu", Activation::silu, x, bias); }
Two bias_silu_backward(Tensor grad, Tensor x, Maybe bias, bool bias_gradient) {
  return biased_backward("flexops::bias_silu_backward", Activation::silu, grad, x, bias, bias_gradient);
}
Tensor swiglu(Tensor gate, Maybe up, bool interleaved) { return gated("flexops::swiglu", Activation::silu, gate, up, interleaved); }
Two swiglu_backward(Tensor grad, Tensor gate, Maybe up, bool interleaved) {
  return first_two(gated_backward("flexops::swiglu_backward", Activation::silu, grad, gate, up, interleaved));
}
Tensor geglu(Tensor gate, Maybe up, bool tanh, bool interleaved) { return gated("flexops::geglu", gelu_of(tanh), gate, up, interleaved); }
Two geglu_backward(Tensor grad, Tensor gate, Maybe up, bool tanh, bool interleaved) {
  return first_two(gated_backward("flexops::geglu_backward", gelu_of(tanh), grad, gate, up, interleaved));
}

Two gated_backward_(Tensor grad, Tensor gate, Tensor up, int64_t activation, bool again) {
  const char* op = "flexops::gated_backward_";
  FLEXOPS_CHECK(0 <= activation && activation <= 2, op, ": activation must be 0 (silu), 1 (gelu) or 2 (gelu by tanh), got ", activation);
  Maybe other = std::move(up);
  Three all = gated_backward(op, activation == 0 ? Activation::silu : gelu_of(activation == 2), grad, gate, other, false, true, again);
  return {std::move(std::get<1>(all)), std::move(std::get<2>(all))};
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "bias_gelu", bias_gelu);
  FLEXOPS_IMPL(m, "bias_gelu_plain", bias_gelu);
  FLEXOPS_IMPL(m, "bias_gelu_backward", bias_gelu_backward);
  FLEXOPS_IMPL(m, "bias_silu", bias_silu);
  FLEXOPS_IMPL(m, "bias_silu_plain", bias_silu);
  FLEXOPS_IMPL(m, "bias_silu_backward", bias_silu_backward);
  FLEXOPS_IMPL(m, "swiglu", swiglu);
  FLEXOPS_IMPL(m, "swiglu_plain", swiglu);
  FLEXOPS_IMPL(m, "swiglu_backward", swiglu_backward);
  FLEXOPS_IMPL(m, "geglu", geglu);
  FLEXOPS_IMPL(m, "geglu_plain", geglu);
  FLEXOPS_IMPL(m, "geglu_backward", geglu_backward);
  FLEXOPS_IMPL(m, "gated_backward_", gated_backward_);
}

}  // namespace flexops
