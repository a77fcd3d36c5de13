// Rows that are read 16 bytes at a time, whatever their length and alignment; for kernels that
// reduce rows.
//
// A row is cut into vectors at multiples of 16 bytes, so vector 0 of a row that does not start at
// one begins `head` elements before the row. Vectors that stick out of the row, at either end, are
// read whole and written element by element.
#pragma once

#include "common/device.cuh"
#include "common/elements.cuh"
#include "common/reduce.cuh"

namespace flexops::rows {

/// The elements of a vector, as words.
using Packed = Vec<u32, 4>;

template <typename T>
inline constexpr bool kIsFloat = sizeof(T) == 4;

inline constexpr int kNarrowWarp =
    32;  // lanes that share a row, at most; a wavefront of 64 holds two such groups

template <typename T, int W>
FLEXOPS_DEVICE void widen(float* out, const Vec<u32, W>& in) {
  constexpr int N = W * 4 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (kIsFloat<T>) {
      out[i] = bit_cast<float>(in.at[i]);
    } else {
      out[i] = half_of<T>(in.at[i / 2], i % 2);
    }
  }
}

/// Numbers rounded to T, W words of them.
template <typename T, int W = 4>
FLEXOPS_DEVICE Vec<u32, W> packed(const float* in) {
  Vec<u32, W> out;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    if constexpr (kIsFloat<T>) {
      out.at[w] = bit_cast<u32>(in[w]);
    } else {
      out.at[w] = pack2<T>(in[2 * w], in[2 * w + 1]);
    }
  }
  return out;
}

/// Elements between the last multiple of 16 bytes and `row`.
template <typename T>
FLEXOPS_DEVICE int head_of(const T* row) {
  return static_cast<int>(reinterpret_cast<u64>(row) & 15) / static_cast<int>(sizeof(T));
}

/// Elements [at, at + kVector) of a row, which start at a multiple of 16 bytes; at least one of
/// them must be in the row. Those outside are read all the same, because 16 aligned bytes lie in
/// one allocation if one of them does, and must be ignored.
template <typename T, Cache cache>
FLEXOPS_DEVICE Packed load_vector(const T* row, int at) {
  return load<cache>(reinterpret_cast<const Packed*>(row + at));
}

/// Writes those of the elements [at, at + kVector) that are in the row, of `length`.
template <typename T, Cache cache>
FLEXOPS_DEVICE void store_vector(T* row, int at, int length, const Packed& value) {
  constexpr int N = kPerVector<T>;
  if (at >= 0 && at + N <= length) {
    store<cache>(reinterpret_cast<Packed*>(row + at), value);
    return;
  }
  constexpr int kPerWord = N / 4, kBits = 32 / kPerWord;
#pragma unroll 1
  for (int i = at < 0 ? -at : 0; i < N && at + i < length; ++i) {
    const u32 low = i < N / 2 ? value.at[0] : value.at[2],
              high = i < N / 2 ? value.at[1] : value.at[3];
    const u32 word = i / kPerWord % 2 ? high : low;
    if constexpr (kIsFloat<T>) {
      row[at + i] = bit_cast<float>(word);
    } else {
      row[at + i] = T{static_cast<u16>(word >> (i % kPerWord * kBits))};
    }
  }
}

/// Sum (greatest) of N values as a tree: chains of dependent operations would leave a processor
/// with few warps idle.
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

/// Over `lanes` threads: neighbours of a warp (a power of two up to 32), or the whole block.
/// `shared` holds a value for every 32 threads; between two uses of it there must be a
/// __syncthreads() if the block is one group.
template <typename T, typename Op>
FLEXOPS_DEVICE T group_reduce(T value, Op op, T neutral, int lanes, T* shared) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask /= 2)
    value = op(value, shuffle_xor(value, mask, kNarrowWarp));
  if (lanes <= kNarrowWarp) return value;
  const int lane = threadIdx.x % kNarrowWarp, groups = lanes / kNarrowWarp;
  if (lane == 0) shared[threadIdx.x / kNarrowWarp] = value;
  __syncthreads();
  return warp_reduce<kNarrowWarp>(lane < groups ? shared[lane] : neutral, op);
}

}  // namespace flexops::rows
