// The norms on the CPU: compiled once per ISA level (common/cpu.h). Formulas: flexops/ops/norm.py.
//
// A row passes through the first-level cache two to three times and through memory once. What is not of the row's type (mixed precision)
// goes through a small buffer.

#include "norm/norm.h"

#include "common/cpu_math.h"
#include "common/fp8_cpu.h"

namespace flexops::FLEXOPS_ISA {

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

constexpr int64_t kBlock = 512;  // elements that go through a buffer at once
constexpr int64_t kSums = 4;     // independent sums, to hide an addition's latency
static_assert(kBlock % (kSums * kLanes) == 0);

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename To, typename From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &from, sizeof out);
  return out;
}

static inline Floats zeros() { return Floats{}; }
static inline Floats spread(float value) { return Floats{} + value; }

// ---- elements, a register of them at a time ---------------------------------------------------------------------------

template <NormType type>
struct Element {
  using type_ = uint16_t;
};
template <>
struct Element<NormType::f32> {
  using type_ = float;
};
template <NormType type>
using Stored = typename Element<type>::type_;

template <NormType type>
static inline Floats load(const Stored<type>* from) {
  if constexpr (type == NormType::f32) {
    return load_floats(from);
  } else if constexpr (type == NormType::bf16) {
    Halves bits;
    memcpy(&bits, from, sizeof bits);
    return bits_as<Floats>(__builtin_convertvector(bits, Words) << 16);
  } else {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Floats out;
    for (int i = 0; i < kLanes; ++i) out[i] = f16_to_float(from[i]);
    return out;
#endif
  }
}

template <NormType type>
static inline void store(Stored<type>* to, Floats value) {
  if constexpr (type == NormType::f32) {
    store_floats(to, value);
  } else if constexpr (type == NormType::bf16) {
    const Words bits = bits_as<Words>(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words out = value == value ? rounded : Words{} + 0x7fc0u;
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, bits_as<__m512i>(out)));
#elif defined(__AVX2__)
    const __m256i words = bits_as<__m256i>(out);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    const Halves halves = __builtin_convertvector(out, Halves);
    memcpy(to, &halves, sizeof halves);
#endif
  } else {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = float_to_f16(value[i]);
#endif
  }
}

/// The first `count` of a register; the others are zeros. Out of line: rows have one such end, and every loop would have its own copy.
template <NormType type>
[[gnu::noinline]] static Floats load_some(const Stored<type>* from, int64_t count) {
  Stored<type> buffer[kLanes] = {};
  memcpy(buffer, from, static_cast<size_t>(count) * sizeof(Stored<type>));
  return load<type>(buffer);
}
template <NormType type>
[[gnu::noinline]] static void store_some(Stored<type>* to, Floats value, int64_t count) {
  Stored<type> buffer[kLanes];
  store<type>(buffer, value);
  memcpy(to, buffer, static_cast<size_t>(count) * sizeof(Stored<type>));
}
/// Zeros behind the first `count`.
static inline Floats keep(Floats value, int64_t count) {
  for (int64_t i = count; i < kLanes; ++i) value[i] = 0.0f;
  return value;
}

/// Calls f(index, count) for every register of a row, from `first` on; count is less than kLanes for the last one only.
template <typename F>
static inline void for_each(int64_t first, int64_t columns, const F& f) {
  int64_t i = first;
  for (; i + kLanes <= columns; i += kLanes) f(i, int64_t{kLanes});
  if (i < columns) f(i, columns - i);
}
template <typename F>
static inline void for_each(int64_t columns, const F& f) {
  for_each(0, columns, f);
}
/// The same with the number of a sum, which goes around.
template <typename F>
static inline void for_each_sum(int64_t first, int64_t columns, const F& f) {
  int64_t i = first;
  for (; i + kSums * kLanes <= columns; i += kSums * kLanes) {
    for (int k = 0; k < kSums; ++k) f(i + k * kLanes, int64_t{kLanes}, k);
  }
  for (; i < columns; i += kLanes) f(i, least(columns - i, kLanes), 0);
}
template <NormType type>
static inline Floats load_at(const Stored<type>* from, int64_t i, int64_t count) {
  return count == kLanes ? load<type>(from + i) : load_some<type>(from + i, count);
}
template <NormType type>
static inline void store_at(Stored<type>* to, int64_t i, Floats value, int64_t count) {
  count == kLanes ? store<type>(to + i, value) : store_some<type>(to + i, value, count);
}

struct Sums {
  Floats at[kSums] = {};
  float total() const {
    const Floats all = (at[0] + at[1]) + (at[2] + at[3]);
    float lanes[kLanes];
    store_floats(lanes, all);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }
};

/// `count` elements of a type that is told at run time, as floats: in place or in `buffer`.
static const float* widen(const void* from, int64_t offset, int64_t count, NormType type, float* buffer) {
  if (type == NormType::f32) return static_cast<const float*>(from) + offset;
  const uint16_t* bits = static_cast<const uint16_t*>(from) + offset;
  type == NormType::bf16 ? bf16_to_float(bits, buffer, count) : f16_to_float(bits, buffer, count);
  return buffer;
}
static void narrow(const float* from, void* to, int64_t offset, int64_t count, NormType type) {
  if (type == NormType::f32) {
    memcpy(static_cast<float*>(to) + offset, from, static_cast<size_t>(count) * 4);
  } else {
    uint16_t* bits = static_cast<uint16_t*>(to) + offset;
    type == NormType::bf16 ? float_to_bf16(from, bits, count) : float_to_f16(from, bits, count);
  }
}

// ---- forward ----------------------------------------------------------------------------------------------------------

/// new_residual = x + residual, of two types.
static void add_mixed_row(const NormForward& n, int64_t row) {
  float left[kBlock], right[kBlock], sum[kBlock];
  for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
    const int64_t part = least(n.columns - begin, kBlock);
    const float* x = widen(n.x, row * n.x_stride + begin, part, n.type, left);
    const float* residual = widen(n.residual, row * n.residual_stride + begin, part, n.row_type, right);
    for (int64_t i = 0; i < part; ++i) sum[i] = x[i] + residual[i];
    narrow(sum, n.new_residual, row * n.columns + begin, part, n.row_type);
  }
}

/// A weight or a bias: float32, or of the rows' type.
template <NormType type, bool kWide>
static inline Floats load_parameter(const void* from, int64_t i, int64_t count) {
  constexpr NormType own = kWide ? NormType::f32 : type;
  return load_at<own>(static_cast<const Stored<own>*>(from), i, count);
}

/// What a row's elements become.
template <NormType type, bool kWide>
struct Result {
  const void *weight, *bias;
  float mean, rstd;
  inline Floats operator()(Floats value, int64_t i, int64_t count) const {
    value = (value - mean) * rstd;
    if (weight) value *= load_parameter<type, kWide>(weight, i, count);
    if (bias) value += load_parameter<type, kWide>(bias, i, count);
    return value;
  }
};

/// A row on its way into another type, or with parameters of another; `from` is its first element, of row_type.
struct MixedRow {
  const NormForward& n;
  const void* from;
  float mean, rstd;

  [[gnu::noinline]] void make_block(float* block, int64_t begin, int64_t part) const {
    float buffer[kBlock], weight_buffer[kBlock], bias_buffer[kBlock];
    const float* x = widen(from, begin, part, n.row_type, buffer);
    const Result<NormType::f32, true> result{n.weight ? widen(n.weight, begin, part, n.weight_type, weight_buffer) : nullptr,
                                             n.bias ? widen(n.bias, begin, part, n.weight_type, bias_buffer) : nullptr, mean, rstd};
    for_each(part, [&](int64_t i, int64_t count) {
      store_at<NormType::f32>(block, i, result(load_at<NormType::f32>(x, i, count), i, count), count);
    });
  }

  void write(int64_t row) const {
    float block[kBlock];
    for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
      const int64_t part = least(n.columns - begin, kBlock);
      make_block(block, begin, part);
      narrow(block, n.y, row * n.columns + begin, part, n.type);
    }
  }

  void write_codes(int64_t row) const {
    float block[kBlock];
    uint32_t largest = 0;  // of the absolute values' bits, among which NaN is above infinity
    for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
      const int64_t part = least(n.columns - begin, kBlock);
      make_block(block, begin, part);
      for (int64_t i = 0; i < part; ++i) {
        const uint32_t bits = bits_of(block[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
      }
    }
    const bool int8 = n.codes == NormCodes::int8;
    auto* out = static_cast<uint8_t*>(n.y) + row * n.columns;
    if (largest >= 0x7f800000u) {
      n.scales[row] = __builtin_nanf("");
      memset(out, 0, static_cast<size_t>(n.columns));
      return;
    }
    const float ratio = float_from_bits(largest) / (int8 ? 127.0f : 448.0f), scale = ratio > 0x1p-126f ? ratio : 0x1p-126f;
    n.scales[row] = largest ? scale : 1.0f;
    const float inverse = 1.0f / n.scales[row];
    for (int64_t begin = 0; begin < n.columns; begin += kBlock) {
      const int64_t part = least(n.columns - begin, kBlock);
      make_block(block, begin, part);
      for (int64_t i = 0; i < part; ++i) block[i] *= inverse;
      int8 ? float_to_i8(block, reinterpret_cast<int8_t*>(out) + begin, part) : float_to_e4m3(block, out + begin, part);
    }
  }
};

struct Statistics {
  float mean, rstd;
};

/// The deviations from a mean, and from their own mean how far it was off. In float32 that mean is the row's, and what is left of it is the
/// rounding of a large sum; for 16-bit elements it is that of the first few, which saves a pass: that it is another mean costs less
/// accuracy than the elements have lost by their rounding.
template <NormType type>
static Statistics find_statistics(const NormForward& n, const Stored<type>* x) {
  const float inverse = 1.0f / static_cast<float>(n.columns);
  Sums sums, squares;
  float center = 0.0f;
  if (n.centered) {
    const int64_t columns = type == NormType::f32 ? n.columns : least(n.columns, kSums * kLanes);
    for_each_sum(0, columns, [&](int64_t i, int64_t count, int k) { sums.at[k] += load_at<type>(x, i, count); });
    center = sums.total() / static_cast<float>(columns);
  }
  sums = Sums{};
  int64_t done = 0;
  if constexpr (type == NormType::bf16) {
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
    const Floats value = load_at<type>(x, i, count) - center, kept = count == kLanes ? value : keep(value, count);
    sums.at[k] += kept;
    squares.at[k] += kept * kept;
  });
  const float shift = n.centered ? sums.total() * inverse : 0.0f, variance = squares.total() * inverse - shift * shift;
  return {center + shift, 1.0f / square_root((variance < 0.0f ? 0.0f : variance) + n.eps)};
}

/// What there is of whole pairs of registers in a row of bf16 with parameters of bf16; returns how many elements that is.
static int64_t write_pairs(const NormForward& n, const uint16_t* x, uint16_t* y, const Statistics& found) {
  const auto *weight = static_cast<const uint16_t*>(n.weight), *bias = static_cast<const uint16_t*>(n.bias);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n.columns; i += 2 * kLanes) {
    Bf16Pairs value = load_bf16_pairs(x + i);
    value.even = (value.even - found.mean) * found.rstd, value.odd = (value.odd - found.mean) * found.rstd;
    if (weight) {
      const Bf16Pairs w = load_bf16_pairs(weight + i);
      value.even *= w.even, value.odd *= w.odd;
    }
    if (bias) {
      const Bf16Pairs b = load_bf16_pairs(bias + i);
      value.even += b.even, value.odd += b.odd;
    }
    store_bf16_pairs(y + i, value);
  }
  return i;
}

template <NormType type, bool kWide>
static void write_row(const NormForward& n, const Stored<type>* x, int64_t row, const Statistics& found) {
  const Result<type, kWide> result{n.weight, n.bias, found.mean, found.rstd};
  auto* y = static_cast<Stored<type>*>(n.y) + row * n.columns;
  int64_t done = 0;
  if constexpr (type == NormType::bf16 && !kWide) done = write_pairs(n, x, y, found);
  for_each(done, n.columns, [&](int64_t i, int64_t count) { store_at<type>(y, i, result(load_at<type>(x, i, count), i, count), count); });
}

template <NormType type>
static void forward_row(const NormForward& n, int64_t row) {
  const Stored<type>* x = static_cast<const Stored<type>*>(n.x) + row * n.x_stride;
  if (n.residual) {
    auto* sum = static_cast<Stored<type>*>(n.new_residual) + row * n.columns;
    if (n.type != type) {
      add_mixed_row(n, row);
    } else {
      const auto* residual = static_cast<const Stored<type>*>(n.residual) + row * n.residual_stride;
      for_each(n.columns, [&](int64_t i, int64_t count) {
        store_at<type>(sum, i, load_at<type>(x, i, count) + load_at<type>(residual, i, count), count);
      });
    }
    x = sum;
  }
  const Statistics found = find_statistics<type>(n, x);
  if (n.mean) n.mean[row] = found.mean;
  if (n.rstd) n.rstd[row] = found.rstd;
  constexpr bool kHalf = type != NormType::f32;
  const MixedRow mixed{n, x, found.mean, found.rstd};
  if (n.codes != NormCodes::none) {
    mixed.write_codes(row);
  } else if (n.type == type && n.weight_type == NormType::f32) {
    write_row<type, true>(n, x, row, found);
  } else if (n.type == type && n.weight_type == type) {
    write_row<type, !kHalf>(n, x, row, found);
  } else {
    mixed.write(row);
  }
}

template <NormType type>
static void forward_rows(const NormForward& n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) forward_row<type>(n, row);
}

void norm_forward_cpu(const NormForward& n, int64_t begin, int64_t end) {
  n.row_type == NormType::f32   ? forward_rows<NormType::f32>(n, begin, end)
  : n.row_type == NormType::f16 ? forward_rows<NormType::f16>(n, begin, end)
                                : forward_rows<NormType::bf16>(n, begin, end);
}

// ---- backward ---------------------------------------------------------------------------------------------------------

template <NormType type, bool kWide>
static void backward_row(const NormBackward& n, int64_t row, float* sum_weight, float* sum_bias) {
  const auto* x = static_cast<const Stored<type>*>(n.x) + row * n.x_stride;
  const auto* grad = static_cast<const Stored<type>*>(n.grad) + row * n.grad_stride;
  const Floats mean = spread(n.centered ? n.mean[row] : 0.0f), rstd = spread(n.rstd[row]);
  const auto scaled = [&](Floats value, int64_t i, int64_t count) {
    return n.weight ? value * load_parameter<type, kWide>(n.weight, i, count) : value;
  };
  const auto unit = [&](int64_t i, int64_t count) { return (load_at<type>(x, i, count) - mean) * rstd; };
  Floats slope = zeros(), level = zeros();
  if (n.grad_x) {
    Sums products, sums;
    for_each_sum(0, n.columns, [&](int64_t i, int64_t count, int k) {
      const Floats value = scaled(load_at<type>(grad, i, count), i, count);
      products.at[k] += value * unit(i, count);
      sums.at[k] += value;
    });
    const float inverse = 1.0f / static_cast<float>(n.columns);
    slope = spread(products.total() * inverse);
    if (n.centered) level = spread(sums.total() * inverse);
  }
  auto* out = static_cast<Stored<type>*>(n.grad_x) + (n.grad_x ? row * n.columns : 0);
  const auto* also = static_cast<const Stored<type>*>(n.grad_residual) + (n.grad_residual ? row * n.grad_residual_stride : 0);
  for_each(n.columns, [&](int64_t i, int64_t count) {
    const Floats value = load_at<type>(grad, i, count), place = unit(i, count);
    if (sum_weight) store_at<NormType::f32>(sum_weight, i, load_at<NormType::f32>(sum_weight, i, count) + value * place, count);
    if (sum_bias) store_at<NormType::f32>(sum_bias, i, load_at<NormType::f32>(sum_bias, i, count) + value, count);
    if (n.grad_x) {
      Floats change = (scaled(value, i, count) - level - place * slope) * rstd;
      if (n.grad_residual) change += load_at<type>(also, i, count);
      store_at<type>(out, i, change, count);
    }
  });
}

template <NormType type, bool kWide>
static void backward_parts(const NormBackward& n, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    float* sum_weight = n.grad_weight ? n.partial + part * n.columns : nullptr;
    float* sum_bias = n.grad_bias ? n.partial + (part + (n.grad_weight ? n.partial_rows : 0)) * n.columns : nullptr;
    if (sum_weight) memset(sum_weight, 0, static_cast<size_t>(n.columns) * 4);
    if (sum_bias) memset(sum_bias, 0, static_cast<size_t>(n.columns) * 4);
    const int64_t last = n.rows * (part + 1) / n.partial_rows;
    for (int64_t row = n.rows * part / n.partial_rows; row < last; ++row) backward_row<type, kWide>(n, row, sum_weight, sum_bias);
  }
}

template <NormType type>
static void backward_of(const NormBackward& n, int64_t begin, int64_t end) {
  n.weight_type == NormType::f32 ? backward_parts<type, true>(n, begin, end) : backward_parts<type, false>(n, begin, end);
}

void norm_backward_cpu(const NormBackward& n, int64_t begin, int64_t end) {
  n.type == NormType::f32   ? backward_parts<NormType::f32, true>(n, begin, end)
  : n.type == NormType::f16 ? backward_of<NormType::f16>(n, begin, end)
                            : backward_of<NormType::bf16>(n, begin, end);
}

/// Columns [begin, end) of the sums' sum.
static void reduce(const float* partial, const NormBackward& n, void* out, NormType type, int64_t begin, int64_t end) {
  float sum[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = least(end - at, kBlock);
    memset(sum, 0, sizeof sum);
    for (int64_t part = 0; part < n.partial_rows; ++part) {
      const float* from = partial + part * n.columns + at;
      for (int64_t i = 0; i < count; ++i) sum[i] += from[i];
    }
    narrow(sum, out, at, count, type);
  }
}

void norm_reduce_cpu(const NormBackward& n, int64_t begin, int64_t end) {
  if (n.grad_weight) reduce(n.partial, n, n.grad_weight, n.weight_type, begin, end);
  if (n.grad_bias) reduce(n.partial + (n.grad_weight ? n.partial_rows * n.columns : 0), n, n.grad_bias, n.bias_type, begin, end);
}

}  // namespace flexops::FLEXOPS_ISA
