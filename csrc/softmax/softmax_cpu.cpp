// Softmax on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/softmax.py.

#include "softmax/softmax.h"

#include <stdlib.h>

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

static const float kInfinity = __builtin_inff();

// A row's exponents and then powers are kept as floats: in its place among the results if that is
// float32, else in a buffer on the stack, or for more elements than that holds on the heap. Those
// of still longer 16-bit rows (1 MiB and more) are computed again when they are needed.
constexpr int64_t kHeld = 4096, kMostHeld = int64_t{1} << 18;

/// A row's mask.
struct MaskRow {
  const void* data = nullptr;  // null: none, or one value for all of the row
  int64_t offset = 0;
  float bias = 0.0f;  // that value
  Dtype kind = Dtype::none;
};

/// `length` becomes 0 if the mask leaves nothing.
static MaskRow find_mask(const void* mask, const SoftmaxRows& rows, int64_t row, int64_t& length) {
  MaskRow m;
  m.kind = rows.mask;
  if (rows.mask == Dtype::none) return m;
  for (int d = 0; d < rows.mask_dims; ++d) {
    m.offset += row % rows.mask_sizes[d] * rows.mask_strides[d];
    row /= rows.mask_sizes[d];
  }
  if (rows.mask_step != 0) {
    m.data = mask;
  } else if (rows.mask == Dtype::boolean) {
    if (static_cast<const uint8_t*>(mask)[m.offset] == 0) length = 0;
  } else {
    float buffer;
    m.bias = *widen(mask, m.offset, 1, static_cast<ElementType>(rows.mask), &buffer);
  }
  return m;
}

static void apply_mask(float* FLEXOPS_RESTRICT s, const MaskRow& m, int64_t at, int64_t count) {
  if (m.kind == Dtype::none) return;
  if (m.data == nullptr) {
    for (int64_t i = 0; i < count; ++i) s[i] += m.bias;
  } else if (m.kind == Dtype::boolean) {
    const uint8_t* FLEXOPS_RESTRICT keep = static_cast<const uint8_t*>(m.data) + m.offset + at;
    for (int64_t i = 0; i < count; ++i) s[i] = keep[i] ? s[i] : -kInfinity;
  } else {
    alignas(64) float buffer[kRowBlock];
    const float* FLEXOPS_RESTRICT added =
        widen(m.data, m.offset + at, count, static_cast<ElementType>(m.kind), buffer);
    for (int64_t i = 0; i < count; ++i) s[i] += added[i];
  }
}

/// Exponents [at, at + count) of a row whose first element is `offset`: at most a block of them.
[[gnu::noinline]] static void make_exponents(const void* x, int64_t offset, int64_t at,
                                             int64_t count, const SoftmaxRows& rows,
                                             const MaskRow& mask, float* FLEXOPS_RESTRICT s) {
  alignas(64) float buffer[kRowBlock];
  const float* FLEXOPS_RESTRICT values = widen(x, offset + at, count, rows.type, buffer);
  const float scale = rows.scale;
  for (int64_t i = 0; i < count; ++i) s[i] = values[i] * scale;
  apply_mask(s, mask, at, count);
}

/// out = x * scale for `count` elements from x's `offset` on, in floats; returns the greatest of
/// them and `maximum`.
template <ElementType type>
static float scale_block(const void* x, int64_t offset, int64_t count, float scale, float* out,
                         float maximum) {
  Floats a = floats_of(maximum), b = a;
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Floats first = load_elements<type>(x, offset + i) * scale,
                 second = load_elements<type>(x, offset + i + kLanes) * scale;
    store_floats(out + i, first), store_floats(out + i + kLanes, second);
    a = greater_of(a, first), b = greater_of(b, second);
  }
  for (; i + kLanes <= count; i += kLanes) {
    const Floats value = load_elements<type>(x, offset + i) * scale;
    store_floats(out + i, value);
    a = greater_of(a, value);
  }
  float rest = maximum;
  for (; i < count; ++i) {
    few(i);
    out[i] = load_element<type>(x, offset + i) * scale;
    rest = rest < out[i] ? out[i] : rest;
  }
  const float most = greatest_lane(greater_of(a, b));
  return most < rest ? rest : most;
}

/// A block's exponents, and the greatest of them and `maximum`.
static float exponents(const void* x, int64_t offset, int64_t at, int64_t count,
                       const SoftmaxRows& rows, const MaskRow& mask, float* s, float maximum) {
  if (mask.kind == Dtype::none) {
    const ElementType type = rows.type;
    return type == ElementType::f32
               ? scale_block<ElementType::f32>(x, offset + at, count, rows.scale, s, maximum)
           : type == ElementType::f16
               ? scale_block<ElementType::f16>(x, offset + at, count, rows.scale, s, maximum)
               : scale_block<ElementType::bf16>(x, offset + at, count, rows.scale, s, maximum);
  }
  make_exponents(x, offset, at, count, rows, mask, s);
  return greatest(s, count, maximum);
}

static float settle(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }

/// out = values / sum, in whose last bit a product with the reciprocal alone would err.
template <ElementType type>
static void divide_to(const float* values, void* out, int64_t offset, int64_t count, float sum) {
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const auto quotient_of = [sum, inverse](Floats value) {
    const Floats quotient = value * inverse;
    return quotient + (value - quotient * sum) * inverse;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store_elements<type>(out, offset + i, quotient_of(load_floats(values + i)));
  if (i == count) return;
  float rest[kLanes];
  store_floats(rest, quotient_of(load_some(values + i, count - i, 0.0f)));
  for (const float* from = rest; i < count; ++i)
    few(i), store_element<type>(out, offset + i, *from++);
}
static void divide(const float* values, void* out, int64_t offset, int64_t count, float sum,
                   ElementType type) {
  if (type == ElementType::f32) return divide_to<ElementType::f32>(values, out, offset, count, sum);
  if (type == ElementType::f16) return divide_to<ElementType::f16>(values, out, offset, count, sum);
  divide_to<ElementType::bf16>(values, out, offset, count, sum);
}

/// A row of at most a block, in a buffer that is filled up to whole registers: the stores of a few
/// elements would keep the loads of the next step waiting.
static void softmax_short(const void* x, int64_t offset, void* out, int64_t out_offset,
                          int64_t length, const SoftmaxRows& rows, const MaskRow& mask) {
  static const float zeros[kLanes] = {};
  alignas(64) float s[kRowBlock + kLanes], buffer[kRowBlock];
  const float* values = widen(x, offset, length, rows.type, buffer);
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes)
    store_floats(s + i, load_floats(values + i) * rows.scale);
  if (i < length) {
    store_floats(s + i, load_some(values + i, length - i, 0.0f) * rows.scale +
                            load_some(zeros, length - i, -kInfinity));
    i += kLanes;
  }
  apply_mask(s, mask, 0, length);
  const float sum = sum_powers<true>(s, s, i, settle(greatest(s, i, -kInfinity)));
  divide(s, out, out_offset, length, sum, rows.type);
}

/// A row whose exponents fit `held`, which may be where its results go.
static void softmax_held(const void* x, int64_t offset, void* out, int64_t out_offset,
                         int64_t length, const SoftmaxRows& rows, const MaskRow& mask,
                         float* held) {
  const ElementType type = rows.type;
  const int64_t first = unaligned_of(out, out_offset, length, type);
  float maximum = -kInfinity;
  double sum = 0.0;
  for_row_blocks(length, first, [&](int64_t at, int64_t count) {
    maximum = exponents(x, offset, at, count, rows, mask, held + at, maximum);
  });
  const float base = settle(maximum);
  for_row_blocks(length, first, [&](int64_t at, int64_t count) {
    sum += static_cast<double>(sum_powers<true>(held + at, held + at, count, base));
  });
  for_row_blocks(length, first, [&](int64_t at, int64_t count) {
    divide(held + at, out, out_offset + at, count, static_cast<float>(sum), type);
  });
}

static void softmax_long(const void* x, int64_t offset, void* out, int64_t out_offset,
                         int64_t length, const SoftmaxRows& rows, const MaskRow& mask) {
  alignas(64) float s[kRowBlock];
  float maximum = -kInfinity;
  double sum = 0.0;
  for_row_blocks(length, 0, [&](int64_t at, int64_t count) {
    maximum = exponents(x, offset, at, count, rows, mask, s, maximum);
  });
  const float base = settle(maximum);
  for_row_blocks(length, 0, [&](int64_t at, int64_t count) {
    make_exponents(x, offset, at, count, rows, mask, s);
    sum += static_cast<double>(sum_powers<false>(s, nullptr, count, base));
  });
  for_row_blocks(length, 0, [&](int64_t at, int64_t count) {
    make_exponents(x, offset, at, count, rows, mask, s);
    sum_powers<true>(s, s, count, base);
    divide(s, out, out_offset + at, count, static_cast<float>(sum), rows.type);
  });
}

/// How many of the row's first elements take part.
static int64_t visible(const SoftmaxRows& rows, int64_t row) {
  if (!rows.causal) return rows.length;
  const int64_t most = row % rows.queries + 1 + rows.length - rows.queries;
  return most < 0 ? 0 : most;
}

void softmax_cpu(const void* x, const void* mask, void* out, const SoftmaxRows& rows, int64_t begin,
                 int64_t end) {
  alignas(64) float buffer[kHeld];
  const ElementType type = rows.type;
  float* heap = nullptr;
  if (type != ElementType::f32 && rows.length > kHeld && rows.length <= kMostHeld) {
    heap = static_cast<float*>(malloc(static_cast<size_t>(rows.length) * sizeof(float)));
  }
  for (int64_t row = begin; row < end; ++row) {
    int64_t length = visible(rows, row);
    const MaskRow m = find_mask(mask, rows, row, length);
    const int64_t from = row * rows.stride, to = row * rows.length;
    if (length <= kRowBlock) {
      softmax_short(x, from, out, to, length, rows, m);
    } else if (type == ElementType::f32 || heap != nullptr || length <= kHeld) {
      softmax_held(x, from, out, to, length, rows, m,
                   place_in_row(out, to, type, heap ? heap : buffer));
    } else {
      softmax_long(x, from, out, to, length, rows, m);
    }
    clear_row(out, to + length, rows.length - length, type);
  }
  free(heap);
}

template <ElementType type>
static float dot(const void* a, int64_t a_at, const void* b, int64_t b_at, int64_t count) {
  Floats sum[4] = {};
  int64_t i = 0;
  if constexpr (type == ElementType::bf16) {
    const uint16_t *left = static_cast<const uint16_t*>(a) + a_at,
                   *right = static_cast<const uint16_t*>(b) + b_at;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      for (int k = 0; k < 2; ++k) {
        const Bf16Pairs x = load_bf16_pairs(left + i + 2 * k * kLanes),
                        y = load_bf16_pairs(right + i + 2 * k * kLanes);
        sum[2 * k] += x.even * y.even, sum[2 * k + 1] += x.odd * y.odd;
      }
    }
  }
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      sum[k] += load_elements<type>(a, a_at + i + k * kLanes) *
                load_elements<type>(b, b_at + i + k * kLanes);
    }
  }
  for (; i + kLanes <= count; i += kLanes)
    sum[0] += load_elements<type>(a, a_at + i) * load_elements<type>(b, b_at + i);
  float rest = 0.0f;
  for (; i < count; ++i)
    few(i), rest += load_element<type>(a, a_at + i) * load_element<type>(b, b_at + i);
  return sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

/// out = scale * y * (grad - sum)
template <ElementType type>
static void write_gradient(const void* grad, int64_t grad_at, const void* y, int64_t y_at,
                           void* out, int64_t out_at, int64_t count, float scale, float sum) {
  int64_t i = 0;
  if constexpr (type == ElementType::bf16) {
    const uint16_t *results = static_cast<const uint16_t*>(y) + y_at,
                   *grads = static_cast<const uint16_t*>(grad) + grad_at;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      const Bf16Pairs p = load_bf16_pairs(results + i), g = load_bf16_pairs(grads + i);
      store_bf16_pairs(static_cast<uint16_t*>(out) + out_at + i,
                       {p.even * scale * (g.even - sum), p.odd * scale * (g.odd - sum)});
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    const Floats value =
        load_elements<type>(y, y_at + i) * scale * (load_elements<type>(grad, grad_at + i) - sum);
    store_elements<type>(out, out_at + i, value);
  }
  for (; i < count; ++i) {
    few(i);
    const float value =
        load_element<type>(y, y_at + i) * scale * (load_element<type>(grad, grad_at + i) - sum);
    store_element<type>(out, out_at + i, value);
  }
}

template <ElementType type>
static void backward_rows(const void* grad, int64_t grad_stride, const void* y, void* out,
                          const SoftmaxRows& rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t length = visible(rows, row), from = row * grad_stride, kept = row * rows.stride,
                  to = row * rows.length;
    const int64_t first = unaligned_of(out, to, length, type);
    double total = 0.0;
    for_row_blocks(length, first, [&](int64_t at, int64_t count) {
      total += static_cast<double>(dot<type>(grad, from + at, y, kept + at, count));
    });
    for_row_blocks(length, first, [&](int64_t at, int64_t count) {
      write_gradient<type>(grad, from + at, y, kept + at, out, to + at, count, rows.scale,
                           static_cast<float>(total));
    });
    clear_row(out, to + length, rows.length - length, type);
  }
}

void softmax_backward_cpu(const void* grad, int64_t grad_stride, const void* y, void* out,
                          const SoftmaxRows& rows, int64_t begin, int64_t end) {
  const ElementType type = rows.type;
  if (type == ElementType::f32)
    return backward_rows<ElementType::f32>(grad, grad_stride, y, out, rows, begin, end);
  if (type == ElementType::f16)
    return backward_rows<ElementType::f16>(grad, grad_stride, y, out, rows, begin, end);
  backward_rows<ElementType::bf16>(grad, grad_stride, y, out, rows, begin, end);
}

}  // namespace flexops::FLEXOPS_ISA
