// From elements to scales and codes. What is read and in which ways: see fp8.cuh.
#pragma once

#include "fp8/fp8.cuh"

namespace flexops::scaled {

/// The elements of a vector; zeros if it is missing. Others may be among them: see trim().
template <typename T>
FLEXOPS_DEVICE Packed read(const Span<T>& s, int vector) {
  Packed out = {};
  if (s.has(vector)) out = load_vector<T, kLoads>(s.elements, vector * kPerVector<T>);
  return out;
}

/// Puts zeros in place of elements that do not count. Not part of reading, because it waits for
/// what was read.
template <typename T>
FLEXOPS_DEVICE void trim(Packed& data, const Span<T>& s, int vector) {
  constexpr int N = kPerVector<T>;
  if (!s.ragged) return;
  const int first = s.first - vector * N, last = s.last - vector * N;
  if (first <= 0 && last >= N) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first <= i && i < last) continue;
    data.at[i * 4 / N] &= kIsFloat<T> ? 0u : i % 2 ? 0x0000ffffu : 0xffff0000u;
  }
}

// Magnitudes are compared as their bits: those of a NaN are greater than infinity's, and these than
// all others.

/// The greater of each half of two words that hold magnitudes of 16 bits; of 32 bits, the greater
/// one.
template <typename T>
FLEXOPS_DEVICE u32 greater_of(u32 a, u32 b) {
  if constexpr (kIsFloat<T>) return Max()(a, b);
#if FLEXOPS_HAS_MIN2
  // For float16 too: what bfloat16 takes for a NaN is one, and of a NaN this makes another; all
  // else has the order of the bits.
  if constexpr (!kIsFloat<T>) return max2<bf16>(a, b);
#endif
  return Max()(a & 0xffffu, b & 0xffffu) | (Max()(a >> 16, b >> 16) << 16);
}
/// `largest`, which is 0 at first, and what is greater in a vector.
template <typename T>
FLEXOPS_DEVICE u32 add_largest(u32 largest, const Packed& in) {
  constexpr u32 kMagnitude = kIsFloat<T> ? 0x7fffffffu : 0x7fff7fffu;
  const u32 low = greater_of<T>(in.at[0] & kMagnitude, in.at[1] & kMagnitude),
            high = greater_of<T>(in.at[2] & kMagnitude, in.at[3] & kMagnitude);
  return greater_of<T>(largest, greater_of<T>(low, high));
}
/// The bits of the largest magnitude of all.
template <typename T>
FLEXOPS_DEVICE u32 one_of(u32 largest) {
  return kIsFloat<T> ? largest : Max()(largest & 0xffffu, largest >> 16);
}
/// The same as float32's bits.
template <typename T>
FLEXOPS_DEVICE u32 widen_bits(u32 largest) {
  if constexpr (kIsFloat<T>) {
    return largest;
  } else {
    return bit_cast<u32>(half_of<T>(largest, 0));
  }
}

/// What a segment's elements are multiplied by. If the segment is broken, the scale is NaN and the
/// codes are 0.
struct Scaling {
  float scale, inverse;
  u32 keep;

  static FLEXOPS_DEVICE Scaling of_largest(u32 bits, Dtype code) {
    const float most = code == Dtype::e4m3   ? kLargest<e4m3>
                       : code == Dtype::e5m2 ? kLargest<e5m2>
                                             : kLargest<i8>;
    Scaling out;
    out.keep = bits < 0x7f800000u ? ~0u : 0u;
    out.scale = fmaxf(__fdiv_rn(bit_cast<float>(bits), most), bit_cast<float>(0x00800000u));
    if (bits == 0) out.scale = 1.0f;
    out.inverse = __frcp_rn(out.scale);
    if (!out.keep) out.scale = not_a_number();
    return out;
  }
};

template <typename A, typename B>
inline constexpr bool is_same = false;
template <typename A>
inline constexpr bool is_same<A, A> = true;

template <typename T, int N>
FLEXOPS_DEVICE void pack(Vec<u32, N / 4>& out, const float (&value)[N]) {
#pragma unroll
  for (int w = 0; w < N / 4; ++w) {
    const float* v = value + 4 * w;
    // A scale that follows from the elements lets none of them become more than 127.
    out.at[w] =
        is_same<T, i8> ? pack4_within(v[0], v[1], v[2], v[3]) : pack4<T>(v[0], v[1], v[2], v[3]);
  }
}

template <typename T>
FLEXOPS_DEVICE Codes<T> encode(const Packed& in, float inverse, u32 keep, const Params& p) {
  constexpr int N = kPerVector<T>;
  float value[N];
  Codes<T> out;
  widen<T>(value, in);
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = __fmul_rn(value[i], inverse);
  if (p.code == Dtype::e4m3) {
    pack<e4m3>(out, value);
  } else if (p.code == Dtype::e5m2) {
    pack<e5m2>(out, value);
  } else {
    pack<i8>(out, value);
  }
#pragma unroll
  for (int w = 0; w < N / 4; ++w) out.at[w] &= keep;
  return out;
}

/// Writes a vector's codes.
template <typename T>
FLEXOPS_DEVICE void write_codes(const Params& p, const Span<T>& s, int vector, const Packed& in,
                                float inverse, u32 keep) {
  constexpr int N = kPerVector<T>;
  const int at = vector * N;
  if (at >= s.last) return;
  const Codes<T> words = encode<T>(in, inverse, keep, p);
  u8* out = static_cast<u8*>(p.out) + s.codes + at;
  if (p.aligned && (!s.ragged || (at >= s.first && at + N <= s.last))) {
    store<kStores>(reinterpret_cast<Codes<T>*>(out), words);
  } else {
#pragma unroll 1
    for (int i = at < s.first ? s.first - at : 0; i < N && at + i < s.last; ++i) {
      out[i] = static_cast<u8>((i < 4 ? words.at[0] : words.at[N / 4 - 1]) >> (i % 4 * 8));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) quantize_groups(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int K = kGroupVectors;
  const int lane = threadIdx.x % kNarrowWarp;
  const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x - lane) * K + lane,
            total = p.total << p.log_lanes;
  // Load.
  Packed data[K];
  u32 largest[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const i64 vector = first + k * kNarrowWarp;
    data[k] = {};
    if (vector < total) data[k] = load<kLoads>(static_cast<const Packed*>(p.in) + vector);
  }
  // Reduce each group to its largest magnitude.
#pragma unroll
  for (int k = 0; k < K; ++k) largest[k] = one_of<T>(add_largest<T>(0, data[k]));
  for (int mask = p.lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      largest[k] = Max()(largest[k], shuffle_xor(largest[k], mask, kNarrowWarp));
  }
  // Of K neighbouring lanes, which share their segments, each works out the scale of one, and hands
  // it to the others.
  const int own = lane % K;
  u32 mine = largest[0];
#pragma unroll
  for (int k = 1; k < K; ++k) mine = own == k ? largest[k] : mine;
  const Scaling scaling = Scaling::of_largest(widen_bits<T>(mine), p.code);
  const i64 vector = first + own * kNarrowWarp;
  if ((lane & (p.lanes - 1)) < K && vector < total) p.scales[vector >> p.log_lanes] = scaling.scale;
  // Hand the scales round, encode and write.
  const float inverse = scaling.keep ? scaling.inverse : not_a_number();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const float its = shuffle(inverse, lane - own + k, kNarrowWarp);
    const i64 to = first + k * kNarrowWarp;
    const Codes<T> words = encode<T>(data[k], its, its == its ? ~0u : 0u, p);
    if (to < total) store<kStores>(static_cast<Codes<T>*>(p.out) + to, words);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) quantize_short(const FLEXOPS_GRID_CONSTANT Params p) {
  // Load several segments.
  Span<T> span[kShortVectors];
  Packed data[kShortVectors];
  u32 largest[kShortVectors];
  const int vector = threadIdx.x & (p.lanes - 1);
#pragma unroll
  for (int k = 0; k < kShortVectors; ++k) {
    const i64 index = short_segment(p, k);
    span[k] = find_span<T>(p, p.in, p.row_stride, index < p.total ? index : 0, 0, kNarrowWarp);
    if (index >= p.total) span[k].last = 0;
    data[k] = read(span[k], vector);
  }
  // Reduce each to its largest magnitude.
#pragma unroll
  for (int k = 0; k < kShortVectors; ++k) {
    trim(data[k], span[k], vector);
    largest[k] = one_of<T>(add_largest<T>(0, data[k]));
  }
  for (int mask = p.lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int k = 0; k < kShortVectors; ++k)
      largest[k] = Max()(largest[k], shuffle_xor(largest[k], mask, kNarrowWarp));
  }
  // Write scales and codes.
#pragma unroll
  for (int k = 0; k < kShortVectors; ++k) {
    const Scaling scaling = Scaling::of_largest(widen_bits<T>(largest[k]), p.code);
    const i64 index = short_segment(p, k);
    if (vector == 0 && index < p.total) p.scales[index] = scaling.scale;
    write_codes(p, span[k], vector, data[k], scaling.inverse, scaling.keep);
  }
}

/// A block for each segment. Two kernels for 16 bits, because fewer threads may use more registers;
/// float32 gains nothing by a second one.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kWide ? kWideThreads : kThreads, kWide ? 1 : kLongBlocks)
    quantize_long(const FLEXOPS_GRID_CONSTANT Params p) {
  __shared__ u32 shared[kWideThreads / kNarrowWarp];
  const i64 index = blockIdx.x;
  const Span<T> span = find_span<T>(p, p.in, p.row_stride, index, 0, 0x7fffffff / kPerVector<T>);
  const int threads = static_cast<int>(blockDim.x), step = threads * kLongVectors,
            vectors = span.vectors();
  Packed data[kLongVectors];
  const auto read_all = [&](int from) {
#pragma unroll
    for (int k = 0; k < kLongVectors; ++k) data[k] = read(span, from + k * threads);
  };
  // First pass: reduce the segment to its largest magnitude.
  u32 largest = 0;
  int from = threadIdx.x;
  do {
    read_all(from);
#pragma unroll
    for (int k = 0; k < kLongVectors; ++k) {
      trim(data[k], span, from + k * threads);
      largest = add_largest<T>(largest, data[k]);
    }
    from += step;
  } while (kWide && from < vectors);
  largest = group_reduce(one_of<T>(largest), Max(), 0u, threads, shared);
  // Write the scale.
  const Scaling scaling = Scaling::of_largest(widen_bits<T>(largest), p.code);
  if (threadIdx.x == 0) p.scales[index] = scaling.scale;
  // Second pass: write the codes, of what is in registers still if that is all.
  from = threadIdx.x;
  do {
    if (kWide && vectors > step) read_all(from);
#pragma unroll
    for (int k = 0; k < kLongVectors; ++k)
      write_codes(p, span, from + k * threads, data[k], scaling.inverse, scaling.keep);
    from += step;
  } while (kWide && from < vectors);
}

/// Raises *p.largest to the largest magnitude of one chunk, of a single segment. Whole numbers, so
/// their order does not matter.
template <typename T>
__global__ void __launch_bounds__(kThreads) find_largest(const FLEXOPS_GRID_CONSTANT Params p) {
  __shared__ u32 shared[kThreads / kNarrowWarp];
  const Span<T> span = find_span<T>(p, p.in, p.row_stride, 0, blockIdx.x, kChunk);
  // Load the chunk.
  Packed data[kChunkVectors];
#pragma unroll
  for (int k = 0; k < kChunkVectors; ++k) data[k] = read(span, k * kThreads + threadIdx.x);
  // Reduce it to its largest magnitude.
  u32 largest = 0;
#pragma unroll
  for (int k = 0; k < kChunkVectors; ++k) {
    trim(data[k], span, k * kThreads + threadIdx.x);
    largest = add_largest<T>(largest, data[k]);
  }
  largest = widen_bits<T>(group_reduce(one_of<T>(largest), Max(), 0u, kThreads, shared));
  // Few blocks find more than all before them: asking first spares the others the wait for one
  // another.
  if (threadIdx.x == 0 && largest > *static_cast<volatile u32*>(p.largest))
    atomicMax(p.largest, largest);
}

/// Codes of one chunk of a single segment, whose scale is given or follows from *p.largest.
/// Backwards, because of what was read last the cache still holds some.
template <typename T>
__global__ void __launch_bounds__(kThreads) cast_chunk(const FLEXOPS_GRID_CONSTANT Params p) {
  const Span<T> span = find_span<T>(p, p.in, p.row_stride, 0, gridDim.x - 1 - blockIdx.x, kChunk);
  // Load the chunk; the last one first, which caches hold still.
  Packed data[kChunkVectors];
#pragma unroll
  for (int k = 0; k < kChunkVectors; ++k) data[k] = read(span, k * kThreads + threadIdx.x);
  // The scale, from the largest magnitude or given.
  Scaling scaling = {0.0f, 0.0f, ~0u};
  if (p.largest) {
    scaling = Scaling::of_largest(*p.largest, p.code);
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scales = scaling.scale;
  } else {
    scaling.inverse = __frcp_rn(*p.scales);
  }
  // Encode and write.
#pragma unroll
  for (int k = 0; k < kChunkVectors; ++k)
    write_codes(p, span, k * kThreads + threadIdx.x, data[k], scaling.inverse, scaling.keep);
}

}  // namespace flexops::scaled
