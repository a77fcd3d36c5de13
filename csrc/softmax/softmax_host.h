// From softmax's arguments to the launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"

#include "softmax/softmax.h"

namespace flexops {

inline SoftmaxRows softmax_rows(Host& host, const char* name, const TensorView& x, double scale,
                                bool causal) {
  constexpr int64_t kLongest = int64_t{1} << 30;
  FLEXOPS_CHECK(x.dim >= 1, host.op, ": ", name, " must have at least one dimension, got a scalar");
  FLEXOPS_CHECK(x.columns() <= kLongest, host.op, ": ", name,
                " must have a last dimension of at most ", kLongest, ", got shape ", shape_text(x));
  FLEXOPS_CHECK(!causal || x.dim >= 2, host.op, ": ", name,
                " must have at least two dimensions, queries and keys, got shape ", shape_text(x));
  SoftmaxRows rows = {};
  rows.mask = Dtype::none;
  rows.type = element_type(x);
  rows.length = x.columns(), rows.rows = x.rows(), rows.stride = x.row_stride();
  rows.queries = x.dim >= 2 ? x.size(-2) : 1;
  rows.scale = static_cast<float>(scale), rows.causal = causal;
  return rows;
}

/// How rows find theirs in a mask of x's shape.
inline void place_mask(Host& host, SoftmaxRows& rows, const TensorView& mask) {
  rows.mask = mask.dtype;
  rows.mask_step = static_cast<int>(mask.stride(-1));
  int count = 0;
  for (int64_t d = mask.dim - 2; d >= 0;
       --d) {  // neighbours that one stride walks through become one
    const int64_t size = mask.sizes[d], step = mask.strides[d];
    if (size == 1) continue;
    if (count > 0 && step == rows.mask_strides[count - 1] * rows.mask_sizes[count - 1]) {
      rows.mask_sizes[count - 1] *= size;
      continue;
    }
    FLEXOPS_CHECK(count < kSoftmaxDims, host.op,
                  ": mask's dimensions are broadcast in too many turns, got x of shape ",
                  shape_text(mask));
    rows.mask_sizes[count] = size, rows.mask_strides[count] = step;
    ++count;
  }
  if (count == 0) rows.mask_sizes[0] = 1, rows.mask_strides[0] = 0, count = 1;
  rows.mask_dims = count;
}

/// The least rows that are worth a thread.
inline int64_t softmax_grain(const SoftmaxRows& rows) {
  return 8192 / (rows.length < 8192 ? rows.length : 8192);
}

inline void softmax_forward(Host& host, const TensorView& x, const TensorView& mask, double scale,
                            bool causal, const TensorView& out) {
  SoftmaxRows rows = softmax_rows(host, "x", x, scale, causal);
  if (x.numel == 0) return;
  if (mask) place_mask(host, rows, mask);
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(softmax_cuda(x.data, mask.data, out.data, rows, host.stream()));
  parallel_for(0, rows.rows, softmax_grain(rows), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(softmax_cpu)(x.data, mask.data, out.data, rows, begin, end);
  });
}

inline void scaled_masked_softmax_host(Host& host, const TensorView& x, const TensorView& mask,
                                       double scale, const TensorView& out) {
  softmax_forward(host, x, mask, scale, false, out);
}

inline void causal_softmax_host(Host& host, const TensorView& x, double scale,
                                const TensorView& out) {
  softmax_forward(host, x, {}, scale, true, out);
}

inline void softmax_backward_host(Host& host, const TensorView& grad, const TensorView& y,
                                  double scale, bool causal, const TensorView& out) {
  const SoftmaxRows rows = softmax_rows(host, "y", y, scale, causal);
  if (y.numel == 0) return;
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(
        softmax_backward_cuda(grad.data, grad.row_stride(), y.data, out.data, rows, host.stream()));
  const int64_t grad_stride = grad.row_stride();
  parallel_for(0, rows.rows, softmax_grain(rows), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(softmax_backward_cpu)(grad.data, grad_stride, y.data, out.data, rows, begin,
                                           end);
  });
}

}  // namespace flexops
