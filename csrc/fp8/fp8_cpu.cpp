// Quantization to scaled bytes on the CPU: compiled once per ISA level (common/cpu.h). Formulas:
// flexops/ops/fp8.py, which this reproduces bit for bit, so multiplications and additions must stay
// apart.

#include "fp8/fp8.h"

#include "common/cpu_rows.h"
#include "common/fp8_cpu.h"

namespace flexops::FLEXOPS_ISA {

template <typename T>
static T largest_magnitude(const T* values, int64_t count, T mask) {
  T largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const T magnitude = static_cast<T>(values[i] & mask);
    largest = largest < magnitude ? magnitude : largest;
  }
  return largest;
}

uint32_t largest_bits_cpu(const void* x, ElementType type, int64_t begin, int64_t end) {
  if (type == ElementType::f32) {
    return static_cast<uint32_t>(largest_magnitude(static_cast<const int32_t*>(x) + begin,
                                                   end - begin, int32_t{0x7fffffff}));
  }
  const auto bits = static_cast<uint16_t>(
      largest_magnitude(static_cast<const int16_t*>(x) + begin, end - begin, int16_t{0x7fff}));
  return type == ElementType::bf16 ? static_cast<uint32_t>(bits) << 16
                                   : bits_of(f16_to_float(bits));
}

float scale_cpu(uint32_t largest_bits, Dtype code) {
  if (largest_bits == 0) return 1.0f;
  if (largest_bits >= 0x7f800000u) return __builtin_nanf("");
  const float largest = code == Dtype::e4m3 ? 448.0f : code == Dtype::e5m2 ? 57344.0f : 127.0f;
  const float scale = float_from_bits(largest_bits) / largest;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

static void multiply(const float* FLEXOPS_RESTRICT in, float* FLEXOPS_RESTRICT out, int64_t count,
                     float factor) {
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
}

/// `count` elements from `element` on to codes from `out` on.
static void encode(const void* x, int64_t element, int64_t count, float scale, bool broken,
                   uint8_t* out, const ScaledLayout& l) {
  if (broken) {
    memset(out, 0, static_cast<size_t>(count));
    return;
  }
  const float inverse = 1.0f / scale;
  alignas(64) float buffer[kRowBlock];
  for (int64_t at = 0; at < count; at += kRowBlock) {
    const int64_t part = least(count - at, kRowBlock);
    const float* values = widen(x, element + at, part, l.type, buffer);
    alignas(64) float scaled[kRowBlock];
    multiply(values, scaled, part, inverse);
    if (l.code == Dtype::e4m3) {
      float_to_e4m3(scaled, out + at, part);
    } else if (l.code == Dtype::e5m2) {
      float_to_e5m2(scaled, out + at, part);
    } else {
      float_to_i8(scaled, reinterpret_cast<int8_t*>(out) + at, part);
    }
  }
}

static void decode(const uint8_t* codes, int64_t count, float scale, void* out, int64_t element,
                   const ScaledLayout& l) {
  alignas(64) float values[kRowBlock], buffer[kRowBlock];
  for (int64_t at = 0; at < count; at += kRowBlock) {
    const int64_t part = least(count - at, kRowBlock);
    if (l.code == Dtype::e4m3) {
      e4m3_to_float(codes + at, values, part);
    } else if (l.code == Dtype::e5m2) {
      e5m2_to_float(codes + at, values, part);
    } else {
      i8_to_float(reinterpret_cast<const int8_t*>(codes) + at, values, part);
    }
    float* scaled = place_in_row(out, element + at, l.type, buffer);
    multiply(values, scaled, part, scale);
    narrow(scaled, out, element + at, part, l.type);
  }
}

void cast_scaled_cpu(const void* x, float scale, bool broken, uint8_t* codes,
                     const ScaledLayout& layout, int64_t begin, int64_t end) {
  encode(x, begin, end - begin, scale, broken, codes + begin, layout);
}

void uncast_scaled_cpu(const uint8_t* codes, float scale, void* out, const ScaledLayout& layout,
                       int64_t begin, int64_t end) {
  decode(codes + begin, end - begin, scale, out, begin, layout);
}

/// Calls one(index, row, first element in the row, elements) for each segment of [begin, end).
template <typename F>
static void for_each_segment(const ScaledLayout& l, int64_t begin, int64_t end, const F& one) {
  int64_t row = begin / l.segments, within = begin % l.segments;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t start = within * l.segment;
    one(index, row, start, least(l.length - start, l.segment));
    if (++within == l.segments) within = 0, ++row;
  }
}

void quantize_scaled_cpu(const void* x, uint8_t* codes, float* scales, const ScaledLayout& layout,
                         int64_t begin, int64_t end) {
  const ScaledLayout& l = layout;
  for_each_segment(l, begin, end, [&](int64_t index, int64_t row, int64_t start, int64_t count) {
    const int64_t element = row * l.row_stride + start;
    const uint32_t bits = largest_bits_cpu(x, l.type, element, element + count);
    scales[index] = scale_cpu(bits, l.code);
    encode(x, element, count, scales[index], bits >= 0x7f800000u, codes + row * l.length + start,
           l);
  });
}

void dequantize_scaled_cpu(const uint8_t* codes, const float* scales, void* out,
                           const ScaledLayout& layout, int64_t begin, int64_t end) {
  const ScaledLayout& l = layout;
  for_each_segment(l, begin, end, [&](int64_t index, int64_t row, int64_t start, int64_t count) {
    decode(codes + row * l.length + start, count, scales[index], out, row * l.length + start, l);
  });
}

}  // namespace flexops::FLEXOPS_ISA
