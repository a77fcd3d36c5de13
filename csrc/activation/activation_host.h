// From the activations' arguments to the launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"

#include "activation/activation.h"

namespace flexops {

/// By the number that operators have for it.
inline Activation gelu_of(int64_t approximate) {
  return approximate == 2   ? Activation::gelu_quick
         : approximate == 1 ? Activation::gelu_tanh
                            : Activation::gelu_erf;
}

inline int64_t activation_grain(int64_t elements) {
  constexpr int64_t kGrain = 16384;  // elements that are worth a thread
  return elements < kGrain ? kGrain / (elements > 0 ? elements : 1) : 1;
}

/// Calls f(begin, end) for parts of all tiles, of `rows` rows each, of as many `items`.
template <typename F>
void for_activation_tiles(int64_t items, int64_t columns, int64_t rows, const F& f) {
  parallel_for(0, items * activation_tiles(columns),
               activation_grain(least(columns, kActivationColumns) * rows), f);
}

// ---- act(x + bias) ----

/// What forward and backward share.
inline BiasedActivation make_biased(Host& host, Activation activation, const TensorView& x,
                                    const TensorView& bias, const TensorView& out) {
  FLEXOPS_CHECK(x.dim >= 1, host.op, ": x must have at least one dimension");
  BiasedActivation c = {};
  c.activation = activation;
  c.type = element_type(x), c.bias_type = bias ? element_type(bias) : c.type;
  c.rows = x.rows(), c.columns = x.columns(), c.x_stride = x.row_stride();
  c.x = x.data, c.bias = bias.data, c.out = out.data;
  c.slices = 1;
  return c;
}

inline void biased(Host& host, Activation activation, const TensorView& x, const TensorView& bias,
                   const TensorView& out) {
  const BiasedActivation c = make_biased(host, activation, x, bias, out);
  if (FLEXOPS_DEVICE_CUDA) return host.check(biased_activation_cuda(c, host.stream()));
  for_activation_tiles(c.rows, c.columns, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(biased_activation_cpu)(c, begin, end);
  });
}

/// `bias_grad`: whether it is wanted.
inline void biased_backward(Host& host, Activation activation, const TensorView& grad,
                            const TensorView& x, const TensorView& bias, const TensorView& out,
                            const TensorView& bias_grad) {
  FLEXOPS_CHECK(bias || !bias_grad, host.op, ": bias_gradient must be false without a bias");
  BiasedActivation c = make_biased(host, activation, x, bias, out);
  c.grad = grad.data, c.grad_stride = grad.row_stride();
  c.slice_rows = bias_grad ? least(64, (c.rows + 63) / 64 * 8)
                           : 1;  // enough slices for many threads, few enough to add up
  const int64_t slices = c.rows ? (c.rows + c.slice_rows - 1) / c.slice_rows : 0;
  if (bias_grad) {
    c.bias_grad = bias_grad.data;
    c.slices = FLEXOPS_DEVICE_CUDA ? bias_slices_cuda(c) : slices;
    if (c.slices != 1) c.sums = host.workspace<float>(c.slices * c.columns);
  }
  if (FLEXOPS_DEVICE_CUDA) return host.check(biased_activation_cuda(c, host.stream()));
  for_activation_tiles(slices, c.columns, c.slice_rows, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(biased_activation_backward_cpu)(c, begin, end);
  });
  if (!bias_grad || c.slices == 1) return;
  for_activation_tiles(1, c.columns, c.slices, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(bias_gradient_cpu)(c, begin, end);
  });
}

// ---- act(gate) * up ----

inline void* second_half(const TensorView& packed) {
  return packed.as<char>() + packed.columns() / 2 * dtype_size(packed.dtype);
}

/// What forward and backward share; columns are the result's.
inline GatedActivation make_gated(Host& host, Activation activation, const TensorView& gate,
                                  const TensorView& up, bool interleaved, const TensorView& out) {
  FLEXOPS_CHECK(gate.dim >= 1, host.op, ": gate must have at least one dimension");
  FLEXOPS_CHECK(!up || !interleaved, host.op, ": interleaved must be false if up is given");
  FLEXOPS_CHECK(up || gate.columns() % 2 == 0, host.op,
                ": gate must have an even last dimension if up is not given, got ", gate.columns());
  GatedActivation c = {};
  c.activation = activation;
  c.type = element_type(gate), c.pairs = interleaved;
  c.columns = up ? gate.columns() : gate.columns() / 2, c.rows = gate.rows();
  c.gate = gate.data, c.gate_stride = gate.row_stride();
  if (up) {
    c.up = up.data, c.up_stride = up.row_stride();
  } else if (!interleaved) {
    c.up = second_half(gate), c.up_stride = c.gate_stride;
  }
  c.out = out.data;
  return c;
}

inline void gated(Host& host, Activation activation, const TensorView& gate, const TensorView& up,
                  bool interleaved, const TensorView& out) {
  const GatedActivation c = make_gated(host, activation, gate, up, interleaved, out);
  if (FLEXOPS_DEVICE_CUDA) return host.check(gated_activation_cuda(c, host.stream()));
  for_activation_tiles(c.rows, c.columns, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(gated_activation_cpu)(c, begin, end);
  });
}

/// The gradients of gate and up, and `again` what the forward pass gave, if that is wanted.
/// `gate_grad` may be `grad`.
inline void gated_backward(Host& host, Activation activation, const TensorView& grad,
                           const TensorView& gate, const TensorView& up, bool interleaved,
                           const TensorView& gate_grad, const TensorView& up_grad,
                           const TensorView& again = {}) {
  GatedActivation c = make_gated(host, activation, gate, up, interleaved, again);
  FLEXOPS_CHECK(
      grad.dim == gate.dim && grad.columns() == c.columns && grad.numel == c.rows * c.columns,
      host.op, ": grad must have the result's shape, got ", shape_text(grad));
  c.grad = grad.data, c.grad_stride = grad.row_stride();
  c.gate_grad = gate_grad.data, c.out_stride = gate.columns();
  c.up_grad = up ? up_grad.data : interleaved ? nullptr : second_half(gate_grad);
  if (FLEXOPS_DEVICE_CUDA) return host.check(gated_activation_cuda(c, host.stream()));
  for_activation_tiles(c.rows, c.columns, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(gated_activation_backward_cpu)(c, begin, end);
  });
}

// ---- the operators ----

inline void bias_gelu_host(Host& host, const TensorView& x, const TensorView& bias,
                           int64_t approximate, const TensorView& out) {
  biased(host, gelu_of(approximate), x, bias, out);
}
inline void bias_silu_host(Host& host, const TensorView& x, const TensorView& bias,
                           const TensorView& out) {
  biased(host, Activation::silu, x, bias, out);
}
inline void bias_gelu_backward_host(Host& host, const TensorView& grad, const TensorView& x,
                                    const TensorView& bias, int64_t approximate, bool,
                                    const TensorView& x_grad, const TensorView& bias_grad) {
  biased_backward(host, gelu_of(approximate), grad, x, bias, x_grad, bias_grad);
}
inline void bias_silu_backward_host(Host& host, const TensorView& grad, const TensorView& x,
                                    const TensorView& bias, bool, const TensorView& x_grad,
                                    const TensorView& bias_grad) {
  biased_backward(host, Activation::silu, grad, x, bias, x_grad, bias_grad);
}

inline void bias_relu2_host(Host& host, const TensorView& x, const TensorView& bias,
                            const TensorView& out) {
  biased(host, Activation::relu2, x, bias, out);
}

inline void bias_relu2_backward_host(Host& host, const TensorView& grad, const TensorView& x,
                                     const TensorView& bias, bool, const TensorView& x_grad,
                                     const TensorView& bias_grad) {
  biased_backward(host, Activation::relu2, grad, x, bias, x_grad, bias_grad);
}
inline void swiglu_host(Host& host, const TensorView& gate, const TensorView& up, bool interleaved,
                        const TensorView& out) {
  gated(host, Activation::silu, gate, up, interleaved, out);
}
inline void geglu_host(Host& host, const TensorView& gate, const TensorView& up, bool tanh,
                       bool interleaved, const TensorView& out) {
  gated(host, gelu_of(tanh), gate, up, interleaved, out);
}
inline void swiglu_backward_host(Host& host, const TensorView& grad, const TensorView& gate,
                                 const TensorView& up, bool interleaved,
                                 const TensorView& gate_grad, const TensorView& up_grad) {
  gated_backward(host, Activation::silu, grad, gate, up, interleaved, gate_grad, up_grad);
}
inline void geglu_backward_host(Host& host, const TensorView& grad, const TensorView& gate,
                                const TensorView& up, bool tanh, bool interleaved,
                                const TensorView& gate_grad, const TensorView& up_grad) {
  gated_backward(host, gelu_of(tanh), grad, gate, up, interleaved, gate_grad, up_grad);
}
inline void gated_backward__host(Host& host, const TensorView& grad, const TensorView& gate,
                                 const TensorView& up, int64_t activation, bool,
                                 const TensorView& up_grad, const TensorView& out) {
  FLEXOPS_CHECK(0 <= activation && activation <= 2, host.op,
                ": activation must be 0 (silu), 1 (gelu) or 2 (gelu by tanh), got ", activation);
  FLEXOPS_CHECK(grad.is_contiguous(), host.op, ": grad must be contiguous, since it is written");
  gated_backward(host, activation == 0 ? Activation::silu : gelu_of(activation == 2), grad, gate,
                 up, false, grad, up_grad, out);
}

}  // namespace flexops
