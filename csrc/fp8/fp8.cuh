// Kernels that quantize to scaled bytes (fp8 and int8), and back. Formulas: flexops/ops/fp8.py,
// which they reproduce bit for bit: so every float operation that decides a result is an explicit,
// unfused one.
//
// Memory decides: bf16 to fp8 reads 2 and writes 1 byte an element. So elements are read once, 16
// bytes at a time, and stay in registers until their segment's scale is known; only segments too
// long for a block are read twice, the second time mostly from the second-level cache. Results are
// marked as soon to be evicted, inputs are not: see quant/quant.cuh.
//   groups  segments of 2 to 32 whole vectors (a power of two), one behind the other: neighbouring
//           lanes hold each, several at once
//   short   any other segments of up to 32 vectors
//   long    a block works on a segment (to find its scale), or on a chunk of one (if its scale is
//           known)
// Segments begin and end anywhere: see common/rows.cuh. The codes' type is known at run time: that
// costs next to nothing.
#pragma once

#include "common/divisor.cuh"
#include "common/fp8.cuh"
#include "common/rows.cuh"

namespace flexops::scaled {

using namespace rows;  // Packed and what reads it

// Tuned on one H200.
inline constexpr Cache kLoads = Cache::normal, kStores = Cache::streaming;
inline constexpr int kThreads = 128;     // of a block; see kWideThreads
inline constexpr int kGroupVectors = 2;  // vectors of a thread: each of another segment ...
inline constexpr int kShortVectors = 2;
inline constexpr int kLongVectors = 8;  // ... or all of one
inline constexpr int kChunkVectors = 2;
inline constexpr int kLongBlocks = 9;  // at least so many on a multiprocessor
inline constexpr int kWideThreads =
    1024;  // at most so many for a segment that kThreads do not hold

inline constexpr i64 kChunk = static_cast<i64>(kThreads) * kChunkVectors;  // vectors of a chunk

struct Params {
  const void* in;  // elements to quantize, or codes
  void* out;       // codes, or elements
  float* scales;   // read or written
  u32* largest;    // the bits of the largest magnitude, of a tensor that is one segment
  i64 length, row_stride, segment, segments, total;  // ScaledLayout's; `total` segments in all
  Divisor chunks;                                    // of a segment
  int lanes, log_lanes;  // groups, short: that share a segment, a power of two up to 32
  Dtype code;
  bool aligned;  // the codes of a whole vector can be read or written at once
};

FLEXOPS_DEVICE i64 divide(i64 value, i64 by, i64& remainder) {
  if (((value | by) >> 32) == 0) {
    const u32 quotient = static_cast<u32>(value) / static_cast<u32>(by);
    remainder = static_cast<u32>(value) - quotient * static_cast<u32>(by);
    return quotient;
  }
  const i64 quotient = value / by;
  remainder = value - quotient * by;
  return quotient;
}

/// A segment, or a chunk of one, cut into vectors at multiples of 16 bytes of its elements: [first,
/// last) of them count, from `elements` on.
template <typename T>
struct Span {
  static constexpr int N = kPerVector<T>;
  const T* elements;
  i64 codes;  // index of the code that belongs to elements[0]; negative if there is none
  int first, last;
  bool ragged;  // the first or the last vector is not whole

  FLEXOPS_DEVICE int vectors() const { return (last + N - 1) / N; }
  FLEXOPS_DEVICE bool has(int vector) const { return vector * N < last; }
};

/// `elements` is the tensor that holds them, `stride` what its rows are apart. All segments must be
/// of less than 2^31 elements, or cut into chunks of `vectors` vectors; `chunk` is of segment
/// `index`.
template <typename T>
FLEXOPS_DEVICE Span<T> find_span(const Params& p, const void* elements, i64 stride, i64 index,
                                 i64 chunk, i64 vectors) {
  constexpr int N = kPerVector<T>;
  i64 row = index, within = 0;
  if (p.segments != 1) row = divide(index, p.segments, within);
  const i64 start = within * p.segment, left = p.length - start,
            length = left < p.segment ? left : p.segment;
  const auto* begin = static_cast<const T*>(elements) + row * stride + start;
  const int head = head_of<T>(begin);
  const i64 skipped = chunk * vectors * N, last = head + length - skipped;
  Span<T> out;
  out.elements = begin - head + skipped;
  out.codes = row * p.length + start - head + skipped;
  out.first = chunk == 0 ? head : 0;
  out.last = static_cast<int>(last < vectors * N ? last : vectors * N);
  out.ragged = out.first != 0 || out.last % N != 0;
  return out;
}

/// A vector's codes, in order.
template <typename T>
using Codes = Vec<u32, kPerVector<T> / 4>;

/// This thread's k-th segment of `short` kernels.
FLEXOPS_DEVICE i64 short_segment(const Params& p, int k) {
  const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kNarrowWarp, teams = kNarrowWarp / p.lanes;
  return (thread / kNarrowWarp * kShortVectors + k) * teams + lane / p.lanes;
}

}  // namespace flexops::scaled
