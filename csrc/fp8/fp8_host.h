// From the arguments of quantization to scaled bytes to its launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"
#include "fp8/fp8.h"

namespace flexops {

constexpr int64_t kPerRow = -1, kPerTensor = 0;  // in place of a group size
constexpr int64_t kLongestSegment =
    (1ll << 31) - 64;  // what the kernels count in 32 bits, unless there is only one
constexpr int64_t kScaledGrain = 16384;  // elements that are worth a thread

inline void check_fp8(const char* op, Dtype dtype) {
  FLEXOPS_CHECK(dtype == Dtype::e4m3 || dtype == Dtype::e5m2, op,
                ": dtype must be float8_e4m3fn or float8_e5m2, got ", dtype_name(dtype));
}

/// Contiguous rows of x's shape in segments of `group_size`.
inline ScaledLayout scaled_layout(const char* op, const TensorView& x, int64_t group_size) {
  FLEXOPS_CHECK(x.dim >= 1, op, ": x must have at least one dimension, got a scalar");
  FLEXOPS_CHECK(group_size >= -1, op,
                ": group_size must be at least 1 (or 0 for the tensor, -1 for rows), got ",
                group_size);
  ScaledLayout l{};
  l.length = group_size == kPerTensor ? x.numel : x.columns();
  l.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim && group_size != kPerTensor; ++d) l.rows *= x.sizes[d];
  l.row_stride = l.length;
  l.segment = group_size >= 1 ? group_size : l.length > 0 ? l.length : 1;
  l.segments = group_size >= 1 ? l.length / group_size + (l.length % group_size != 0) : 1;
  const int64_t longest = least(l.segment, l.length);
  FLEXOPS_CHECK(l.rows * l.segments <= 1 || longest <= kLongestSegment, op,
                ": a row or group must have at most ", kLongestSegment, " elements, got ", longest);
  return l;
}

/// Calls `kernel` on segments; `of_one` on elements, where there is one segment for all threads.
template <class Kernel, class OfOne>
inline void for_segments(const ScaledLayout& l, const Kernel& kernel, const OfOne& of_one) {
  if (l.rows * l.segments == 1) return parallel_for(0, l.length, kScaledGrain, of_one);
  const int64_t segment = least(l.segment, l.length) > 1 ? least(l.segment, l.length) : 1;
  parallel_for(0, l.rows * l.segments, segment < kScaledGrain ? kScaledGrain / segment : 1, kernel);
}

/// By its scale.
inline void cast_scaled(const void* x, float scale, bool broken, uint8_t* codes,
                        const ScaledLayout& l) {
  parallel_for(0, l.length, kScaledGrain, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cast_scaled_cpu)(x, scale, broken, codes, l, begin, end);
  });
}

inline void quantize_scaled(Host& host, const TensorView& x, ScaledLayout l, Dtype code,
                            const TensorView& values, const TensorView& scales) {
  if (scales.numel == 0) return;
  l.type = element_type(x), l.code = code;
  const void* from = x.data;
  if (x.numel > 0 && !x.is_contiguous()) {
    if (l.length != x.numel && x.has_even_rows()) {
      l.row_stride = x.row_stride();
    } else {
      from = host.copied().data;
    }
  }
  auto* codes = values.as<uint8_t>();
  auto* to = scales.as<float>();
  const bool alone = l.rows * l.segments == 1;
  if (FLEXOPS_DEVICE_CUDA) {
    auto* workspace = alone ? host.workspace<uint32_t>(1) : nullptr;
    return host.check(quantize_scaled_cuda(from, codes, to, workspace, l, host.stream()));
  }
  uint32_t largest = 0;  // of a single segment
  for_segments(
      l,
      [&](int64_t begin, int64_t end) {
        FLEXOPS_ISA_CALL(quantize_scaled_cpu)(from, codes, to, l, begin, end);
      },
      [&](int64_t begin, int64_t end) {
        const uint32_t bits = FLEXOPS_ISA_CALL(largest_bits_cpu)(from, l.type, begin, end);
        uint32_t known = __atomic_load_n(&largest, __ATOMIC_RELAXED);
        while (known < bits && !__atomic_compare_exchange_n(&largest, &known, bits, true,
                                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
      });
  if (!alone) return;
  *to = FLEXOPS_ISA_CALL(scale_cpu)(largest, l.code);
  cast_scaled(from, *to, *to != *to, codes, l);
}

inline void quantize_fp8_host(Host& host, const TensorView& x, Dtype dtype, int64_t group_size,
                              const TensorView& values, Tensor& scales) {
  const ScaledLayout l = scaled_layout(host.op, x, group_size);
  check_fp8(host.op, dtype);
  int64_t sizes[kMostDims];
  for (int64_t d = 0; d < x.dim; ++d) sizes[d] = d + 1 < x.dim ? x.sizes[d] : l.segments;
  scales = host.empty(sizes, group_size == kPerTensor ? 0 : x.dim, Dtype::f32);
  quantize_scaled(host, x, l, dtype, values, view_of(scales));
}
inline void quantize_int8_host(Host& host, const TensorView& x, const TensorView& values,
                               const TensorView& scales) {
  quantize_scaled(host, x, scaled_layout(host.op, x, kPerRow), Dtype::i8, values, scales);
}

inline void quantize_fp8_scaled_host(Host& host, const TensorView& x, const float* scale,
                                     Dtype dtype, const TensorView& values) {
  ScaledLayout l = scaled_layout(host.op, x, kPerTensor);
  check_fp8(host.op, dtype);
  l.type = element_type(x), l.code = dtype;
  if (x.numel == 0) return;
  auto* codes = values.as<uint8_t>();
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(cast_scaled_cuda(x.data, scale, codes, l, host.stream()));
  cast_scaled(x.data, *scale, false, codes, l);
}

inline void dequantize_fp8_host(Host& host, const TensorView& values, const TensorView& scales,
                                int64_t group_size, Dtype dtype, const TensorView& out) {
  ScaledLayout l = scaled_layout(host.op, values, group_size);
  l.type = element_type(host.op, "dtype", dtype), l.code = values.dtype;
  bool fits = group_size == kPerTensor ? scales.numel == 1 : scales.dim == values.dim;
  for (int64_t d = 0; fits && group_size != kPerTensor && d < values.dim; ++d)
    fits = scales.sizes[d] == (d + 1 < values.dim ? values.sizes[d] : l.segments);
  FLEXOPS_CHECK(fits, host.op, ": scales must fit values, got shape ", shape_text(scales), " for ",
                shape_text(values));
  if (out.numel == 0) return;
  const auto* codes = values.as<uint8_t>();
  const auto* from = scales.as<float>();
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(dequantize_scaled_cuda(codes, from, out.data, l, host.stream()));
  for_segments(
      l,
      [&](int64_t begin, int64_t end) {
        FLEXOPS_ISA_CALL(dequantize_scaled_cpu)(codes, from, out.data, l, begin, end);
      },
      [&](int64_t begin, int64_t end) {
        FLEXOPS_ISA_CALL(uncast_scaled_cpu)(codes, *from, out.data, l, begin, end);
      });
}
inline void dequantize_int8_host(Host& host, const TensorView& values, const TensorView& scales,
                                 Dtype dtype, const TensorView& out) {
  dequantize_fp8_host(host, values, scales, kPerRow, dtype, out);
}

}  // namespace flexops
