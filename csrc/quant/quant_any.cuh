// Groups of any size and place, two neighbouring elements at a time, which with 4 bits share a
// byte: 1 to 32 lanes or a whole block share a group. Of a group that is longer than what its lanes
// hold, elements are read twice.
#pragma once

#include "quant/quant_coding.cuh"

namespace flexops::quant {

inline constexpr int kAnyPairs = kAnyHeld / 2;

/// A lane's part of a group: pairs lane, lane + lanes, lane + 2 * lanes, ..., of which it holds
/// kAnyPairs a round.
struct LanePart {
  i64 line, column;  // outer * groups + group; in `inner`
  i64 element;  // index of the group's first, if its rows are `outer_stride` and `length_stride`
                // apart
  i64 rows;     // of the group, not counting what pads a short one
  i64 first;    // the first row of this lane's
  bool inside;  // if not, it is the very first group's
};

FLEXOPS_DEVICE LanePart find_part(const Params& p, i64 outer_stride, i64 length_stride) {
  LanePart s;
  const i64 thread = static_cast<i64>(blockIdx.x) * kAnyThreads + threadIdx.x,
            index = thread >> p.log_lanes;
  s.inside = index < p.total;
  s.line = s.inside ? index : 0, s.column = 0;
  if (p.inner != 1) s.line = divide(s.line, p.inner, p.inner_count, s.column);
  i64 group;
  const i64 outer = divide(s.line, p.groups, p.group_count, group), begin = group * p.group_size,
            left = p.length - begin;
  s.rows = left < p.group_size ? left : p.group_size;
  s.element = outer * outer_stride + begin * length_stride + s.column;
  s.first = 2 * (thread & (p.lanes - 1));
  return s;
}

/// How many rows there are from `first` on, of `rows`, as far as a round goes.
FLEXOPS_DEVICE int rows_left(i64 rows, i64 first) {
  constexpr int kMost = kAnyHeld * kAnyThreads;
  const i64 left = rows - first;
  return left <= 0 ? 0 : left < kMost ? static_cast<int>(left) : kMost;
}

/// A round's pairs as they are stored. Instead of elements that are not there, others of the group:
/// they do not change the extremes.
template <typename Element>
FLEXOPS_DEVICE void read_pairs(Vec<Element, 2> (&pair)[kAnyPairs], const Params& p,
                               const LanePart& s, i64 first, int left) {
  const auto* group = static_cast<const Element*>(p.x) + s.element;
  const Element* at = group + first * p.length_stride;
  const i64 next = p.length_stride, step = 2 * p.lanes * next;
  if (p.paired) {
#pragma unroll
    for (int k = 0; k < kAnyPairs; ++k, at += step)
      pair[k] = load<Cache::normal>(
          reinterpret_cast<const Vec<Element, 2>*>(2 * k * p.lanes < left ? at : group));
#pragma unroll
    for (int k = 0; k < kAnyPairs; ++k) {
      if (2 * k * p.lanes + 1 >= left) pair[k].at[1] = pair[k].at[0];
    }
  } else {
#pragma unroll
    for (int k = 0; k < kAnyPairs; ++k, at += step) {
      const int row = 2 * k * p.lanes;
      pair[k].at[0] = *(row < left ? at : group);
      pair[k].at[1] = *(row + 1 < left ? at + next : group);
    }
  }
}

FLEXOPS_DEVICE void read_held(float (&value)[kAnyHeld], const Params& p, const LanePart& s,
                              i64 first) {
  const int left = rows_left(s.rows, first);
  if (p.type == ElementType::f32) {
    Vec<u32, 2> pair[kAnyPairs];
    read_pairs(pair, p, s, first, left);
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) value[i] = bit_cast<float>(pair[i / 2].at[i % 2]);
  } else {
    Vec<u16, 2> pair[kAnyPairs];
    read_pairs(pair, p, s, first, left);
    Vec<u16, kAnyHeld> bits;
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) bits.at[i] = pair[i / 2].at[i % 2];
    widen(value, bits, p.type);
  }
}

/// Over the `lanes` threads that share a group: a power of two up to 32, or the block.
FLEXOPS_DEVICE void merge_all(Extremes& e, int lanes, float (*shared)[2]) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask >>= 1)
    e.merge(e.from(mask));
  if (lanes <= kNarrowWarp) return;
  if (threadIdx.x % kNarrowWarp == 0) {
    shared[threadIdx.x / kNarrowWarp][0] = e.lowest;
    shared[threadIdx.x / kNarrowWarp][1] = e.highest;
  }
  __syncthreads();
  for (int i = 0; i < kAnyThreads / kNarrowWarp; ++i) e.merge(shared[i][0], shared[i][1]);
}

__global__ void __launch_bounds__(kAnyThreads) quantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  __shared__ float shared[kAnyThreads / kNarrowWarp][2];
  const Coding c = make_coding(p, p.type);
  const LanePart s = find_part(p, p.outer_stride, p.length_stride);
  const i64 step = static_cast<i64>(kAnyHeld) * p.lanes;
  // First pass: reduce the group to its extremes.
  float value[kAnyHeld];
  Extremes e;
  e.clear();
  i64 first = s.first;
  do {
    read_held(value, p, s, first);
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) e.add(value[i]);
    first += step;
  } while (first < s.rows);
  e.settle();
  merge_all(e, p.lanes, shared);
  if (!s.inside) return;
  // Write scale and zero point.
  Group g(e.lowest, e.highest, c);
  g.scale = round_any(g.scale, p.type);
  if (s.first == 0) {
    const i64 entry = s.line * p.pair * p.inner + s.column;
    store_any(p.scales, entry, g.scale, p.type);
    if (!c.symmetric) store_any(p.scales, entry + p.inner, g.minimum, p.type);
  }
  // Second pass: quantize and write the codes.
  const bool halves = p.bits == 4;
  const i64 apart = (halves ? 1 : 2) * p.lanes * p.inner;  // a lane's pairs of codes
  for (first = s.first; first < p.group_size; first += step) {
    if (s.rows > step) read_held(value, p, s, first);
    const int left = g.is_broken() ? 0 : rows_left(s.rows, first),
              padded = rows_left(p.group_size, first);
    u8* out = static_cast<u8*>(p.out) +
              (s.line * p.group_bytes + (halves ? first / 2 : first)) * p.inner + s.column;
#pragma unroll
    for (int k = 0; k < kAnyPairs; ++k, out += apart) {
      const int row = 2 * k * p.lanes;
      if (row >= padded) break;
      const u32 even = row < left ? g.code(value[2 * k], c.top, c.round) : bit_cast<u32>(c.round);
      const u32 odd =
          row + 1 < left ? g.code(value[2 * k + 1], c.top, c.round) : bit_cast<u32>(c.round);
      if (halves) {
        *out = static_cast<u8>((even * 16u + odd) ^ c.flip);
      } else if (p.paired) {
        *reinterpret_cast<u16*>(out) = static_cast<u16>((even & 255u) | odd << 8);
      } else {
        *out = static_cast<u8>(even);
        if (row + 1 < padded) out[p.inner] = static_cast<u8>(odd);
      }
    }
  }
}

/// Writes a pair, or its first element if there is no second.
template <typename Element>
FLEXOPS_DEVICE void put_pair(Element* to, i64 next, const Vec<Element, 2>& pair, bool both,
                             bool paired) {
  if (paired && both) {
    store<Cache::normal>(reinterpret_cast<Vec<Element, 2>*>(to), pair);
  } else {
    to[0] = pair.at[0];
    if (both) to[next] = pair.at[1];
  }
}

__global__ void __launch_bounds__(kAnyThreads)
    dequantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  const LanePart s = find_part(p, p.length * p.inner, p.inner);
  if (!s.inside) return;
  // Load scale and zero point.
  const i64 entry = s.line * p.pair * p.inner + s.column,
            step = static_cast<i64>(kAnyHeld) * p.lanes;
  const float minimum = p.pair == 1 ? 0.0f : load_any(p.scales, entry + p.inner, p.scale_type);
  const float each = __frcp_rn(load_any(p.scales, entry, p.scale_type));
  const bool halves = p.bits == 4;
  const i64 apart = (halves ? 1 : 2) * p.lanes * p.inner;
  for (i64 first = s.first; first < s.rows; first += step) {
    const int left = rows_left(s.rows, first);
    const u8* packed = static_cast<const u8*>(p.x) +
                       (s.line * p.group_bytes + (halves ? first / 2 : first)) * p.inner + s.column;
    // Load the codes.
    u32 codes[kAnyPairs];  // the even row's in the low byte, the odd one's above it
#pragma unroll
    for (int k = 0; k < kAnyPairs; ++k, packed += apart) {
      const int row = 2 * k * p.lanes;
      codes[k] = 0;
      if (row >= left) continue;
      if (halves) {
        codes[k] = *packed;
      } else if (p.paired) {
        codes[k] = *reinterpret_cast<const u16*>(packed);
      } else {
        codes[k] = *packed;
        if (row + 1 < left) codes[k] |= static_cast<u32>(packed[p.inner]) << 8;
      }
    }
    // Dequantize and write.
    i64 at = s.element + first * p.inner;
#pragma unroll
    for (int k = 0; k < kAnyPairs; ++k, at += 2 * p.lanes * p.inner) {
      const int row = 2 * k * p.lanes;
      if (row >= left) break;
      const u32 both = (halves ? codes[k] >> 4 | (codes[k] & 15u) << 8 : codes[k]) ^ p.flip;
      const Vec<float, 2> value = {decode(both, 0, each, minimum, p),
                                   decode(both, 1, each, minimum, p)};
      if (p.type == ElementType::f32) {
        put_pair(static_cast<u32*>(p.out) + at, p.inner, bit_cast<Vec<u32, 2>>(value),
                 row + 1 < left, p.paired);
      } else {
        const u32 word = p.type == ElementType::bf16 ? pack2<bf16>(value.at[0], value.at[1])
                                                     : pack2<f16>(value.at[0], value.at[1]);
        put_pair(static_cast<u16*>(p.out) + at, p.inner, bit_cast<Vec<u16, 2>>(word),
                 row + 1 < left, p.paired);
      }
    }
  }
}

}  // namespace flexops::quant
