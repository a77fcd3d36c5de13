// The norms on the CPU: compiled once per ISA level (common/cpu.h). Formulas: flexops/ops/norm.py.
//
// A row passes through the first-level cache two to three times and through memory once. What is
// not of the row's type (mixed precision) goes through a small buffer.

#include "norm/norm_cpu.h"

#include "common/fp8_cpu.h"

namespace flexops::FLEXOPS_ISA {

/// new_residual = x + residual, of two types.
static void add_mixed_row(const NormForward& n, int64_t row) {
  alignas(64) float left[kBlock], right[kBlock], sum[kBlock];
  for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
    const int64_t part = least(n.columns - begin, kBlock);
    const float* x = widen(n.x, row * n.x_stride + begin, part, n.type, left);
    const float* residual =
        widen(n.residual, row * n.residual_stride + begin, part, n.row_type, right);
    for (int64_t i = 0; i < part; ++i) sum[i] = x[i] + residual[i];
    narrow(sum, n.new_residual, row * n.columns + begin, part, n.row_type);
  }
}

/// What a row's elements become.
template <ElementType type, bool kWide>
struct Result {
  const void *weight, *bias;
  float mean, rstd, offset;
  inline Floats operator()(Floats value, int64_t i, int64_t count) const {
    value = (value - mean) * rstd;
    if (weight) value *= load_parameter<type, kWide>(weight, i, count) + offset;
    if (bias) value += load_parameter<type, kWide>(bias, i, count);
    return value;
  }
};

/// A row on its way into another type, or with parameters of another; `from` is its first element,
/// of row_type.
struct MixedRow {
  const NormForward& n;
  const void* from;
  float mean, rstd;

  [[gnu::noinline]] void make_block(float* block, int64_t begin, int64_t part) const {
    alignas(64) float buffer[kBlock], weight_buffer[kBlock], bias_buffer[kBlock];
    const float* x = widen(from, begin, part, n.row_type, buffer);
    const Result<ElementType::f32, true> result{
        n.weight ? widen(n.weight, begin, part, n.weight_type, weight_buffer) : nullptr,
        n.bias ? widen(n.bias, begin, part, n.weight_type, bias_buffer) : nullptr, mean, rstd,
        n.offset};
    for_each(part, [&](int64_t i, int64_t count) {
      store_at<ElementType::f32>(block, i, result(load_at<ElementType::f32>(x, i, count), i, count),
                                 count);
    });
  }

  void write(int64_t row) const {
    alignas(64) float block[kBlock];
    for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
      const int64_t part = least(n.columns - begin, kBlock);
      make_block(block, begin, part);
      narrow(block, n.y, row * n.columns + begin, part, n.type);
    }
  }

  void write_codes(int64_t row) const {
    alignas(64) float block[kBlock];
    uint32_t largest = 0;  // of the absolute values' bits, among which NaN is above infinity
    for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
      const int64_t part = least(n.columns - begin, kBlock);
      make_block(block, begin, part);
      for (int64_t i = 0; i < part; ++i) {
        const uint32_t bits = bits_of(block[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
      }
    }
    const bool int8 = n.codes == Dtype::i8;
    auto* out = static_cast<uint8_t*>(n.y) + row * n.columns;
    if (largest >= 0x7f800000u) {
      n.scales[row] = __builtin_nanf("");
      memset(out, 0, static_cast<size_t>(n.columns));
      return;
    }
    const float ratio = float_from_bits(largest) / (int8 ? 127.0f : 448.0f),
                scale = ratio > 0x1p-126f ? ratio : 0x1p-126f;
    n.scales[row] = largest ? scale : 1.0f;
    const float inverse = 1.0f / n.scales[row];
    for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
      const int64_t part = least(n.columns - begin, kBlock);
      make_block(block, begin, part);
      for (int64_t i = 0; i < part; ++i) block[i] *= inverse;
      int8 ? float_to_i8(block, reinterpret_cast<int8_t*>(out) + begin, part)
           : float_to_e4m3(block, out + begin, part);
    }
  }
};

struct Statistics {
  float mean, rstd;
};

/// The deviations from a mean, and from their own mean how far it was off. In float32 that mean is
/// the row's, and what is left of it is the rounding of a large sum; for 16-bit elements it is that
/// of the first few, which saves a pass: that it is another mean costs less accuracy than the
/// elements have lost by their rounding.
template <ElementType type>
static Statistics find_statistics(const NormForward& n, const Stored<type>* x) {
  const float inverse = 1.0f / static_cast<float>(n.columns);
  Sums sums, squares;
  float center = 0.0f;
  if (n.centered) {
    const int64_t columns = type == ElementType::f32 ? n.columns : least(n.columns, kSums * kLanes);
    for_each_sum(0, columns, [&](int64_t i, int64_t count, int k) {
      sums.at[k] += load_at<type>(x, i, count);
    });
    center = sums.total() / static_cast<float>(columns);
  }
  sums = Sums{};
  int64_t done = 0;
  if constexpr (type == ElementType::bf16) {
    for (; done + kSums * kLanes <= n.columns; done += kSums * kLanes) {
      for (int k = 0; k < kSums; k += 2) {
        const Bf16Pairs values = load_bf16_pairs(x + done + k * kLanes);
        const Floats even = values.even - center, odd = values.odd - center;
        sums.at[k] += even, sums.at[k + 1] += odd;
        squares.at[k] += even * even, squares.at[k + 1] += odd * odd;
      }
    }
  }
  for_each_sum(done, n.columns, [&](int64_t i, int64_t count, int k) {
    const Floats value = load_at<type>(x, i, count) - center,
                 kept = count == kLanes ? value : keep(value, count);
    sums.at[k] += kept;
    squares.at[k] += kept * kept;
  });
  const float shift = n.centered ? sums.total() * inverse : 0.0f,
              variance = squares.total() * inverse - shift * shift;
  return {center + shift, 1.0f / square_root((variance < 0.0f ? 0.0f : variance) + n.eps)};
}

/// What there is of whole pairs of registers in a row of bf16 with parameters of bf16; returns how
/// many elements that is.
static int64_t write_pairs(const NormForward& n, const uint16_t* x, uint16_t* y,
                           const Statistics& found) {
  const auto *weight = static_cast<const uint16_t*>(n.weight),
             *bias = static_cast<const uint16_t*>(n.bias);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n.columns; i += 2 * kLanes) {
    Bf16Pairs value = load_bf16_pairs(x + i);
    value.even = (value.even - found.mean) * found.rstd,
    value.odd = (value.odd - found.mean) * found.rstd;
    if (weight) {
      const Bf16Pairs w = load_bf16_pairs(weight + i);
      value.even *= w.even + n.offset, value.odd *= w.odd + n.offset;
    }
    if (bias) {
      const Bf16Pairs b = load_bf16_pairs(bias + i);
      value.even += b.even, value.odd += b.odd;
    }
    store_bf16_pairs(y + i, value);
  }
  return i;
}

template <ElementType type, bool kWide>
static void write_row(const NormForward& n, const Stored<type>* x, int64_t row,
                      const Statistics& found) {
  const Result<type, kWide> result{n.weight, n.bias, found.mean, found.rstd, n.offset};
  auto* y = static_cast<Stored<type>*>(n.y) + row * n.columns;
  int64_t done = 0;
  if constexpr (type == ElementType::bf16 && !kWide) done = write_pairs(n, x, y, found);
  for_each(done, n.columns, [&](int64_t i, int64_t count) {
    store_at<type>(y, i, result(load_at<type>(x, i, count), i, count), count);
  });
}

template <ElementType type>
static void forward_row(const NormForward& n, int64_t row) {
  const Stored<type>* x = static_cast<const Stored<type>*>(n.x) + row * n.x_stride;
  if (n.residual) {
    auto* sum = static_cast<Stored<type>*>(n.new_residual) + row * n.columns;
    if (n.type != type) {
      add_mixed_row(n, row);
    } else {
      const auto* residual = static_cast<const Stored<type>*>(n.residual) + row * n.residual_stride;
      for_each(n.columns, [&](int64_t i, int64_t count) {
        store_at<type>(sum, i, load_at<type>(x, i, count) + load_at<type>(residual, i, count),
                       count);
      });
    }
    x = sum;
  }
  const Statistics found = find_statistics<type>(n, x);
  if (n.mean) n.mean[row] = found.mean;
  if (n.rstd) n.rstd[row] = found.rstd;
  constexpr bool kHalf = type != ElementType::f32;
  const MixedRow mixed{n, x, found.mean, found.rstd};
  if (n.codes != Dtype::none) {
    mixed.write_codes(row);
  } else if (n.type == type && n.weight_type == ElementType::f32) {
    write_row<type, true>(n, x, row, found);
  } else if (n.type == type && n.weight_type == type) {
    write_row<type, !kHalf>(n, x, row, found);
  } else {
    mixed.write(row);
  }
}

template <ElementType type>
static void forward_rows(const NormForward& n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) forward_row<type>(n, row);
}

void norm_forward_cpu(const NormForward& n, int64_t begin, int64_t end) {
  n.row_type == ElementType::f32   ? forward_rows<ElementType::f32>(n, begin, end)
  : n.row_type == ElementType::f16 ? forward_rows<ElementType::f16>(n, begin, end)
                                   : forward_rows<ElementType::bf16>(n, begin, end);
}

}  // namespace flexops::FLEXOPS_ISA
