// torch's view of quantization to scaled bytes: checks, shapes and registration.

#include "common/binding.h"
#include "fp8/fp8.h"

#if FLEXOPS_DEVICE_CPU
#include <atomic>
#endif

namespace flexops {
namespace {

constexpr int64_t kPerRow = -1, kPerTensor = 0;  // in place of a group size
constexpr int64_t kLongestSegment =
    (1ll << 31) - 64;  // what the kernels count in 32 bits, unless there is only one

void check_fp8(Dtype dtype, const char* op, const char* argument) {
  FLEXOPS_CHECK(dtype == Dtype::e4m3 || dtype == Dtype::e5m2, op, ": ", argument,
                " must be float8_e4m3fn or float8_e5m2, got ", dtype_name(dtype));
}

using Sizes = std::vector<int64_t>;

Sizes sizes_of(const Tensor& tensor) {
  return Sizes(tensor.sizes(), tensor.sizes() + tensor.dim());
}

/// Contiguous rows of `x`'s shape in segments of `group_size`.
ScaledLayout make_layout(const char* op, const Tensor& x, int64_t group_size) {
  FLEXOPS_CHECK(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  FLEXOPS_CHECK(group_size >= -1, op,
                ": group_size must be at least 1 (or 0 for the tensor, -1 for rows), got ",
                group_size);
  ScaledLayout l;
  l.length = group_size == kPerTensor ? x.numel() : x.size(x.dim() - 1);
  l.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim() && group_size != kPerTensor; ++d) l.rows *= x.size(d);
  l.row_stride = l.length;
  l.segment = group_size >= 1 ? group_size : l.length > 0 ? l.length : 1;
  l.segments = group_size >= 1 ? l.length / group_size + (l.length % group_size != 0) : 1;
  const int64_t longest = l.segment < l.length ? l.segment : l.length;
  FLEXOPS_CHECK(l.rows * l.segments <= 1 || longest <= kLongestSegment, op,
                ": a row or group must have at most ", kLongestSegment, " elements, got ", longest);
  return l;
}

/// Takes x as it lies in memory if it has rows; else makes a contiguous copy.
void adopt_strides(ScaledLayout& l, Tensor& x, int64_t group_size) {
  if (x.numel() == 0 || x.is_contiguous()) return;
  if (group_size != kPerTensor) {
    l.row_stride = take_rows(x);
  } else {
    x = contiguous(x);
  }
}

#if FLEXOPS_DEVICE_CPU
constexpr int64_t kGrain = 16384;  // elements that are worth a thread

int64_t grain(const ScaledLayout& l) {
  const int64_t segment = l.segment < l.length ? l.segment : l.length;
  return segment < kGrain ? kGrain / (segment > 0 ? segment : 1) : 1;
}

/// Many threads on one segment.
void quantize_one(const void* x, uint8_t* codes, float* scale, const ScaledLayout& l) {
  std::atomic<uint32_t> largest{0};
  parallel_for(0, l.length, kGrain, [&](int64_t begin, int64_t end) {
    const uint32_t bits = FLEXOPS_ISA_CALL(largest_bits_cpu)(x, l.type, begin, end);
    for (uint32_t known = largest.load();
         known < bits && !largest.compare_exchange_weak(known, bits);) {}
  });
  *scale = FLEXOPS_ISA_CALL(scale_cpu)(largest.load(), l.code);
  const bool broken = *scale != *scale;
  parallel_for(0, l.length, kGrain, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cast_scaled_cpu)(x, *scale, broken, codes, l, begin, end);
  });
}
#endif

std::tuple<Tensor, Tensor> quantize(const char* op, Tensor x, Dtype code, int64_t group_size) {
  ScaledLayout l = make_layout(op, x, group_size);
  l.type = element_type(op, "x", x.dtype()), l.code = code;
  Tensor values = empty_like_contiguous(x, code);
  Sizes scale_sizes = sizes_of(x);
  if (group_size == kPerTensor) {
    scale_sizes.clear();
  } else {
    scale_sizes.back() = l.segments;
  }
  Tensor scales =
      empty(scale_sizes.data(), static_cast<int64_t>(scale_sizes.size()), Dtype::f32, x);
  if (scales.numel() == 0) return {std::move(values), std::move(scales)};
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  adopt_strides(l, x, group_size);
  auto* codes = static_cast<uint8_t*>(values.data());
  auto* to = scales.data<float>();
#if FLEXOPS_DEVICE_CUDA
  const int64_t one = 1;
  const bool alone = l.rows * l.segments == 1;
  Tensor workspace;
  if (alone) workspace = empty(&one, 1, Dtype::i32, x);
  check_launch(
      op, quantize_scaled_cuda(x.data(), codes, to, alone ? workspace.data<uint32_t>() : nullptr, l,
                               current_stream(x)));
#else
  const void* from = x.data();
  if (l.rows * l.segments == 1) {
    quantize_one(from, codes, to, l);
  } else {
    parallel_for(0, l.rows * l.segments, grain(l), [&](int64_t begin, int64_t end) {
      FLEXOPS_ISA_CALL(quantize_scaled_cpu)(from, codes, to, l, begin, end);
    });
  }
#endif
  return {std::move(values), std::move(scales)};
}

std::tuple<Tensor, Tensor> quantize_fp8(Tensor x, int64_t dtype_code, int64_t group_size) {
  const char* op = "flexops::quantize_fp8";
  const Dtype dtype = dtype_of_code(dtype_code);
  check_fp8(dtype, op, "dtype");
  return quantize(op, std::move(x), dtype, group_size);
}

std::tuple<Tensor, Tensor> quantize_int8(Tensor x) {
  return quantize("flexops::quantize_int8", std::move(x), Dtype::i8, kPerRow);
}

Tensor quantize_fp8_scaled(Tensor x, Tensor scale, int64_t dtype_code) {
  const char* op = "flexops::quantize_fp8_scaled";
  const Dtype dtype = dtype_of_code(dtype_code);
  ScaledLayout l = make_layout(op, x, kPerTensor);
  check_fp8(dtype, op, "dtype");
  l.type = element_type(op, "x", x.dtype()), l.code = dtype;
  FLEXOPS_CHECK(scale.dtype() == Dtype::f32 && scale.numel() == 1, op,
                ": scale must be one float32 number, got shape ", shape_text(scale), " of ",
                dtype_name(scale.dtype()));
  check_device(op, "scale", scale, "x", x);
  Tensor values = empty_like_contiguous(x, dtype);
  if (x.numel() == 0) return values;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  x = contiguous(x);
  auto* codes = static_cast<uint8_t*>(values.data());
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, cast_scaled_cuda(x.data(), scale.data<float>(), codes, l, current_stream(x)));
#else
  const void* from = x.data();
  const float number = *scale.data<float>();
  parallel_for(0, l.length, kGrain, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cast_scaled_cpu)(from, number, false, codes, l, begin, end);
  });
#endif
  return values;
}

Tensor dequantize(const char* op, Tensor values, Tensor scales, int64_t group_size, Dtype dtype) {
  ScaledLayout l = make_layout(op, values, group_size);
  l.type = element_type(op, "dtype", dtype), l.code = values.dtype();
  FLEXOPS_CHECK(scales.dtype() == Dtype::f32, op, ": scales must be float32, got ",
                dtype_name(scales.dtype()));
  check_device(op, "scales", scales, "values", values);
  bool fits = group_size == kPerTensor ? scales.numel() == 1 : scales.dim() == values.dim();
  for (int64_t d = 0; fits && group_size != kPerTensor && d < values.dim(); ++d) {
    fits = scales.size(d) == (d + 1 < values.dim() ? values.size(d) : l.segments);
  }
  FLEXOPS_CHECK(fits, op, ": scales must fit values, got shape ", shape_text(scales), " for ",
                shape_text(values));
  Tensor out = empty_like_contiguous(values, dtype);
  if (out.numel() == 0) return out;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(values);
#endif
  values = contiguous(values);
  scales = contiguous(scales);
  const auto* codes = static_cast<const uint8_t*>(values.data());
  const auto* from = scales.data<float>();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, dequantize_scaled_cuda(codes, from, out.data(), l, current_stream(values)));
#else
  void* to = out.data();
  if (l.rows * l.segments == 1) {
    parallel_for(0, l.length, kGrain, [&](int64_t begin, int64_t end) {
      FLEXOPS_ISA_CALL(uncast_scaled_cpu)(codes, *from, to, l, begin, end);
    });
  } else {
    parallel_for(0, l.rows * l.segments, grain(l), [&](int64_t begin, int64_t end) {
      FLEXOPS_ISA_CALL(dequantize_scaled_cpu)(codes, from, to, l, begin, end);
    });
  }
#endif
  return out;
}

Tensor dequantize_fp8(Tensor values, Tensor scales, int64_t group_size, int64_t dtype_code) {
  const char* op = "flexops::dequantize_fp8";
  check_fp8(values.dtype(), op, "values");
  return dequantize(op, std::move(values), std::move(scales), group_size,
                    dtype_of_code(dtype_code));
}

Tensor dequantize_int8(Tensor values, Tensor scales, int64_t dtype_code) {
  const char* op = "flexops::dequantize_int8";
  FLEXOPS_CHECK(values.dtype() == Dtype::i8, op, ": values must be int8, got ",
                dtype_name(values.dtype()));
  return dequantize(op, std::move(values), std::move(scales), kPerRow, dtype_of_code(dtype_code));
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "quantize_fp8", quantize_fp8);
  FLEXOPS_IMPL(m, "quantize_fp8_scaled", quantize_fp8_scaled);
  FLEXOPS_IMPL(m, "dequantize_fp8", dequantize_fp8);
  FLEXOPS_IMPL(m, "quantize_int8", quantize_int8);
  FLEXOPS_IMPL(m, "dequantize_int8", dequantize_int8);
}

}  // namespace flexops
