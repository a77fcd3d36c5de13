// The launchers of the activations: raw pointers and numbers, no torch. Formulas:
// flexops/ops/activation.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

enum class Activation : uint8_t { silu, gelu_tanh, gelu_erf, gelu_quick, relu2 };

/// act(x + bias), or its gradient. x and grad are [rows, columns] with rows `x_stride` and
/// `grad_stride` apart; `out` is contiguous.
struct BiasedActivation {
  Activation activation;
  ElementType type, bias_type;
  int64_t rows, columns;
  int64_t x_stride, grad_stride;
  const void* x;
  const void* bias;  // [columns], at a multiple of 16 bytes, or null
  const void* grad;  // backward: the gradient of act's result
  void* out;         // act's result, or the gradient of x
  // backward: the gradient of bias, of bias_type, or null; and room for `slices` rows of sums of
  // the gradient of x, if slices > 1
  void* bias_grad;
  float* sums;
  int64_t slices;
  int64_t slice_rows;  // the CPU's: rows of a slice
};

/// act(gate) * up, or its gradients: [rows, columns], with rows as far apart as the strides say. If
/// `pairs`, gate and up (and gate_grad and up_grad) alternate in memory, from `gate` (`gate_grad`)
/// on, and strides count elements of that memory. `out` is contiguous.
struct GatedActivation {
  Activation activation;
  ElementType type;
  bool pairs;
  int64_t rows, columns;
  int64_t gate_stride, up_stride, grad_stride;
  int64_t out_stride;  // backward: of gate_grad and up_grad
  const void *gate, *up;
  const void* grad;  // backward: the gradient of the result
  void* out;         // the result; of the backward pass only if it is not null
  void *gate_grad, *up_grad;
};

/// Queued on `stream`; the pointers are the device's. The backward pass if `grad` is not null. They
/// return nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* biased_activation_cuda(const BiasedActivation& call, void* stream))
FLEXOPS_CUDA_DECLARE(const char* gated_activation_cuda(const GatedActivation& call, void* stream))

/// The rows of `sums` that the backward pass needs. A call to get `slices` from before there is
/// memory.
FLEXOPS_CUDA_DECLARE(int64_t bias_slices_cuda(const BiasedActivation& call))

/// The CPU's work is cut into tiles of so many columns, of a row or of a slice of rows; they are
/// numbered row by row.
constexpr int64_t kActivationColumns = 1024;
inline int64_t activation_tiles(int64_t columns) {
  return (columns + kActivationColumns - 1) / kActivationColumns;
}

/// Items are rows * activation_tiles(columns).
FLEXOPS_ISA_DECLARE(void biased_activation_cpu(const BiasedActivation& call, int64_t begin,
                                               int64_t end))
FLEXOPS_ISA_DECLARE(void gated_activation_cpu(const GatedActivation& call, int64_t begin,
                                              int64_t end))
FLEXOPS_ISA_DECLARE(void gated_activation_backward_cpu(const GatedActivation& call, int64_t begin,
                                                       int64_t end))
/// Items are slices * activation_tiles(columns).
FLEXOPS_ISA_DECLARE(void biased_activation_backward_cpu(const BiasedActivation& call, int64_t begin,
                                                        int64_t end))
/// Items are activation_tiles(columns): adds up `sums`.
FLEXOPS_ISA_DECLARE(void bias_gradient_cpu(const BiasedActivation& call, int64_t begin,
                                           int64_t end))

}  // namespace flexops
