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

/// Calls f(index, count) for every register of a row; count is less than kLanes for the last one only.
template <typename F>
static inline void for_each(int64_t columns, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) f(i, int64_t{kLanes});
  if (i < columns) f(i, columns - i);
}
/// The same with the number of a sum, which goes around.
template <typename F>
static inline void for_each_sum(int64_t columns, const F& f) {
  int64_t i = 0;
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

/// What a row's elements become.
struct Result {
  const float *weight, *bias;
  float mean, rstd;
  inline Floats operator()(Floats value, int64_t i, int64_t count) const {
    value = (value - mean) * rstd;
    if (weight) value *= load_at<NormType::f32>(weight, i, count);
    if (bias) value += load_at<NormType::f32>(bias, i, count);
    return value;
  }
};

/// A row on its way into another type; `from` is its first element, of row_type.
struct MixedRow {
  const NormForward& n;
  const void* from;
  Result result;

  [[gnu::noinline]] void make_block(float* block, int64_t begin, int64_t part) const {
    float buffer[kBlock];
    const float* x = widen(from, begin, part, n.row_type, buffer);
    for_each(part, [&](int64_t i, int64_t count) {
      store_at<NormType::f32>(block, i, result(load_at<NormType::f32>(x, i, count), begin + i, count), count);
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

/// In float32 the mean first, then the deviations from it. 16-bit elements take one pass for both, with deviations from the mean of the
/// first few: that it is another mean costs less accuracy than the elements have lost by their rounding.
template <NormType type>
static Statistics find_statistics(const NormForward& n, const Stored<type>* x) {
  const float inverse = 1.0f / static_cast<float>(n.columns);
  Sums sums, squares;
  float center = 0.0f;
  const bool once = type != NormType::f32 && n.centered;
  if (n.centered) {
    const int64_t columns = once ? least(n.columns, kSums * kLanes) : n.columns;
    for_each_sum(columns, [&](int64_t i, int64_t count, int k) { sums.at[k] += load_at<type>(x, i, count); });
    center = sums.total() / static_cast<float>(columns);
  }
  sums = Sums{};
  for_each_sum(n.columns, [&](int64_t i, int64_t count, int k) {
    const Floats value = load_at<type>(x, i, count) - center, kept = count == kLanes ? value : keep(value, count);
    if (type != NormType::f32) sums.at[k] += kept;
    squares.at[k] += kept * kept;
  });
  const float shift = once ? sums.total() * inverse : 0.0f, variance = squares.total() * inverse - shift * shift;
  return {center + shift, 1.0f / square_root((variance < 0.0f ? 0.0f : variance) + n.eps)};
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
  const float mean = found.mean, rstd = found.rstd;
  if (n.mean) n.mean[row] = mean;
  if (n.rstd) n.rstd[row] = rstd;
  const Result result{static_cast<const float*>(n.weight), static_cast<const float*>(n.bias), mean, rstd};
  if (n.type == type && n.codes == NormCodes::none) {
    auto* y = static_cast<Stored<type>*>(n.y) + row * n.columns;
    for_each(n.columns, [&](int64_t i, int64_t count) { store_at<type>(y, i, result(load_at<type>(x, i, count), i, count), count); });
    return;
  }
  const MixedRow mixed{n, x, result};
  n.codes == NormCodes::none ? mixed.write(row) : mixed.write_codes(row);
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

template <NormType type>
static void backward_row(const NormBackward& n, int64_t row, float* sum_weight, float* sum_bias) {
  const auto* x = static_cast<const Stored<type>*>(n.x) + row * n.x_stride;
  const auto* grad = static_cast<const Stored<type>*>(n.grad) + row * n.grad_stride;
  const auto* weight = static_cast<const float*>(n.weight);
  const Floats mean = spread(n.centered ? n.mean[row] : 0.0f), rstd = spread(n.rstd[row]);
  const auto scaled = [&](Floats value, int64_t i, int64_t count) {
    return weight ? value * load_at<NormType::f32>(weight, i, count) : value;
  };
  const auto unit = [&](int64_t i, int64_t count) { return (load_at<type>(x, i, count) - mean) * rstd; };
  Floats slope = zeros(), level = zeros();
  if (n.grad_x) {
    Sums products, sums;
    for_each_sum(n.columns, [&](int64_t i, int64_t count, int k) {
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

template <NormType type>
static void backward_parts(const NormBackward& n, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    float* sum_weight = n.grad_weight ? n.partial + part * n.columns : nullptr;
    float* sum_bias = n.grad_bias ? n.partial + (part + (n.grad_weight ? n.partial_rows : 0)) * n.columns : nullptr;
    if (sum_weight) memset(sum_weight, 0, static_cast<size_t>(n.columns) * 4);
    if (sum_bias) memset(sum_bias, 0, static_cast<size_t>(n.columns) * 4);
    const int64_t last = n.rows * (part + 1) / n.partial_rows;
    for (int64_t row = n.rows * part / n.partial_rows; row < last; ++row) backward_row<type>(n, row, sum_weight, sum_bias);
  }
}

void norm_backward_cpu(const NormBackward& n, int64_t begin, int64_t end) {
  n.type == NormType::f32   ? backward_parts<NormType::f32>(n, begin, end)
  : n.type == NormType::f16 ? backward_parts<NormType::f16>(n, begin, end)
                            : backward_parts<NormType::bf16>(n, begin, end);
}

static void reduce(const float* partial, int64_t parts, int64_t columns, float* out, int64_t begin, int64_t end) {
  memset(out + begin, 0, static_cast<size_t>(end - begin) * 4);
  for (int64_t part = 0; part < parts; ++part) {
    const float* from = partial + part * columns;
    for (int64_t i = begin; i < end; ++i) out[i] += from[i];
  }
}

void norm_reduce_cpu(const NormBackward& n, int64_t begin, int64_t end) {
  if (n.grad_weight) reduce(n.partial, n.partial_rows, n.columns, static_cast<float*>(n.grad_weight), begin, end);
  if (n.grad_bias) {
    const float* partial = n.partial + (n.grad_weight ? n.partial_rows * n.columns : 0);
    reduce(partial, n.partial_rows, n.columns, static_cast<float*>(n.grad_bias), begin, end);
  }
}

}  // namespace flexops::FLEXOPS_ISA
