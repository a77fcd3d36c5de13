// From scales and codes to elements: the segments of `short`, and chunks of longer ones.
#pragma once

#include "common/once.cuh"
#include "fp8/fp8.cuh"

namespace flexops::scaled {

/// A vector's codes, in order; those that do not count may be anything.
template <typename T>
FLEXOPS_DEVICE Codes<T> read_codes(const Params& p, const Span<T>& s, int vector) {
  Codes<T> out = {};
  if (s.has(vector))
    out = load_once(reinterpret_cast<const Codes<T>*>(static_cast<const u8*>(p.in) + s.codes) +
                    vector);
  return out;
}

/// The same, wherever they lie.
template <typename T>
FLEXOPS_DEVICE Codes<T> read_scattered_codes(const Params& p, const Span<T>& s, int vector) {
  constexpr int N = kPerVector<T>;
  Codes<T> out = {};
  const int at = vector * N;
#pragma unroll 1
  for (int i = at < s.first ? s.first - at : 0; i < N && at + i < s.last; ++i) {
    const u32 code = static_cast<u32>(static_cast<const u8*>(p.in)[s.codes + at + i])
                     << (i % 4 * 8);
    if (i < 4) {
      out.at[0] |= code;
    } else {
      out.at[N / 4 - 1] |= code;
    }
  }
  return out;
}

template <typename T, int N>
FLEXOPS_DEVICE void unpack(float (&value)[N], const Vec<u32, N / 4>& words) {
#pragma unroll
  for (int w = 0; w < N / 4; ++w) {
    float four[4];
    unpack4<T>(four, words.at[w]);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[4 * w + i] = four[i];
  }
}

template <typename T>
FLEXOPS_DEVICE void write_values(const Params& p, const Span<T>& s, int vector,
                                 const Codes<T>& words, float scale) {
  constexpr int N = kPerVector<T>;
  if (!s.has(vector)) return;
  float value[N];
  if (p.code == Dtype::e4m3) {
    unpack<e4m3>(value, words);
  } else if (p.code == Dtype::e5m2) {
    unpack<e5m2>(value, words);
  } else {
    unpack<i8>(value, words);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = __fmul_rn(value[i], scale);
  auto* out = const_cast<T*>(s.elements);
  store_vector<T, kStores>(out + s.first, vector * N - s.first, s.last - s.first, packed<T>(value));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) dequantize_short(const FLEXOPS_GRID_CONSTANT Params p) {
  // Load codes and scales of several segments.
  Span<T> span[kShortVectors];
  Codes<T> words[kShortVectors];
  float scale[kShortVectors];
  const int vector = threadIdx.x & (p.lanes - 1);
#pragma unroll
  for (int k = 0; k < kShortVectors; ++k) {
    const i64 index = short_segment(p, k);
    span[k] = find_span<T>(p, p.out, p.length, index < p.total ? index : 0, 0, kNarrowWarp);
    if (index >= p.total) span[k].last = 0;
    words[k] =
        p.aligned ? read_codes(p, span[k], vector) : read_scattered_codes(p, span[k], vector);
    scale[k] = p.scales[index < p.total ? index : 0];
  }
  // Decode and write.
#pragma unroll
  for (int k = 0; k < kShortVectors; ++k) write_values(p, span[k], vector, words[k], scale[k]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) dequantize_chunk(const FLEXOPS_GRID_CONSTANT Params p) {
  u32 chunk;
  const u32 index = divide(blockIdx.x, p.chunks, chunk);
  const Span<T> span = find_span<T>(p, p.out, p.length, index, chunk, kChunk);
  // Load the chunk's codes and its scale.
  Codes<T> words[kChunkVectors];
#pragma unroll
  for (int k = 0; k < kChunkVectors; ++k) {
    const int vector = k * kThreads + threadIdx.x;
    words[k] = p.aligned ? read_codes(p, span, vector) : read_scattered_codes(p, span, vector);
  }
  const float scale = p.scales[index];
  // Decode and write.
#pragma unroll
  for (int k = 0; k < kChunkVectors; ++k)
    write_values(p, span, k * kThreads + threadIdx.x, words[k], scale);
}

}  // namespace flexops::scaled
