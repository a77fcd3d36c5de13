// torch's view of quantization: checks, shapes and registration.

#include "common/binding.h"
#include "quant/quant.h"

namespace flexops {
namespace {

using Sizes = std::vector<int64_t>;

int64_t check_numbers(const char* op, const Tensor& tensor, int64_t bits, int64_t group_size,
                      int64_t dim) {
  const int64_t dims = tensor.dim();
  FLEXOPS_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, got ", bits);
  FLEXOPS_CHECK(group_size >= 1, op, ": group_size must be at least 1, got ", group_size);
  FLEXOPS_CHECK(-dims <= dim && dim < dims, op, ": dim must be in [", -dims, ", ", dims - 1,
                "], got ", dim);
  return dim < 0 ? dim + dims : dim;
}

int64_t product(const int64_t* sizes, int64_t begin, int64_t end) {
  int64_t out = 1;
  for (int64_t d = begin; d < end; ++d) out *= sizes[d];
  return out;
}

/// The one stride that walks dimensions [begin, end) in order; -1 if there is none, 0 if they hold
/// one element.
int64_t common_stride(const Tensor& x, int64_t begin, int64_t end) {
  int64_t stride = 0, expected = -1;
  for (int64_t d = end - 1; d >= begin; --d) {
    const int64_t size = x.sizes()[d], step = x.strides()[d];
    if (size == 1) continue;
    if (stride == 0) stride = step;
    if (expected != -1 && step != expected) return -1;
    expected = step * size;
  }
  return stride;
}

/// `sizes` is the shape of the tensor that is, or was, quantized; its strides are those of a
/// contiguous one.
QuantLayout make_layout(const Sizes& sizes, int64_t dim, int64_t bits, int64_t group_size,
                        bool symmetric, ElementType type, ElementType scale_type) {
  QuantLayout l;
  l.outer = product(sizes.data(), 0, dim);
  l.length = sizes[dim];
  l.inner = product(sizes.data(), dim + 1, static_cast<int64_t>(sizes.size()));
  l.inner_stride = 1, l.length_stride = l.inner, l.outer_stride = l.length * l.inner;
  l.group_size = group_size;
  l.groups = l.length / group_size + (l.length % group_size != 0);
  l.group_bytes = bits == 8 ? group_size : group_size / 2 + group_size % 2;
  l.bits = static_cast<int>(bits);
  l.symmetric = symmetric, l.type = type, l.scale_type = scale_type;
  return l;
}

/// Takes x as it lies in memory if the kernels can; else makes a contiguous copy.
void adopt_strides(QuantLayout& l, Tensor& x, int64_t dim) {
  if (x.is_contiguous() || x.numel() == 0) return;
  const int64_t outer = common_stride(x, 0, dim), inner = common_stride(x, dim + 1, x.dim()),
                length = l.length > 1 ? x.strides()[dim] : 1;
  if (outer >= 0 && length >= 0 && (l.inner == 1 ? length == 1 : inner == 1)) {
    l.outer_stride = outer, l.length_stride = length, l.inner_stride = 1;
  } else {
    x = contiguous(x);
  }
}

#if FLEXOPS_DEVICE_CPU
/// The least tiles that are worth a thread.
int64_t grain(const QuantLayout& l, int64_t columns) {
  constexpr int64_t kElements = 16384;
  const int64_t tile = l.group_size * (l.inner < columns ? l.inner : columns);
  return tile < kElements ? kElements / tile : 1;
}
#endif

std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t bits, int64_t group_size, int64_t dim,
                                    bool symmetric) {
  const char* op = "flexops::quantize";
  const ElementType type = element_type("", "flexops::quantize: x", x.dtype());
  dim = check_numbers(op, x, bits, group_size, dim);
  const Sizes sizes(x.sizes(), x.sizes() + x.dim());
  QuantLayout l = make_layout(sizes, dim, bits, group_size, symmetric, type, type);
  Sizes packed_sizes = sizes, scale_sizes = sizes;
  packed_sizes[dim] = l.groups * l.group_bytes;
  scale_sizes[dim] = l.groups;
  scale_sizes.insert(scale_sizes.begin() + dim + 1, symmetric ? 1 : 2);
  Tensor packed =
      empty(packed_sizes.data(), static_cast<int64_t>(packed_sizes.size()), Dtype::u8, x);
  Tensor scales = empty(scale_sizes.data(), static_cast<int64_t>(scale_sizes.size()), x.dtype(), x);
  if (x.numel() == 0) return {std::move(packed), std::move(scales)};
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  adopt_strides(l, x, dim);
#if FLEXOPS_DEVICE_CUDA
  check_launch(
      op, quantize_cuda(x.data(), packed.data<uint8_t>(), scales.data(), l, current_stream(x)));
#else
  const auto* from = x.data();
  auto* to = packed.data<uint8_t>();
  auto* parameters = scales.data();
  parallel_for(0, l.outer * l.groups * quant_tiles(l, kQuantizeColumns), grain(l, kQuantizeColumns),
               [&](int64_t begin, int64_t end) {
                 FLEXOPS_ISA_CALL(quantize_cpu)(from, to, parameters, l, begin, end);
               });
#endif
  return {std::move(packed), std::move(scales)};
}

Tensor dequantize(Tensor packed, Tensor scales, int64_t length, int64_t bits, int64_t group_size,
                  int64_t dim, int64_t dtype_code) {
  const char* op = "flexops::dequantize";
  const Dtype dtype = dtype_of_code(dtype_code);
  FLEXOPS_CHECK(packed.dtype() == Dtype::u8, op, ": packed must be uint8, got ",
                dtype_name(packed.dtype()));
  const ElementType scale_type = element_type("", "flexops::dequantize: scales", scales.dtype());
  const ElementType type = element_type("", "flexops::dequantize: dtype", dtype);
  dim = check_numbers(op, packed, bits, group_size, dim);
  FLEXOPS_CHECK(length >= 0, op, ": length must not be negative, got ", length);
  check_device(op, "scales", scales, "packed", packed);
  FLEXOPS_CHECK(scales.dim() == packed.dim() + 1, op,
                ": scales must have one dimension more than packed, got shape ",
                shape_text(scales));
  const int64_t pair = scales.size(dim + 1);
  FLEXOPS_CHECK(pair == 1 || pair == 2, op,
                ": scales must have 2 (1 if symmetric) entries along dim ", dim + 1, ", got shape ",
                shape_text(scales));
  Sizes sizes(packed.sizes(), packed.sizes() + packed.dim());
  sizes[dim] = length;
  QuantLayout l = make_layout(sizes, dim, bits, group_size, pair == 1, type, scale_type);
  FLEXOPS_CHECK(packed.size(dim) == l.groups * l.group_bytes, op, ": packed must have ",
                l.groups * l.group_bytes, " bytes along dim ", dim, ", got shape ",
                shape_text(packed));
  for (int64_t d = 0; d < packed.dim(); ++d) {
    const int64_t expected = d == dim ? l.groups : sizes[d];
    FLEXOPS_CHECK(scales.size(d <= dim ? d : d + 1) == expected, op,
                  ": scales must fit packed, got shape ", shape_text(scales));
  }
  Tensor out = empty(sizes.data(), static_cast<int64_t>(sizes.size()), dtype, packed);
  if (out.numel() == 0) return out;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(packed);
#endif
  packed = contiguous(packed);
  scales = contiguous(scales);
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, dequantize_cuda(packed.data<uint8_t>(), scales.data(), out.data(), l,
                                   current_stream(packed)));
#else
  const auto* from = packed.data<uint8_t>();
  const auto* parameters = scales.data();
  auto* to = out.data();
  parallel_for(0, l.outer * l.groups * quant_tiles(l, kDequantizeColumns),
               grain(l, kDequantizeColumns), [&](int64_t begin, int64_t end) {
                 FLEXOPS_ISA_CALL(dequantize_cpu)(from, parameters, to, l, begin, end);
               });
#endif
  return out;
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "quantize", quantize);
  FLEXOPS_IMPL(m, "dequantize", dequantize);
}

}  // namespace flexops
