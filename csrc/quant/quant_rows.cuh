// Groups along contiguous memory, of whole 16-byte vectors.
//
// A warp works on 32 * kVectors neighbouring vectors, 32 at each access: so every access is to whole cache lines. All lanes of a group
// would work out the same scale; instead groups are dealt out: few lanes work out each, and hand it to the others by a shuffle.
#pragma once

#include "quant/quant_coding.cuh"

namespace flexops::quant {

constexpr int kPart = kVectors / 2;  // whose values are worked out at once: code for each vector is much to compile

/// Where a vector lies. One beyond a row's end pads the row's last group and stands for the group's first, as does an idle lane's; one
/// beyond everything stands for the very first: reading there changes no group, and nobody has to ask before.
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
template <Type kType>
FLEXOPS_DEVICE Vec<Bits<kSize<kType>>, 2> make_pair(float lowest, float highest, const Coding& c) {
  const Group g(lowest, highest, c);
  const float pair[2] = {g.scale, g.minimum};
  return narrow(pair, kType, Bits<kSize<kType>>{});
}

/// Codes a vector with its group's pair.
template <Type kType>
FLEXOPS_DEVICE void store_codes(const Params& p, i64 vector, const Vector<kSize<kType>>& data, const Vec<Bits<kSize<kType>>, 2>& pair,
                                const Coding& c, bool blank) {
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
    for (int i = 0; i < N / 4; ++i) words.at[i] = blank ? 0u : pack_bytes(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]);
    store<kStores>(static_cast<Vec<u32, N / 4>*>(p.out) + at, words);
  }
}

/// Merges each vector's extremes over the lanes that share its group, at least kVectors. At each step a lane gives half of what it has for
/// the other half of its partner's, until span[0] is all it has: that of vector (lane % lanes) / (lanes / kVectors).
template <typename S>
FLEXOPS_DEVICE void deal(S (&span)[kVectors], int lanes, Type type) {
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
  return load<kLoads>(reinterpret_cast<const Vector<kBytes>*>(static_cast<const Bits<kBytes>*>(p.x) + place.element));
}

template <typename Element>
FLEXOPS_DEVICE void store_pair(const Params& p, i64 group, const Vec<Element, 2>& pair) {
  if (p.pair == 1) {
    static_cast<Element*>(p.scales)[group] = pair.at[0];
  } else {
    store<kStores>(static_cast<Vec<Element, 2>*>(p.scales) + group, pair);
  }
}

/// Groups of fewer than kVectors vectors: each lane works out its vectors' groups, one after the other.
template <Type kType>
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

template <Type kType>
__global__ void __launch_bounds__(kRowThreads) quantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>;
  const i64 first = first_vector();
  const Coding c = make_coding(p, kType);
  if (p.lanes < kVectors) return quantize_small_groups<kType>(p, first, c);
  Place place[kVectors];
  find_places<kVector<kBytes>>(place, p, first);
  Vector<kBytes> data[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) data[u] = load_vector<kBytes>(p, place[u]);
  Span<kBytes, false> span[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    span[u].clear(kType);
    span[u].add(data[u], kType);
    span[u].settle(kType);
  }
  deal(span, p.lanes, kType);
  const auto pair = make_pair<kType>(span[0].lowest(0, kType), span[0].highest(0, kType), c);
  const int share = p.lanes >> kLogVectors;  // lanes that work out the same group
  const int lane = threadIdx.x % kNarrowWarp, start = lane & -p.lanes;
  const i64 mine = first + ((lane - start) >> (p.log_lanes - kLogVectors)) * kNarrowWarp;
  if (mine < p.total && (lane & (share - 1)) == 0) store_pair(p, mine >> p.log_lanes, pair);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const auto its = hand(pair, start + u * share);
    const i64 vector = first + u * kNarrowWarp;
    if (vector < p.total) store_codes<kType>(p, vector, data[u], its, c, !place[u].inside);
  }
}

/// A vector's codes as loaded: with 4 bits in the low half of the bytes. For a vector that is not there, any others.
template <int N>
FLEXOPS_DEVICE Vec<u32, N / 4> load_codes(const Params& p, i64 vector) {
  i64 at = codes_of(p, vector < p.total ? vector : 0);
  if (at < 0) at = 0;
  if (p.bits == 8) return load_once(static_cast<const Vec<u32, N / 4>*>(p.x) + at);
  Vec<u32, N / 4> words = {};
  words.at[0] = load_once(static_cast<const Bits<N / 2>*>(p.x) + at);
  return words;
}

/// A group's scale and minimum, in one access.
FLEXOPS_DEVICE void load_pair(float& scale, float& minimum, const Params& p, i64 group) {
  float pair[2] = {0.0f, 0.0f};
  if (p.pair == 1) {
    pair[0] = load_any(p.scales, group, p.scale_type);
  } else if (p.scale_type == kF32) {
    widen(pair, load<Cache::normal>(static_cast<const Vec<u32, 2>*>(p.scales) + group), p.scale_type);
  } else {
    widen(pair, load<Cache::normal>(static_cast<const Vec<u16, 2>*>(p.scales) + group), p.scale_type);
  }
  scale = pair[0], minimum = pair[1];
}

/// Decodes a vector and stores it.
template <int kBytes>
FLEXOPS_DEVICE void store_values(const Params& p, const Place& place, const Vec<u32, kVector<kBytes> / 4>& words, float step, float minimum,
                                 const Decoding& d) {
  constexpr int N = kVector<kBytes>;
  if (!place.inside) return;
  float value[N];
  if (p.bits == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = decode_at(words.at[0] ^ d.flip, 4, 4 * (i ^ 1), step, minimum, d);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = decode_at(words.at[i / 4] ^ d.flip, 8, 8 * (i % 4), step, minimum, d);
  }
  auto* out = reinterpret_cast<Vector<kBytes>*>(static_cast<Bits<kBytes>*>(p.out) + place.element);
  store<kStores>(out, narrow(value, kBytes == 4 ? kF32 : p.type, Bits<kBytes>{}));
}

template <int kBytes>
__global__ void __launch_bounds__(kRowThreads) dequantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<kBytes>;
  const i64 first = first_vector();
  const Decoding d = make_decoding(p);
  float scale, minimum;
  if (p.lanes < kVectors) {  // more groups than lanes
#pragma unroll 1
    for (i64 vector = first; vector < first + kVectors * kNarrowWarp && vector < p.total; vector += kNarrowWarp) {
      Place place[1];
      find_places<N>(place, p, vector);
      const auto words = load_codes<N>(p, vector);
      load_pair(scale, minimum, p, vector >> p.log_lanes);
      store_values<kBytes>(p, place[0], words, __frcp_rn(scale), minimum, d);
    }
    return;
  }
  Place place[kVectors];
  find_places<N>(place, p, first);
  Vec<u32, N / 4> words[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) words[u] = load_codes<N>(p, first + u * kNarrowWarp);
  // Lane i reads the warp's i-th group; lanes beyond its last one read the first.
  const int lane = threadIdx.x % kNarrowWarp;
  const i64 group = ((first - lane) >> p.log_lanes) + (lane < kVectors * kNarrowWarp >> p.log_lanes ? lane : 0),
            last = (p.total - 1) >> p.log_lanes;
  load_pair(scale, minimum, p, group < last ? group : last);
  const float step = __frcp_rn(scale);
#pragma unroll 1
  for (int from = 0; from < kVectors; from += kPart) {
#pragma unroll
    for (int u = 0; u < kPart; ++u) {
      const int owner = ((from + u) * kNarrowWarp + lane) >> p.log_lanes;
      store_values<kBytes>(p, place[u], words[u], shuffle(step, owner, kNarrowWarp), shuffle(minimum, owner, kNarrowWarp), d);
    }
#pragma unroll
    for (int u = 0; u < kVectors - kPart; ++u) words[u] = words[u + kPart], place[u] = place[u + kPart];
  }
}

}  // namespace flexops::quant
