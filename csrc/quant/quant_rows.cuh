// Groups along contiguous memory, of whole 16-byte vectors.
//
// A warp works on 32 * kVectors neighbouring vectors, 32 at each access: so every access is to
// whole cache lines. All lanes of a group would work out the same scale; instead groups are dealt
// out: few lanes work out each, and hand it to the others by a shuffle.
#pragma once

#include "quant/quant_coding.cuh"

namespace flexops::quant {

/// Where a vector lies. One beyond a row's end pads the row's last group and stands for the group's
/// first, as does an idle lane's; one beyond everything stands for the very first: reading there
/// changes no group, and nobody has to ask before.
struct Place {
  i64 element;
  bool inside;
};

template <int N, int kCount>
FLEXOPS_DEVICE void find_places(Place (&out)[kCount], const Params& p, i64 first) {
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const i64 vector = first + u * kNarrowWarp;
    out[u].inside = vector < p.total;
    out[u].element = out[u].inside ? vector * N : 0;
  }
  if (p.flat) return;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const u32 vector = static_cast<u32>(out[u].element / N);
    u32 group;
    const u32 row = flexops::divide(vector >> p.log_lanes, p.group_count, group);
    const int within = static_cast<int>(vector & static_cast<u32>(p.lanes - 1));
    const i64 start = static_cast<i64>(group) * p.group_size, column = start + within * N;
    const bool there = within < p.used && column < p.length;
    if (!there) out[u].inside = false;
    out[u].element = row * p.outer_stride + (there ? column : start);
  }
}

/// A lane's first vector; the next are 32 further on each.
FLEXOPS_DEVICE i64 first_vector() {
  const i64 thread = static_cast<i64>(blockIdx.x) * kRowThreads + threadIdx.x;
  const int lane = threadIdx.x % kNarrowWarp;
  return (thread - lane) * kVectors + lane;
}

/// Where a vector's codes are, in vectors; -1 for an idle lane's.
FLEXOPS_DEVICE i64 codes_of(const Params& p, i64 vector) {
  if (p.used == p.lanes) return vector;
  const int within = static_cast<int>(vector & (p.lanes - 1));
  return within < p.used ? (vector >> p.log_lanes) * p.used + within : -1;
}

/// A group's scale and minimum as they are stored.
template <ElementType kType>
FLEXOPS_DEVICE Vec<Bits<kSize<kType>>, 2> make_pair(float lowest, float highest, const Coding& c) {
  const Group g(lowest, highest, c);
  const float pair[2] = {g.scale, g.minimum};
  return narrow(pair, kType, Bits<kSize<kType>>{});
}

/// Codes a vector with its group's pair.
template <ElementType kType>
FLEXOPS_DEVICE void store_codes(const Params& p, i64 vector, const Vector<kSize<kType>>& data,
                                const Vec<Bits<kSize<kType>>, 2>& pair, const Coding& c,
                                bool blank) {
  constexpr int N = kVector<kSize<kType>>;
  const i64 at = codes_of(p, vector);
  if (at < 0) return;
  float numbers[2], value[N];
  widen(numbers, pair, kType);
  widen(value, data, kType);
  const Group g(numbers[1], numbers[0]);
  blank |= g.is_broken();
  u32 code[N];
  if (p.bits == 4) {
    using Word = Bits<N / 2>;
#pragma unroll
    for (int i = 0; i < N; ++i) code[i] = g.code4(value[i], c.round);
    const u32 word = blank ? 0u : pack_nibbles(code, c.flip);
    store<kStores>(static_cast<Word*>(p.out) + at, static_cast<Word>(word));
  } else {
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N; ++i) code[i] = g.code(value[i], c.top, c.round);
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      words.at[i] =
          blank ? 0u : pack_bytes(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]);
    store<kStores>(static_cast<Vec<u32, N / 4>*>(p.out) + at, words);
  }
}

/// Merges each vector's extremes over the lanes that share its group, at least kVectors. At each
/// step a lane gives half of what it has for the other half of its partner's, until span[0] is all
/// it has: that of vector (lane % lanes) / (lanes / kVectors).
template <typename S>
FLEXOPS_DEVICE void deal(S (&span)[kVectors], int lanes, ElementType type) {
  int mask = lanes / 2;
#pragma unroll
  for (int half = kVectors / 2; half > 0; half /= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      S given = span[i + half];
      if (upper) {
        given = span[i];
        span[i] = span[i + half];
      }
      span[i].merge(given.from(mask), type);
    }
    mask /= 2;
  }
  for (; mask > 0; mask /= 2) span[0].merge(span[0].from(mask), type);
}

template <int kBytes>
FLEXOPS_DEVICE Vector<kBytes> load_vector(const Params& p, const Place& place) {
  return load<kLoads>(reinterpret_cast<const Vector<kBytes>*>(
      static_cast<const Bits<kBytes>*>(p.x) + place.element));
}

template <typename Element>
FLEXOPS_DEVICE void store_pair(const Params& p, i64 group, const Vec<Element, 2>& pair) {
  if (p.pair == 1) {
    static_cast<Element*>(p.scales)[group] = pair.at[0];
  } else {
    store<kStores>(static_cast<Vec<Element, 2>*>(p.scales) + group, pair);
  }
}

/// Groups of fewer than kVectors vectors: each lane works out its vectors' groups, one after the
/// other.
template <ElementType kType>
FLEXOPS_DEVICE void quantize_small_groups(const Params& p, i64 first, const Coding& c) {
  constexpr int kBytes = kSize<kType>;
#pragma unroll 1
  for (int u = 0; u < kVectors; ++u) {
    const i64 vector = first + u * kNarrowWarp;
    Place place[1];
    find_places<kVector<kBytes>>(place, p, vector);
    const auto data = load_vector<kBytes>(p, place[0]);
    Span<kBytes, false> span;
    span.clear(kType);
    span.add(data, kType);
    span.settle(kType);
    for (int mask = p.lanes / 2; mask > 0; mask /= 2) span.merge(span.from(mask), kType);
    if (vector >= p.total) continue;
    const auto pair = make_pair<kType>(span.lowest(0, kType), span.highest(0, kType), c);
    if ((threadIdx.x & (p.lanes - 1)) == 0) store_pair(p, vector >> p.log_lanes, pair);
    store_codes<kType>(p, vector, data, pair, c, !place[0].inside);
  }
}

template <ElementType kType>
__global__ void __launch_bounds__(kRowThreads) quantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>;
  const i64 first = first_vector();
  const Coding c = make_coding(p, kType);
  if (p.lanes < kVectors) return quantize_small_groups<kType>(p, first, c);
  // Load.
  Place place[kVectors];
  find_places<kVector<kBytes>>(place, p, first);
  Vector<kBytes> data[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) data[u] = load_vector<kBytes>(p, place[u]);
  // Reduce each group to its extremes, the groups shared out among lanes.
  Span<kBytes, false> span[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    span[u].clear(kType);
    span[u].add(data[u], kType);
    span[u].settle(kType);
  }
  deal(span, p.lanes, kType);
  const auto pair = make_pair<kType>(span[0].lowest(0, kType), span[0].highest(0, kType), c);
  // Write scales and zero points.
  const int share = p.lanes >> kLogVectors;  // lanes that work out the same group
  const int lane = threadIdx.x % kNarrowWarp, start = lane & -p.lanes;
  const i64 mine = first + ((lane - start) >> (p.log_lanes - kLogVectors)) * kNarrowWarp;
  if (mine < p.total && (lane & (share - 1)) == 0) store_pair(p, mine >> p.log_lanes, pair);
  // Quantize and write the codes.
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const auto its = hand(pair, start + u * share);
    const i64 vector = first + u * kNarrowWarp;
    if (vector < p.total) store_codes<kType>(p, vector, data[u], its, c, !place[u].inside);
  }
}

/// Asks for what a block that starts some microseconds later will read: as much as this one reads,
/// from its first group on.
FLEXOPS_DEVICE void read_ahead(const Params& p) {
  constexpr int kMost = kDecodeThreads * 8;  // bytes that a block reads
  const int line = static_cast<int>(threadIdx.x) * kLine;
  if (line >= kMost) return;
  const u32 first = blockIdx.x * kDecodeThreads, group = first >> p.log_lanes;
  const u32 blocks =
      (first & static_cast<u32>(p.lanes - 1)) / kDecodeThreads;  // of this group, before this one
  const i64 codes =
      group * p.group_bytes + blocks * static_cast<u32>(p.codes_of_block) + line + kRowsAhead;
  const i64 pairs = (static_cast<i64>(group) << p.log_pair) + line + p.pairs_ahead;
  if (line < p.codes_of_block && codes < p.code_bytes)
    prefetch(static_cast<const u8*>(p.x) + codes);
  if (line < p.pairs_of_block && pairs < p.pair_bytes)
    prefetch(static_cast<const u8*>(p.scales) + pairs);
}

/// A group's entries in scales, in one access.
FLEXOPS_DEVICE Vec<u32, 2> load_pair(const Params& p, u32 group) {
  if (p.log_pair == 2) return {static_cast<const u32*>(p.scales)[group], 0u};
  if (p.log_pair == 3)
    return load<Cache::normal>(static_cast<const Vec<u32, 2>*>(p.scales) + group);
  return {static_cast<const u16*>(p.scales)[group], 0u};
}

/// Scale and minimum, which is 0 where there is none.
FLEXOPS_DEVICE void widen_pair(float (&numbers)[2], const Vec<u32, 2>& pair, ElementType type) {
  if (type == ElementType::f32) {
    widen(numbers, pair, type);
  } else {
    widen(numbers, bit_cast<Vec<u16, 2>>(pair.at[0]), type);
  }
}

/// A lane has one vector: its loads seldom wait for memory, and blocks that end soon leave
/// multiprocessors idle for a shorter time at the kernel's end.
template <ElementType kType>
__global__ void __launch_bounds__(kDecodeThreads)
    dequantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>, N = kVector<kBytes>;
  using Codes = Vec<u32, N / 4>;
  const u32 vector = blockIdx.x * kDecodeThreads + threadIdx.x, group = vector >> p.log_lanes;
  if (vector >= static_cast<u32>(p.total)) return;
  // Find the vector's place in its row.
  u32 at = vector;
  auto* out = static_cast<Vector<kBytes>*>(p.out) + vector;
  if (!p.flat) {
    u32 of_row;
    const u32 row = flexops::divide(group, p.group_count, of_row),
              within = vector & static_cast<u32>(p.lanes - 1);
    const i64 column = static_cast<i64>(of_row) * p.group_size + within * N;
    if (within >= static_cast<u32>(p.used) || column >= p.length) return;
    at = group * static_cast<u32>(p.used) + within;
    out = reinterpret_cast<Vector<kBytes>*>(static_cast<Bits<kBytes>*>(p.out) +
                                            (row * p.length + column));
  }
  // Load codes, scale and zero point.
  const bool halves = p.bits == 4;
  Codes codes = {};
  if (halves) {
    codes.at[0] = load_once(static_cast<const Bits<N / 2>*>(p.x) + at);
  } else {
    codes = load_once(static_cast<const Codes*>(p.x) + at);
  }
  const auto pair = load_pair(p, group);
  read_ahead(p);
  float numbers[2], value[N];
  if (p.scale_type == kType) {  // sooner told than which of the others it is
    widen_pair(numbers, pair, kType);
  } else {
    widen_pair(numbers, pair, p.scale_type);
  }
  // Unpack, dequantize and write.
  const float step = __frcp_rn(numbers[0]), minimum = numbers[1];
  if (halves) {
    codes = split(codes, p.flip);
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) codes.at[i] ^= p.flip;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = decode(codes.at[i / 4], i % 4, step, minimum, p);
  store<kStores>(out, narrow(value, kType, Bits<kBytes>{}));
}

}  // namespace flexops::quant
