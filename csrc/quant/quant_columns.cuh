// Groups across contiguous rows.
//
// Quantizing, a warp is `lanes` slots of 32 / lanes neighbouring chunks of 16 bytes. Slot s holds
// the row pairs s, s + lanes, s + 2 * lanes, ... Dequantizing, where nothing has to be shared, a
// lane has a few neighbouring rows of a chunk, and lanes follow each other along the columns, then
// down: blocks that run at the same time write one piece of memory.
#pragma once

#include "quant/quant_coding.cuh"

namespace flexops::quant {

struct Tile {
  i64 outer, line, column;  // line: outer * groups + group; column: the chunk's first
  i64 first_row;            // in `length`
  i64 rows;                 // of the group, not counting what pads a short one
  int slot;
  bool inside;  // if not, it is the first chunk's place, for loads that need no check
};

/// N codes' low bytes; `whole` (by column) and `keep` (by nibble) have ones where they count.
template <int N>
FLEXOPS_DEVICE void store_bytes(u8* out, const u32 (&code)[N], u32 flip, const u32 (&whole)[N / 4],
                                u32 keep) {
  Vec<u32, N / 4> words;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    words.at[i] =
        (pack_bytes(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]) ^ flip) &
        whole[i] & keep;
  }
  store<kStores>(reinterpret_cast<Vec<u32, N / 4>*>(out), words);
}

template <int N>
FLEXOPS_DEVICE Tile tile_of(const Params& p) {
  Tile t;
  const int lane = threadIdx.x % kNarrowWarp;
  const int log_columns = 5 - p.log_lanes;
  const i64 warp = (static_cast<i64>(blockIdx.x) * kColumnThreads + threadIdx.x) / kNarrowWarp;
  const i64 chunk = (warp << log_columns) + (lane & ((1 << log_columns) - 1));
  t.slot = lane >> log_columns;
  t.inside = chunk < p.total;
  u32 at, group;
  const u32 line = flexops::divide(t.inside ? static_cast<u32>(chunk) : 0u, p.chunks, at);
  t.line = line;
  t.outer = flexops::divide(line, p.group_count, group);
  t.column = static_cast<i64>(at) * N;
  t.first_row = static_cast<i64>(group) * p.group_size;
  const i64 left = p.length - t.first_row;
  t.rows = left < p.group_size ? left : p.group_size;
  return t;
}

template <ElementType kType>
__global__ void __launch_bounds__(kColumnThreads)
    quantize_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>, N = kVector<kBytes>;
  const Tile t = tile_of<N>(p);
  const Coding c = make_coding(p, kType);
  const auto* x = static_cast<const Bits<kBytes>*>(p.x) + t.outer * p.outer_stride +
                  t.first_row * p.length_stride + t.column;
  const auto row_of = [&](int k) { return 2 * (t.slot + (k / 2) * p.lanes) + k % 2; };
  const int rows = static_cast<int>(t.rows), group_size = static_cast<int>(p.group_size);
  // Load the lane's rows of the columns.
  Vector<kBytes> data[kColumnRows];
#pragma unroll
  for (int k = 0; k < kColumnRows;
       ++k) {  // instead of a row that is not there, the last one: it does not change the extremes
    const int row = row_of(k) < rows ? row_of(k) : rows - 1;
    data[k] = load<kLoads>(reinterpret_cast<const Vector<kBytes>*>(x + row * p.length_stride));
  }
  // Reduce to each column's extremes.
  Span<kBytes, true> span;
  span.clear(kType);
#pragma unroll
  for (int k = 0; k < kColumnRows; ++k) span.add(data[k], kType);
  span.settle(kType);
  for (int mask = kNarrowWarp / 2; mask >= kNarrowWarp / p.lanes; mask >>= 1)
    span.merge(span.from(mask), kType);
  if (!t.inside) return;
  // Scales and zero points.
  float minimum[N], scale[N];
  u32 whole[N / 4] =
      {};  // ones in the bytes of columns whose group is not broken: the others' codes are 0
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Group g(span.lowest(i, kType), span.highest(i, kType), c);
    minimum[i] = g.minimum, scale[i] = g.scale;
    if (!g.is_broken()) whole[i / 4] |= 255u << (8 * (i % 4));
  }
  const Vector<kBytes> scale_bits = narrow(scale, kType, Bits<kBytes>{});
  widen(scale, scale_bits, kType);
  if (t.slot == 0) {
    auto* scales = static_cast<Bits<kBytes>*>(p.scales) + t.line * p.pair * p.inner + t.column;
    store<kStores>(reinterpret_cast<Vector<kBytes>*>(scales), scale_bits);
    if (!c.symmetric)
      store<kStores>(reinterpret_cast<Vector<kBytes>*>(scales + p.inner),
                     narrow(minimum, kType, Bits<kBytes>{}));
  }
  // Quantize and write the codes.
  u8* out = static_cast<u8*>(p.out) + t.line * p.group_bytes * p.inner + t.column;
  constexpr int kPart =
      kType == ElementType::f32
          ? kColumnRows / 2
          : kColumnRows;  // code for each row is much to compile; 16-bit ones are slower by parts
#pragma unroll 1
  for (int part = 0; part < kColumnRows; part += kPart) {
#pragma unroll
    for (int k = 0; k < kPart; k += 2) {
      const int row = row_of(part + k);
      if (row >= group_size) break;
      float value[2][N];
      u32 code[2][N];
      widen(value[0], data[k], kType);
      widen(value[1], data[k + 1], kType);
      const bool even = row < rows, odd = row + 1 < rows;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i)
        code[i / N][i % N] =
            Group(minimum[i % N], scale[i % N]).code(value[i / N][i % N], c.top, c.round);
      if (p.bits == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) code[0][i] = code[0][i] * 16u + code[1][i];
        store_bytes(out + row / 2 * p.inner, code[0], c.flip, whole,
                    (even ? 0xf0f0f0f0u : 0u) | (odd ? 0x0f0f0f0fu : 0u));
      } else {
        store_bytes(out + row * p.inner, code[0], 0u, whole, even ? ~0u : 0u);
        if (row + 1 < group_size)
          store_bytes(out + (row + 1) * p.inner, code[1], 0u, whole, odd ? ~0u : 0u);
      }
    }
#pragma unroll
    for (int k = 0; k < kColumnRows - kPart; ++k) data[k] = data[k + kPart];
  }
}

/// The scales and minima of neighbouring columns; both are on their way before either is waited
/// for.
template <int N>
FLEXOPS_DEVICE void load_pairs(float (&scale)[N], float (&minimum)[N], const Params& p, i64 index) {
  const i64 other = p.pair == 1 ? index : index + p.inner;
  if (p.scale_type == ElementType::f32) {
    const auto* from = static_cast<const float*>(p.scales);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const auto scales =
          load<Cache::normal>(reinterpret_cast<const Vec<float, 4>*>(from + index + i));
      const auto minima =
          load<Cache::normal>(reinterpret_cast<const Vec<float, 4>*>(from + other + i));
#pragma unroll
      for (int k = 0; k < 4; ++k) scale[i + k] = scales.at[k], minimum[i + k] = minima.at[k];
    }
  } else {
    const auto* from = static_cast<const u16*>(p.scales);
    const auto scales = load<Cache::normal>(reinterpret_cast<const Vec<u16, N>*>(from + index));
    const auto minima = load<Cache::normal>(reinterpret_cast<const Vec<u16, N>*>(from + other));
    widen(scale, scales, p.scale_type);
    widen(minimum, minima, p.scale_type);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) minimum[i] = p.pair == 1 ? 0.0f : minimum[i];
}

/// Numbers of rows have 31 bits.
template <ElementType kType>
__global__ void __launch_bounds__(kPartThreads)
    dequantize_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>, N = kVector<kBytes>;
  using Codes = Vec<u32, N / 4>;
  const u32 index = blockIdx.x * kPartThreads + threadIdx.x, inner = static_cast<u32>(p.inner);
  if (index >= static_cast<u32>(p.total)) return;
  // Find the part of a group of rows.
  u32 chunk, part, group;
  const u32 line = flexops::divide(flexops::divide(index, p.chunks, chunk), p.parts, part),
            outer = flexops::divide(line, p.group_count, group);
  const u32 halves = p.bits == 4 ? 2 : 1;  // a byte's codes are those of neighbouring rows
  const u32 skipped = part * (halves * kPartCodes),
            first_row = group * static_cast<u32>(p.group_size) + skipped, column = chunk * N;
  const int in_group = static_cast<int>(static_cast<u32>(p.group_size) - skipped),
            in_all = static_cast<int>(static_cast<u32>(p.length) - first_row);
  const int left = in_group < in_all ? in_group : in_all,
            most = static_cast<int>(halves) * kPartCodes, rows = left < most ? left : most;
  if (rows <= 0) return;
  const u64 offset =
      static_cast<u64>(line * static_cast<u32>(p.group_bytes) + part * kPartCodes) * inner + column;
  const u8* packed = static_cast<const u8*>(p.x) + offset;
  // Load codes, scales and zero points.
  Codes words[kPartCodes];
#pragma unroll
  for (int k = 0; k < kPartCodes; ++k) {
    if (k * static_cast<int>(halves) < rows)
      words[k] = load_once(reinterpret_cast<const Codes*>(packed + static_cast<u64>(k) * inner));
  }
  float step[N], minimum[N];
  load_pairs(step, minimum, p,
             static_cast<i64>(static_cast<u64>(line * static_cast<u32>(p.pair)) * inner + column));
  // Prefetch for a block to come.
  if (chunk % (kLine / N) == 0 && static_cast<i64>(offset) < p.code_bytes) {
#pragma unroll
    for (int k = 0; k < kPartCodes; ++k)
      prefetch(packed + static_cast<u64>(k) * inner + kColumnsAhead);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) step[i] = __frcp_rn(step[i]);
  // Unpack, dequantize and write, row by row.
  auto* out = static_cast<Bits<kBytes>*>(p.out) +
              (static_cast<u64>(outer * static_cast<u32>(p.length) + first_row) * inner + column);
  const u32 mask = p.bits == 4 ? 0x0f0f0f0fu : ~0u;
#pragma unroll
  for (int k = 0; k < kPartCodes; ++k) {
    const int end =
        rows -
        k * static_cast<int>(
                halves);  // of a byte's halves the high one, which is the even row's, comes first
#pragma unroll 1
    for (int half = 0, shift = 8 - p.bits; half < end && shift >= 0; ++half, shift -= p.bits) {
      u32 codes[N / 4];
      float value[N];
#pragma unroll
      for (int i = 0; i < N / 4; ++i) codes[i] = (words[k].at[i] >> shift ^ p.flip) & mask;
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = decode(codes[i / 4], i % 4, step[i], minimum[i], p);
      store<kStores>(reinterpret_cast<Vector<kBytes>*>(out), narrow(value, kType, Bits<kBytes>{}));
      out += inner;
    }
  }
}

}  // namespace flexops::quant
