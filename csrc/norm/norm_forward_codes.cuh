// RMS norm's kernel for codes.
#pragma once

#include "norm/norm_codes.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// The greater of a, which is not negative, and |b|; NaN if either is.
FLEXOPS_DEVICE float greater_magnitude(float a, float b) {
#if FLEXOPS_HAS_MIN2
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(fabsf(b)));
  return out;
#else
  const u32 left = bit_cast<u32>(a),
            right = bit_cast<u32>(b) & 0x7fffffffu;  // NaN is above infinity
  return bit_cast<float>(left < right ? right : left);
#endif
}

/// Of a float's bits in the low word, and what MaxBits takes in the high one.
struct SumAndLargest {
  FLEXOPS_DEVICE u64 operator()(u64 a, u64 b) const {
    const float sum = bit_cast<float>(static_cast<u32>(a)) + bit_cast<float>(static_cast<u32>(b));
    return u64(MaxBits{}(static_cast<u32>(a >> 32), static_cast<u32>(b >> 32))) << 32 |
           bit_cast<u32>(sum);
  }
};

/// Loads before it are not put off until registers are free, nor is the weight fetched in their
/// place.
FLEXOPS_DEVICE void keep_loads_apart() {
#if !FLEXOPS_HIP
  __syncwarp();
#endif
}

/// Where a thread's vectors of a row are: `first`, first + step, ...
struct Stride {
  int first, step;
  FLEXOPS_DEVICE int at(int k) const { return first + k * step; }
};

/// Calls f(x, x * weight, vector) for each of the first kOnce vectors in registers, and for zeros
/// in place of those that a row has not: without branches, the weight is fetched ahead. The cache
/// is for the weight. `begin` is the first vector's number.
template <typename T, Cache cache, int kOnce, int N, typename F>
FLEXOPS_DEVICE void for_each_product(const Forward& p, const Stride& s, const Packed (&raw)[N],
                                     int begin, int count, const F& f) {
  constexpr int V = kPerVector<T>;
#pragma unroll
  for (int k = 0; k < kOnce; ++k) {
    const int at = s.at(begin + k);
    Packed weight = {};
    if (at < count) weight = read<T, cache>(p.weight, at * V);
    float x[V], v[V];
    widen<T>(x, raw[k]);
    widen<T>(v, weight);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] *= x[i];
    f(x, v, at);
  }
}

/// The code is not written out for each vector: they move up, and a few at a time are the first.
template <typename T, int N>
FLEXOPS_DEVICE void write_codes(const Forward& p, const Stride& s, Packed (&raw)[N], int count,
                                float factor, u8* to) {
  constexpr int kOnce = N < 4 ? N : 4;
#pragma unroll 1
  for (int begin = 0; begin < N; begin += kOnce) {
    for_each_product<T, Cache::constant, kOnce>(
        p, s, raw, begin, count,
        [&](const float (&)[kPerVector<T>], const float (&v)[kPerVector<T>], int at) {
          if (at < count)
            p.codes == Dtype::i8 ? store_codes<i8>(v, factor, to + at * kPerVector<T>)
                                 : store_codes<e4m3>(v, factor, to + at * kPerVector<T>);
        });
#pragma unroll
    for (int k = kOnce; k < N; ++k) raw[k - kOnce] = raw[k];
  }
}

/// Calls f(x * rstd * weight, vector) for each vector of a row, which is read again, to spare
/// registers.
template <typename T, typename F>
FLEXOPS_DEVICE void for_each_result(const Forward& p, const Group& g, i64 row, int count,
                                    float rstd, const F& f) {
  constexpr int V = kPerVector<T>;
  const T* from = p.residual ? static_cast<const T*>(p.new_residual) + row * p.columns
                             : static_cast<const T*>(p.x) + row * p.x_stride;
#pragma unroll 1
  for (int i = g.lane; i < count; i += g.lanes) {
    float v[V], w[V];
    widen<T>(v, read<T, Cache::normal>(from, i * V));
    widen<T>(w, read<T, Cache::constant>(p.weight, i * V));
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = v[e] * rstd * w[e];
    f(v, i);
  }
}

/// RMS norm's codes, where all is of T, with a weight, and registers hold whole rows. The largest
/// |x * weight| is found together with the sum of squares, and rstd times that is the largest
/// result; unless it came near the ends of what a float can tell, and is looked for anew.
/// Arithmetic decides as much as memory does. kManyItems: for groups of whole warps, of which each
/// but the last has all its vectors.
template <typename T, int kHeld>
__global__ void __launch_bounds__(kHeldThreads, 2)
    forward_codes(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kPerVector<T>;
  constexpr bool kWarps = kHeld == kManyItems;
  constexpr u32 kLeastUsual = 0x1f800000u, kMostUsual = 0x5f800000u;  // 2^-64, 2^64
  constexpr float kLeastTotal = 1e-20f, kMostTotal = 1e20f;
  __shared__ Partial<u64, 1> shared;
  __shared__ Partial<u32, 1> shared_largest;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  // Whole warps have their vectors together, at distances known when compiling.
  const Stride s = {
      kWarps ? g.lane / kNarrowWarp * (kNarrowWarp * kHeld) + g.lane % kNarrowWarp : g.lane,
      kWarps ? kNarrowWarp : g.lanes};
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  // Load the row into registers, with the residual added.
  Packed raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    raw[k] = Packed{};
    if (s.at(k) < count) raw[k] = read<T, Cache::normal>(x, s.at(k) * V);
  }
  keep_loads_apart();
  // Asking the cache to keep what is read does not pay where less is written than read.
  if (p.residual) add_residual<T>(raw, p, s.first, s.step, row, count, L2Policy(false));

  // Reduce to the sum of squares and the largest product with the weight at once.
  float sums[4] = {}, most[2] = {};
  for_each_product<T, Cache::normal, kHeld>(
      p, s, raw, 0, count, [&](const float (&x)[V], const float (&v)[V], int) {
#pragma unroll
        for (int i = 0; i < V; ++i)
          sums[i % 4] = fmaf(x[i], x[i], sums[i % 4]),
                   most[i % 2] = greater_magnitude(most[i % 2], v[i]);
      });
  forget<T>(raw, p.nothing);
  u64 both[1] = {u64(bit_cast<u32>(greater_magnitude(most[0], most[1]))) << 32 |
                 bit_cast<u32>(sum_of(sums))};
  group_reduce<true>(both, SumAndLargest{}, g, shared);
  const u32 product = static_cast<u32>(both[0] >> 32);
  const float total = bit_cast<float>(static_cast<u32>(both[0])),
              rstd = reciprocal_root(total * p.inverse + p.eps);
  u8* to = static_cast<u8*>(p.y) + row * p.columns;
  const bool publishes = g.lane == 0 && row < p.rows;
  // All lanes of a warp take the same way, because they meet again in group_reduce.
  u32 unusual =
      product < kLeastUsual || product > kMostUsual || !(total > kLeastTotal && total < kMostTotal);
  for (int mask = kNarrowWarp / 2; mask > 0 && !g.wide; mask /= 2)
    unusual |= shuffle_xor(unusual, mask, kNarrowWarp);
  if (!unusual) {
    // rstd is in the scale alone: it cancels out of the codes.
    const float top = top_of(p.codes), largest = bit_cast<float>(product),
                factor = __fdividef(top, largest);
    if (publishes) p.scales[row] = largest * rstd * (1.0f / top);
    write_codes<T>(p, s, raw, count, factor, to);
    return;
  }
  // Otherwise reduce once more, to the largest result, and then write.
  u32 largest[1] = {0};
  for_each_result<T>(p, g, row, count, rstd,
                     [&](const float (&v)[V], int) { find_largest(largest[0], v); });
  group_reduce<true>(largest, MaxBits{}, g, shared_largest);
  const Coding coding(largest[0], p.codes);
  if (publishes) p.scales[row] = coding.scale;
  for_each_result<T>(p, g, row, count, rstd,
                     [&](float (&v)[V], int i) { coding.write(v, to + i * V, p.codes); });
}

}  // namespace flexops::norm
