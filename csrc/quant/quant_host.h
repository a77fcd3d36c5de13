// From quantization's arguments to its launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"
#include "quant/quant.h"

namespace flexops {

inline int64_t product(const int64_t* sizes, int64_t begin, int64_t end) {
  int64_t out = 1;
  for (int64_t d = begin; d < end; ++d) out *= sizes[d];
  return out;
}

/// The one stride that walks dimensions [begin, end) in order; -1 if there is none, 0 if they hold
/// one element.
inline int64_t common_stride(const TensorView& x, int64_t begin, int64_t end) {
  int64_t stride = 0, expected = -1;
  for (int64_t d = end - 1; d >= begin; --d) {
    if (x.sizes[d] == 1) continue;
    if (stride == 0) stride = x.strides[d];
    if (expected != -1 && x.strides[d] != expected) return -1;
    expected = x.strides[d] * x.sizes[d];
  }
  return stride;
}

/// A contiguous tensor of x's shape, with `length` (-1: x's) along `dim`, which is then counted
/// from the first one.
inline QuantLayout quant_layout(const char* op, const TensorView& x, int64_t length, int64_t bits,
                                int64_t group_size, int64_t& dim) {
  FLEXOPS_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, got ", bits);
  FLEXOPS_CHECK(group_size >= 1, op, ": group_size must be at least 1, got ", group_size);
  FLEXOPS_CHECK(-x.dim <= dim && dim < x.dim, op, ": dim must be in [", -x.dim, ", ", x.dim - 1,
                "], got ", dim);
  dim += dim < 0 ? x.dim : 0;
  QuantLayout l{};
  l.outer = product(x.sizes, 0, dim), l.inner = product(x.sizes, dim + 1, x.dim);
  l.length = length < 0 ? x.sizes[dim] : length;
  l.inner_stride = 1, l.length_stride = l.inner, l.outer_stride = l.length * l.inner;
  l.group_size = group_size;
  l.groups = l.length / group_size + (l.length % group_size != 0);
  l.group_bytes = bits == 8 ? group_size : group_size / 2 + group_size % 2;
  l.bits = static_cast<int>(bits);
  return l;
}

/// x's shape with another size along `dim`.
struct QuantSizes {
  int64_t sizes[kMostDims + 1];
  QuantSizes(const TensorView& x, int64_t dim, int64_t size) {
    for (int64_t d = 0; d < x.dim; ++d) sizes[d] = d == dim ? size : x.sizes[d];
  }
};

/// Where x's elements are, as they lie in memory if the kernels can take them so; else a copy's.
inline const void* quant_source(Host& host, QuantLayout& l, const TensorView& x, int64_t dim) {
  if (x.is_contiguous()) return x.data;
  const int64_t outer = common_stride(x, 0, dim), inner = common_stride(x, dim + 1, x.dim),
                length = l.length > 1 ? x.strides[dim] : 1;
  if (outer < 0 || length < 0 || (l.inner == 1 ? length : inner) != 1) return host.copied().data;
  l.outer_stride = outer, l.length_stride = length, l.inner_stride = 1;
  return x.data;
}

/// Calls `kernel` on tiles, of which a thread takes at least so many as are worth it.
template <class Kernel>
inline void for_quant_tiles(const QuantLayout& l, int64_t columns, const Kernel& kernel) {
  constexpr int64_t kElements = 16384;
  const int64_t tile = l.group_size * least(l.inner, columns);
  parallel_for(0, l.outer * l.groups * quant_tiles(l, columns),
               tile < kElements ? kElements / tile : 1, kernel);
}

inline void quantize_host(Host& host, const TensorView& x, int64_t bits, int64_t group_size,
                          int64_t dim, bool symmetric, Tensor& packed, Tensor& scales) {
  QuantLayout l = quant_layout(host.op, x, -1, bits, group_size, dim);
  l.symmetric = symmetric, l.type = l.scale_type = element_type(x);
  packed = host.empty(QuantSizes(x, dim, l.groups * l.group_bytes).sizes, x.dim, Dtype::u8);
  QuantSizes of_scales(x, dim, l.groups);
  for (int64_t d = x.dim; d > dim + 1; --d) of_scales.sizes[d] = x.sizes[d - 1];
  of_scales.sizes[dim + 1] = symmetric ? 1 : 2;
  scales = host.empty(of_scales.sizes, x.dim + 1, x.dtype);
  if (x.numel == 0) return;
  const void* from = quant_source(host, l, x, dim);
  auto* codes = packed.data<uint8_t>();
  void* parameters = scales.data();
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(quantize_cuda(from, codes, parameters, l, host.stream()));
  for_quant_tiles(l, kQuantizeColumns, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(quantize_cpu)(from, codes, parameters, l, begin, end);
  });
}

inline void dequantize_host(Host& host, const TensorView& packed, const TensorView& scales,
                            int64_t length, int64_t bits, int64_t group_size, int64_t dim,
                            Dtype dtype, Tensor& out) {
  FLEXOPS_CHECK(length >= 0, host.op, ": length must not be negative, got ", length);
  QuantLayout l = quant_layout(host.op, packed, length, bits, group_size, dim);
  l.type = element_type(host.op, "dtype", dtype), l.scale_type = element_type(scales);
  FLEXOPS_CHECK(packed.sizes[dim] == l.groups * l.group_bytes, host.op, ": packed must have ",
                l.groups * l.group_bytes, " bytes along dim ", dim, ", got shape ",
                shape_text(packed));
  bool fits =
      scales.dim == packed.dim + 1 && (scales.size(dim + 1) == 1 || scales.size(dim + 1) == 2);
  for (int64_t d = 0; fits && d < packed.dim; ++d)
    fits = scales.sizes[d <= dim ? d : d + 1] == (d == dim ? l.groups : packed.sizes[d]);
  FLEXOPS_CHECK(fits, host.op,
                ": scales must fit packed, with 2 (1 if symmetric) entries along dim ", dim + 1,
                ", got shape ", shape_text(scales));
  l.symmetric = scales.size(dim + 1) == 1;
  out = host.empty(QuantSizes(packed, dim, length).sizes, packed.dim, dtype);
  if (out.numel() == 0) return;
  void* to = out.data();
  const auto* codes = packed.as<uint8_t>();
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(dequantize_cuda(codes, scales.data, to, l, host.stream()));
  for_quant_tiles(l, kDequantizeColumns, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(dequantize_cpu)(codes, scales.data, to, l, begin, end);
  });
}

}  // namespace flexops
