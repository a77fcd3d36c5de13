// From the arguments of products with 4-bit weights to the launchers'.
#pragma once

#include "common/host.h"

#include "int4_linear/int4_linear.h"

namespace flexops {

inline Int4View make_int4(Host& host, const TensorView& packed, const TensorView& scales,
                          const TensorView& zeros, int64_t n, int64_t k, int64_t group_size,
                          bool mxfp4) {
  FLEXOPS_CHECK(group_size == 32 || group_size == 64 || group_size == 128, host.op,
                ": group_size must be 32, 64 or 128, got ", group_size);
  FLEXOPS_CHECK(n >= 0 && k >= 0 && k % group_size == 0, host.op,
                ": group_size must divide K, got ", k);
  FLEXOPS_CHECK(n < int64_t{1} << 30 && k < int64_t{1} << 30, host.op,
                ": N and K must be less than 2^30");
  FLEXOPS_CHECK(!mxfp4 || (group_size == 32 && !zeros), host.op,
                ": MXFP4 has groups of 32 columns and no zero points");
  Int4View w;
  w.packed = packed.as<uint8_t>(), w.scales = scales.data, w.zeros = zeros.data, w.mxfp4 = mxfp4;
  w.scale_type = element_type(scales);
  w.zero_type = w.scale_type == ElementType::f32 ? ElementType::f32 : ElementType::f16;
  w.n = n, w.k = k, w.group_size = group_size;
  w.tiles_n = ceil_div(n, kInt4TileN), w.tiles_k = ceil_div(k, kInt4TileK);
  w.groups = ceil_div(w.tiles_k * kInt4TileK, group_size);
  const auto has_shape = [](const TensorView& tensor, int64_t a, int64_t b, int64_t c) {
    return tensor.dim == 3 && tensor.size(0) == a && tensor.size(1) == b && tensor.size(2) == c;
  };
  FLEXOPS_CHECK(has_shape(packed, w.tiles_n, w.tiles_k, kInt4TileBytes), host.op,
                ": packed does not fit N and K, got shape ", shape_text(packed));
  FLEXOPS_CHECK(has_shape(scales, w.tiles_n, w.groups, kInt4TileN), host.op,
                ": scales do not fit N, K and group_size, got shape ", shape_text(scales));
  FLEXOPS_CHECK(!zeros || has_shape(zeros, w.tiles_n, w.groups, kInt4TileN), host.op,
                ": zeros do not fit N, K and group_size, got shape ", shape_text(zeros));
  FLEXOPS_CHECK(!zeros || element_type(zeros) == w.zero_type, host.op,
                ": zeros must be float32 if scales are, else float16");
  return w;
}

inline void check_mxfp4_place(Host& host, bool mxfp4) {
  FLEXOPS_CHECK(!mxfp4 || !FLEXOPS_DEVICE_CUDA, host.op, ": MXFP4 must be on a CPU");
}

inline void int4_product_host(Host& host, const TensorView& x, const TensorView& packed,
                              const TensorView& scales, const TensorView& zeros,
                              const TensorView& bias, int64_t n, int64_t k, int64_t group_size,
                              int64_t plan, bool mxfp4, const TensorView& out) {
  check_mxfp4_place(host, mxfp4);
  Int4Product c;
  c.weight = make_int4(host, packed, scales, zeros, n, k, group_size, mxfp4);
  FLEXOPS_CHECK(x.dim >= 1 && x.columns() == k, host.op, ": x must have ", k,
                " columns, got shape ", shape_text(x));
  FLEXOPS_CHECK(!bias || (bias.dim == 1 && bias.size(0) == n), host.op,
                ": bias must have N elements, got shape ", shape_text(bias));
  if (out.numel == 0) return;
  c.x = x.data, c.bias = bias.data, c.out = out.data;
  c.type = element_type(x), c.m = out.numel / n;
  if (FLEXOPS_DEVICE_CUDA) {
    FLEXOPS_CHECK(c.type != ElementType::f32 && c.weight.scale_type != ElementType::f32, host.op,
                  ": x and scales must be float16 or bfloat16 on a GPU");
    return host.check(int4_product_cuda(c, plan, host.stream()));
  }
  const int64_t columns = c.weight.tiles_k * kInt4TileK;
  float* const ordered = host.workspace<float>(c.m * (columns + c.weight.groups));
  parallel_for(0, c.m, least(64, 16384 / (columns + 1) + 1), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(int4_order_cpu)(c, ordered, begin, end);
  });
  parallel_for(0, c.weight.tiles_n, 32768 / (columns * c.m + 1) + 1,
               [&](int64_t begin, int64_t end) {
                 FLEXOPS_ISA_CALL(int4_product_cpu)(c, ordered, begin, end);
               });
}

inline void int4_unpack_host(Host& host, const TensorView& packed, const TensorView& scales,
                             const TensorView& zeros, int64_t n, int64_t k, int64_t group_size,
                             Dtype, bool mxfp4, const TensorView& out) {
  check_mxfp4_place(host, mxfp4);
  const Int4View w = make_int4(host, packed, scales, zeros, n, k, group_size, mxfp4);
  FLEXOPS_CHECK(out.dtype == Dtype::f32 || out.dtype == Dtype::f16 || out.dtype == Dtype::bf16,
                host.op, ": dtype must be float32, float16 or bfloat16, got ",
                dtype_name(out.dtype));
  if (out.numel == 0) return;
  const ElementType type = element_type(out);
  if (FLEXOPS_DEVICE_CUDA) return host.check(int4_unpack_cuda(w, out.data, type, host.stream()));
  parallel_for(0, w.tiles_n, 16384 / (w.tiles_k * kInt4TileK * kInt4TileN) + 1,
               [&](int64_t begin, int64_t end) {
                 FLEXOPS_ISA_CALL(int4_unpack_cpu)(w, out.data, type, begin, end);
               });
}

}  // namespace flexops
