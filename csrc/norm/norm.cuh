// The norms' kernels. Formulas: flexops/ops/norm.py.
//
// Memory decides. Up to 32 neighbouring lanes share a short row, a block has a long one. Forward:
// registers hold rows between their sums and their results, and few of them, so that while some
// blocks wait for a reduction enough others have loads on their way. The second-level cache is
// asked to keep what is read of large tensors (see L2Policy), which was worth 3 % on an H200, also
// where every call had other tensors. Backward: blocks walk over the rows with the next ones
// already on their way to shared memory. A thread has the same columns of every row, whose sums for
// the parameters' gradients stay in its registers; a second kernel adds up what the blocks have. No
// atomics: the same bits every time. On GPUs with clusters, the blocks of one share rows that are
// too long for a block (forward in bf16). The rest (few rows, rows that are very long or not made
// of aligned 16-byte vectors, mixed types) takes simpler kernels: forward these hold a row in
// shared memory and read again what that does not hold, backward they read twice.
#pragma once

#include "common/async.cuh"
#include "common/rows.cuh"

namespace flexops::norm {

using rows::kIsFloat, rows::kNarrowWarp, rows::Packed, rows::packed, rows::widen;

// Tuned on one H200.
inline constexpr int kMostThreads = 1024;
inline constexpr int kHeldThreads = 512;   // of a block whose registers hold whole rows, at most
inline constexpr int kShortThreads = 128;  // of a block of short rows, one for each few lanes
inline constexpr int kWalkThreads = 512;   // of a block that walks over rows, at most
inline constexpr int kParts = 4;           // backward: vectors of a row that a thread has ...
inline constexpr int kStages = 2;          // ... and of how many rows it holds them

// ---- elements ----

/// T among the types known at run time.
template <typename T>
inline constexpr ElementType kElementType = kIsFloat<T> ? ElementType::f32 : ElementType::bf16;
template <>
inline constexpr ElementType kElementType<f16> = ElementType::f16;

/// In place of a type: x, residual and parameters are of types that differ. Seldom, and of 27
/// kinds: they are known at run time.
struct Any {};
template <typename T>
FLEXOPS_DEVICE ElementType type_of(ElementType) {
  return kElementType<T>;
}
template <>
FLEXOPS_DEVICE ElementType type_of<Any>(ElementType type) {
  return type;
}

/// Keeps the compiler from holding the floats that it has made of 16-bit elements from one pass to
/// the next, which takes twice the registers: it cannot know that `nothing`, a kernel's parameter,
/// is 0. (An empty asm is not enough, because ptxas does not see it.)
template <typename T, int N>
FLEXOPS_DEVICE void forget(Packed (&raw)[N], u32 nothing) {
  if constexpr (kPerVector<T> == 8) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[k].at[i] ^= nothing;
    }
  }
}

/// kPerVector<T> elements from `index` on.
template <typename T, Cache cache>
FLEXOPS_DEVICE Packed read(const void* from, i64 index) {
  return load<cache>(reinterpret_cast<const Packed*>(static_cast<const T*>(from) + index));
}
template <typename T, Cache cache = Cache::normal>
FLEXOPS_DEVICE void write(void* to, i64 index, const Packed& raw) {
  store<cache>(reinterpret_cast<Packed*>(static_cast<T*>(to) + index), raw);
}

/// async_copy16 by way of the first-level cache, where neighbours may find what it has read: of the
/// first `valid` of Bytes, zeros beyond.
template <int Bytes>
FLEXOPS_DEVICE void async_copy(void* shared, const void* global, int valid) {
#if FLEXOPS_HAS_ASYNC_COPY
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(Bytes),
               "r"(valid)
               : "memory");
#else
  for (int i = 0; i < Bytes / 2; ++i)
    static_cast<u16*>(shared)[i] = 2 * i < valid ? static_cast<const u16*>(global)[i] : u16(0);
#endif
}

/// N elements of S, 8 to 32 bytes.
template <typename S, Cache cache, int N>
FLEXOPS_DEVICE void load_floats(float (&out)[N], const void* from, i64 index) {
  constexpr int kWords = N * static_cast<int>(sizeof(S)) / 4, kPiece = kWords < 4 ? kWords : 4;
  const auto* pieces =
      reinterpret_cast<const Vec<u32, kPiece>*>(static_cast<const S*>(from) + index);
#pragma unroll
  for (int i = 0; i < kWords / kPiece; ++i) {
    const auto piece = load<cache>(pieces + i);
    widen<S>(out + i * (N * kPiece / kWords), piece);
  }
}

template <typename S, int N>
FLEXOPS_DEVICE void store_floats(const float (&in)[N], void* to, i64 index) {
  constexpr int kWords = N * static_cast<int>(sizeof(S)) / 4, kPiece = kWords < 4 ? kWords : 4;
  auto* pieces = reinterpret_cast<Vec<u32, kPiece>*>(static_cast<S*>(to) + index);
#pragma unroll
  for (int i = 0; i < kWords / kPiece; ++i) {
    store<Cache::streaming>(pieces + i, packed<S, kPiece>(in + i * (N * kPiece / kWords)));
  }
}

/// The same, of a type known at run time.
template <Cache cache, int N>
FLEXOPS_DEVICE void load_floats(float (&out)[N], const void* from, i64 index, ElementType type) {
  if constexpr (N == 1) {
    out[0] = load_any(from, index, type);
  } else if (type == ElementType::f32) {
    load_floats<float, cache>(out, from, index);
  } else if (type == ElementType::bf16) {
    load_floats<bf16, cache>(out, from, index);
  } else {
    load_floats<f16, cache>(out, from, index);
  }
}
template <int N>
FLEXOPS_DEVICE void store_floats(const float (&in)[N], void* to, i64 index, ElementType type) {
  if (type == ElementType::f32) {
    store_floats<float>(in, to, index);
  } else if (type == ElementType::bf16) {
    store_floats<bf16>(in, to, index);
  } else {
    store_floats<f16>(in, to, index);
  }
}

// ---- sums ----

/// The logarithm of a power of two.
FLEXOPS_DEVICE int log_of(int power) { return 31 - __clz(power); }

/// a / b of small numbers. A block waits for it before it loads anything, and an integer's division
/// takes ten times as long.
FLEXOPS_DEVICE int quotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

/// Who works on a row: `lanes` neighbouring threads, a power of two up to 32, or whole warps
/// (`wide`).
struct Group {
  int lane, lanes;
  int index, count;  // of the block's groups, and how many these are
  bool wide;
  /// alone: more than a warp's lanes are the whole block.
  FLEXOPS_DEVICE Group(int lanes_, bool alone) : lanes(lanes_), wide(lanes_ > kNarrowWarp) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    if (!wide) {
      const int log = log_of(lanes);
      index = thread >> log, lane = thread & (lanes - 1), count = threads >> log;
    } else {
      index = alone ? 0 : quotient(thread, lanes), lane = thread - index * lanes,
      count = alone ? 1 : quotient(threads, lanes);
    }
  }
};

/// What a group's warps tell each other.
template <typename T, int N>
struct Partial {
  T at[N][kNarrowWarp];
};

/// A step of a reduction of each of N numbers over a warp.
template <int N, typename T, typename Op>
FLEXOPS_DEVICE void reduce_step(T (&value)[N], Op op, int mask) {
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = op(value[i], shuffle_xor(value[i], mask, kNarrowWarp));
}

/// Of each of N numbers, for every thread of the group. Between two uses of the same `shared` there
/// must be a barrier, which a use of another one is. A group that is part of a warp needs none of
/// it. kAlone: a group of more than a warp is the block.
template <bool kAlone, int N, typename T, typename Op>
FLEXOPS_DEVICE void group_reduce(T (&value)[N], Op op, const Group& g, Partial<T, N>& shared) {
  if (!g.wide) {
    for (int mask = g.lanes / 2; mask > 0; mask /= 2) reduce_step(value, op, mask);
    return;
  }
#pragma unroll
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) reduce_step(value, op, mask);
  const int lane = g.lane % kNarrowWarp, warps = g.lanes / kNarrowWarp,
            first = kAlone ? 0 : g.index * warps;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) shared.at[i][first + g.lane / kNarrowWarp] = value[i];
  }
  if constexpr (kAlone) {
    __syncthreads();
  } else {
    barrier(g.index + 1, g.lanes);
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    value[i] = lane < warps ? shared.at[i][first + lane]
                            : T(0);  // neutral for sums and absolute values' maximum
#pragma unroll
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) {
    if (mask < warps) reduce_step(value, op, mask);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = shuffle(value[i], 0, kNarrowWarp);
}

/// 1 / sqrt(value), with a step of Newton's method after the instruction's estimate.
FLEXOPS_DEVICE float reciprocal_root(float value) {
  const float root = rsqrtf(value), better = root + 0.5f * root * (1.0f - value * root * root);
  return better == better ? better : root;  // 0 and infinity
}

template <int N>
FLEXOPS_DEVICE float sum_of(const float (&v)[N]) {
  if constexpr (N == 1) return v[0];
  float out = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i += 4) out += (v[i] + v[i + 1]) + (v[i + 2] + v[i + 3]);
  return out;
}

}  // namespace flexops::norm
