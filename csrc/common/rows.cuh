// Rows that are read 16 bytes at a time, whatever their length and alignment; for kernels that reduce rows.
//
// A row is cut into vectors at multiples of 16 bytes, so vector 0 of a row that does not start at one begins `head` elements before the
// row. Vectors that stick out of the row, at either end, are read whole and written element by element.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace flexops::rows {

enum Type : u8 { kF32 = 0, kF16 = 1, kBf16 = 2 };

template <Type type>
struct ElementOf {
  using type_ = float;
};
template <>
struct ElementOf<kF16> {
  using type_ = f16;
};
template <>
struct ElementOf<kBf16> {
  using type_ = bf16;
};
template <Type type>
using Element = typename ElementOf<type>::type_;

/// Elements of a vector.
template <Type type>
inline constexpr int kVector = type == kF32 ? 4 : 8;

using Packed = Vec<u32, 4>;

inline constexpr int kNarrowWarp = 32;  // lanes that share a row, at most; a wavefront of 64 holds two such groups

FLEXOPS_DEVICE float infinity() { return bit_cast<float>(0x7f800000u); }
FLEXOPS_DEVICE float not_a_number() { return bit_cast<float>(0x7fc00000u); }

/// 2 to the power of `value`, with a relative error of 2^-22; results below 2^-126 are 0.
FLEXOPS_DEVICE float quick_exp2(float value) {
#if FLEXOPS_HIP
  return exp2f(value);
#else
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
#endif
}

template <Type type>
FLEXOPS_DEVICE void widen(float* out, const Packed& in) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (type == kF32) {
      out[w] = bit_cast<float>(in.at[w]);
    } else if constexpr (type == kBf16) {
      out[2 * w] = bit_cast<float>(in.at[w] << 16);
      out[2 * w + 1] = bit_cast<float>(in.at[w] & 0xffff0000u);
    } else {
      out[2 * w] = to_float(f16{static_cast<u16>(in.at[w])});
      out[2 * w + 1] = to_float(f16{static_cast<u16>(in.at[w] >> 16)});
    }
  }
}

template <Type type>
FLEXOPS_DEVICE Packed narrow(const float* in) {
  Packed out;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (type == kF32) {
      out.at[w] = bit_cast<u32>(in[w]);
    } else {
      out.at[w] = pack2<Element<type>>(in[2 * w], in[2 * w + 1]);
    }
  }
  return out;
}

/// Elements between the last multiple of 16 bytes and `row`.
template <Type type>
FLEXOPS_DEVICE int head_of(const Element<type>* row) {
  return static_cast<int>(reinterpret_cast<u64>(row) & 15) / static_cast<int>(sizeof(Element<type>));
}

/// Elements [at, at + kVector) of a row, which start at a multiple of 16 bytes; at least one of them must be in the row. Those outside are
/// read all the same, because 16 aligned bytes lie in one allocation if one of them does, and must be ignored.
template <Type type, Cache cache>
FLEXOPS_DEVICE Packed load_vector(const Element<type>* row, int at) {
  return load<cache>(reinterpret_cast<const Packed*>(row + at));
}

/// Writes those of the elements [at, at + kVector) that are in the row, of `length`.
template <Type type, Cache cache>
FLEXOPS_DEVICE void store_vector(Element<type>* row, int at, int length, const Packed& value) {
  constexpr int N = kVector<type>;
  if (at >= 0 && at + N <= length) {
    store<cache>(reinterpret_cast<Packed*>(row + at), value);
    return;
  }
  constexpr int kPerWord = N / 4, kBits = 32 / kPerWord;
#pragma unroll 1
  for (int i = at < 0 ? -at : 0; i < N && at + i < length; ++i) {
    const u32 low = i < N / 2 ? value.at[0] : value.at[2], high = i < N / 2 ? value.at[1] : value.at[3];
    const u32 word = i / kPerWord % 2 ? high : low;
    if constexpr (type == kF32) {
      row[at + i] = bit_cast<float>(word);
    } else {
      row[at + i] = Element<type>{static_cast<u16>(word >> (i % kPerWord * kBits))};
    }
  }
}

/// Sum (greatest) of N values as a tree: chains of dependent operations would leave a processor with few warps idle.
template <int N>
FLEXOPS_DEVICE float sum_tree(const float* values) {
  if constexpr (N == 1) return values[0];
  if constexpr (N > 1) return sum_tree<N / 2>(values) + sum_tree<N - N / 2>(values + N / 2);
}
template <int N>
FLEXOPS_DEVICE float max_tree(const float* values) {
  if constexpr (N == 1) return values[0];
  if constexpr (N > 1) return fmaxf(max_tree<N / 2>(values), max_tree<N - N / 2>(values + N / 2));
}

/// Over `lanes` threads: neighbours of a warp (a power of two up to 32), or the whole block. `shared` holds a value for every 32 threads;
/// between two uses of it there must be a __syncthreads() if the block is one group.
template <typename T, typename Op>
FLEXOPS_DEVICE T group_reduce(T value, Op op, T neutral, int lanes, T* shared) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask /= 2)
    value = op(value, shuffle_xor(value, mask, kNarrowWarp));
  if (lanes <= kNarrowWarp) return value;
  const int lane = threadIdx.x % kNarrowWarp, groups = lanes / kNarrowWarp;
  if (lane == 0) shared[threadIdx.x / kNarrowWarp] = value;
  __syncthreads();
  value = lane < groups ? shared[lane] : neutral;
#pragma unroll
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask, kNarrowWarp));
  return value;
}

}  // namespace flexops::rows
