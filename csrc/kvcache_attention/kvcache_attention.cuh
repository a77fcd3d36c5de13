// Attention of a few new queries over a cache of keys and values, to which the same kernel appends
// the new ones: attention_decode.cuh with lengths, first tokens, rows and pages of the cache that
// only the device knows.
//
// The grid depends on shapes alone. Of a sequence shorter than the cache, blocks of threads that
// find no keys left return, and cached_combine counts the parts as cached_attend does. On sm_90 and
// newer the few parts of a short cache are a cluster, which needs no cached_combine.
//
// Who appends: each block of threads the new keys among those that it reads, so that it waits for
// no other one. Where tiles of queries share keys, they write the same bytes. If the first tile
// does not see all of them, its first part appends them all. Above kMostFused tiles append_new has
// written it all before.
//
// On sm_90 and newer the kernels of a small call (`overlaps`) start while the one before them in
// the stream ends. They wait for that one before they read anything; with `early`, before they read
// more than the cache and where tokens are, which only kernels before that one have written. Then
// only does the next one start: blocks of a third kernel would leave too few places on some
// multiprocessors, and those of a product that has one block for each would be two on others.
#pragma once

#include "attention/attention_decode.cuh"
#include "common/divisor.cuh"
#include "common/hopper.cuh"

namespace flexops::attention {

/// cos and sin, [positions, half]; half 0: nothing is rotated.
struct Rotary {
  const void *cos, *sin;
  i64 cos_row, sin_row;
  int half, positions;
  ElementType type;
  bool interleaved, from_leftpad;  // positions count from leftpad, not from 0
  bool by_query;                   // query i is rotated at position i, not at 0, of the new
  bool vectors;  // half is a multiple of 8, and rows begin at multiples of 16 bytes
};

struct CacheParams {
  DecodeParams decode;  // k and v: the caches, length_k: how many tokens one sequence can have
  Tensor new_k, new_v;  // [batch, added, heads_k, columns]
  int added;            // tokens of each sequence
  bool fused;           // cached_attend appends them
  bool overlaps;        // with the kernels before and behind it
  bool early;           // what is cached does not wait for the kernel ahead
  int length;           // cached before, if seqlens is null
  const i32 *seqlens, *batch_idx, *leftpad, *table;  // [batch], but table [batch, pages]; or null
  i64 table_row;
  Divisor page;  // tokens of a page, or of a ring
  bool ring;     // token t of a sequence is at t % page
  int rows;      // of the caches' first dimension
  int least;     // blocks of keys that a part has at least
  int keys;      // of a block
  bool cluster;  // a tile's parts are a cluster, which puts them together itself
  Rotary rotary;
};

/// One sequence and head of the cache. Tokens are counted from where its row, or first page,
/// begins.
struct Cached : Sequence {
  int row, begin, cached;  // of the caches; first token; tokens before the call
  int turned;              // tokens before the one at position 0 of the rotary embedding

  FLEXOPS_DEVICE Cached(const CacheParams& p, int batch_, int head_)
      : Sequence(p.decode.call.problem, batch_, head_) {
    const int capacity = length_k;
    row = p.batch_idx ? p.batch_idx[batch] : batch;
    cached = max(0, p.seqlens ? p.seqlens[batch] : p.length);
    length_k = p.table || (row >= 0 && row < p.rows) ? min(cached + p.added, capacity) : 0;
    const int padding = p.leftpad ? max(0, p.leftpad[batch]) : 0;
    begin = min(padding, length_k), turned = p.rotary.from_leftpad ? padding : 0;
    offset = length_k - length_q;
  }
  FLEXOPS_DEVICE Visible visible(const Problem& problem, int query) const {
    Visible out(problem, *this, query);
    out.lowest = max(out.lowest, begin);
    return out;
  }
};

/// Where a token of the cache is. row -1: nowhere.
struct Place {
  int row, within;
  FLEXOPS_DEVICE Place(int row_, int within_) : row(row_), within(within_) {}
  FLEXOPS_DEVICE Place(const CacheParams& p, const Cached& s, int token)
      : row(s.row), within(token) {
    if (!p.table && !p.ring) return;
    u32 rest;
    const u32 number = divide(static_cast<u32>(token), p.page, rest);
    within = static_cast<int>(rest);
    if (p.table) row = page_at(p, s, number);
  }
  static FLEXOPS_DEVICE int page_at(const CacheParams& p, const Cached& s, u32 number) {
    const int page = p.table[s.batch * p.table_row + number];
    return page < p.rows ? page : -1;
  }
  template <class T>
  FLEXOPS_DEVICE T* in(const Tensor& cache, const Cached& s) const {
    return static_cast<T*>(cache.data) + max(row, 0) * cache.batch + within * cache.row +
           s.head_k * cache.head;
  }
};

/// The blocks of keys that any row of a tile sees, and how they are cut: part i has blocks lowest +
/// i each, ...
struct TileKeys {
  int lowest, highest, each, parts;
  FLEXOPS_DEVICE TileKeys(const CacheParams& p, const Cached& s, int tile, int rows, int keys) {
    const Problem& problem = p.decode.call.problem;
    const int first = tile * rows,
              last = (min(first + rows, s.length_q * problem.group) - 1) / problem.group;
    lowest = s.visible(problem, first / problem.group).lowest / keys;
    highest = ceil_div(max(0, s.visible(problem, last).highest), keys);
    const int count = max(0, highest - lowest);
    each = max(ceil_div(count, p.decode.splits), p.least);
    parts = max(1, ceil_div(count, each));
  }
};

FLEXOPS_DEVICE float table_at(const void* table, ElementType type, i64 at) {
  if (type == ElementType::f32) return static_cast<const float*>(table)[at];
  const u16 bits = static_cast<const u16*>(table)[at];
  return type == ElementType::f16 ? to_float(f16{bits}) : to_float(bf16{bits});
}

/// N neighbours of a table, 4 or 8.
template <int N>
FLEXOPS_DEVICE void load_table(float (&out)[N], const void* table, ElementType type, i64 at) {
  if (type == ElementType::f32) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(table) + at + i);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const u16*>(table) + at + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 word = j < 2 ? v.x : v.y;
      out[i + j] =
          type == ElementType::f16 ? half_of<f16>(word, j % 2) : half_of<bf16>(word, j % 2);
    }
  }
}

/// Two columns of a row, rotated, from `column` on: of tables that vectors do not fit.
template <class T>
FLEXOPS_DEVICE u32 rotated_pair(const Rotary& r, const T* row, int column, i64 position) {
  float both[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = column + j;
    const bool first = r.interleaved ? j == 0 : at < r.half;
    const int pair = r.interleaved ? at / 2
                     : first       ? at
                                   : at - r.half,
              other = r.interleaved ? at ^ 1
                      : first       ? at + r.half
                                    : at - r.half;
    both[j] = to_float(row[at]);
    if (at >= 2 * r.half) continue;
    const float y = to_float(row[other]),
                cos = table_at(r.cos, r.type, position * r.cos_row + pair),
                sin = table_at(r.sin, r.type, position * r.sin_row + pair);
    both[j] = both[j] * cos + (first ? -y : y) * sin;
  }
  return pack2<T>(both[0], both[1]);
}

/// 8 columns of a row, rotated.
template <class T>
FLEXOPS_DEVICE uint4 rotated(const Rotary& r, const T* row, int column, int position) {
  uint4 out = *reinterpret_cast<const uint4*>(row + column);
  if (column >= 2 * r.half) return out;
  if (position >= r.positions) {  // the table has no such row: NaN
    const u32 nan = pack2<T>(not_a_number(), not_a_number());
    return {nan, nan, nan, nan};
  }
  if (!r.vectors) {
#pragma unroll 1
    for (int i = 0; i < 8; i += 2)
      out = {out.y, out.z, out.w, rotated_pair(r, row, column + i, position)};
    return out;
  }
  u32 words[4] = {out.x, out.y, out.z, out.w};
  float cos[8], sin[8];
  if (r.interleaved) {
    float few_cos[4], few_sin[4];
    load_table(few_cos, r.cos, r.type, position * r.cos_row + column / 2);
    load_table(few_sin, r.sin, r.type, position * r.sin_row + column / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = half_of<T>(words[i], 0), y = half_of<T>(words[i], 1);
      words[i] = pack2<T>(x * few_cos[i] - y * few_sin[i], y * few_cos[i] + x * few_sin[i]);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  const bool first = column < r.half;
  const int pair = first ? column : column - r.half;
  const uint4 other =
      *reinterpret_cast<const uint4*>(row + (first ? column + r.half : column - r.half));
  load_table(cos, r.cos, r.type, position * r.cos_row + pair);
  load_table(sin, r.sin, r.type, position * r.sin_row + pair);
  const u32 others[4] = {other.x, other.y, other.z, other.w};
  const float sign = first ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float both[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      both[j] = half_of<T>(words[i], j) * cos[2 * i + j] +
                sign * half_of<T>(others[i], j) * sin[2 * i + j];
    words[i] = pack2<T>(both[0], both[1]);
  }
  return {words[0], words[1], words[2], words[3]};
}

/// 8 columns of a new token: of its key, or, from the key's columns on, of its value.
template <class T>
FLEXOPS_DEVICE uint4 new_columns(const CacheParams& p, const Cached& s, int token, int column) {
  const int of_key = p.decode.call.problem.head_dim;
  const Tensor& from = column < of_key ? p.new_k : p.new_v;
  const T* const row = static_cast<const T*>(from.data) + s.batch * from.batch +
                       static_cast<i64>(token - s.cached) * from.row + s.head_k * from.head;
  if (column < of_key) return rotated(p.rotary, row, column, max(0, token - s.turned));
  return *reinterpret_cast<const uint4*>(row + column - of_key);
}
/// Where the cache has them; null if nowhere.
template <class T>
FLEXOPS_DEVICE uint4* cached_columns(const CacheParams& p, const Cached& s, int token, int column) {
  const int of_key = p.decode.call.problem.head_dim;
  const Place at(p, s, token);
  if (at.row < 0) return nullptr;
  return reinterpret_cast<uint4*>(column < of_key ? at.in<T>(p.decode.call.k, s) + column
                                                  : at.in<T>(p.decode.call.v, s) + column - of_key);
}
FLEXOPS_DEVICE int vectors_of_token(const Problem& problem) {
  return (problem.head_dim + problem.head_dim_v) / 8;
}

/// All new tokens, where many tiles of queries read them. Grid: batch * heads_k * added blocks of
/// 64.
template <class T>
__global__ void __launch_bounds__(64) append_new(const FLEXOPS_GRID_CONSTANT CacheParams p) {
  const Problem& problem = p.decode.call.problem;
  const int both = static_cast<int>(blockIdx.x) / p.added,
            token = static_cast<int>(blockIdx.x) % p.added;
  const Cached s(p, both / problem.heads_k, both % problem.heads_k * problem.group);
  const int at = s.cached + token;
  if (at >= s.length_k) return;
  for (int i = static_cast<int>(threadIdx.x); i < vectors_of_token(problem);
       i += static_cast<int>(blockDim.x)) {
    if (uint4* const to = cached_columns<T>(p, s, at, 8 * i)) *to = new_columns<T>(p, s, at, 8 * i);
  }
}

FLEXOPS_DEVICE void store_shared(u32 address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// Starts a warp's copies of the keys, or values, of tokens that may lie on several pages.
template <class Tile, class T>
FLEXOPS_DEVICE void load_pages_by_warp(u32 tile, const CacheParams& p, const Tensor& cache,
                                       const Cached& s, int first, int limit, int columns) {
  constexpr int kVectors = Tile::kColumns / 8;
#pragma unroll 1
  for (int i = lane_id(); i < Tile::kRows * kVectors; i += 32) {
    const int row = i / kVectors, vector = i % kVectors;
    const Place at(p, s, max(0, min(first + row, limit - 1)));
    const bool there = at.row >= 0 && first + row < limit && 8 * vector < columns;
    async_copy16(Tile::place(tile, row, vector),
                 there ? at.in<const T>(cache, s) + 8 * vector : cache.data, there);
  }
}

/// A tile's rows, rotated, to shared memory.
template <class T, class Q, int kThreads>
FLEXOPS_DEVICE void stage_queries(const CacheParams& p, const Cached& s, int first, u32 to) {
  const ForwardParams& call = p.decode.call;
  const int group = call.problem.group, rows_there = s.length_q * group;
  constexpr int kVectors = Q::kColumns / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Q::kRows * kVectors; i += kThreads) {
    const int row = i / kVectors, column = i % kVectors * 8, query = (first + row) / group;
    uint4 value = {0, 0, 0, 0};
    if (first + row < rows_there && column < call.problem.head_dim) {
      const Sequence of(call.problem, s.batch, s.head + (first + row) % group);
      value = rotated(p.rotary, of.rows_q<const T>(call.q, query), column,
                      max(0, s.cached + (p.rotary.by_query ? query : 0) - s.turned));
    }
    store_shared(Q::place(to, row, column / 8), value);
  }
}

/// Where a tile's rows go: to the result if this is all of the tile, else to a part of it, for a
/// cluster in shared memory.
template <class T>
struct Finish {
  const CacheParams& p;
  const Cached& s;
  int first, part;
  bool alone;
  float *rows, *sums;  // of a cluster
  int stride;

  FLEXOPS_DEVICE const float* operator()(int at) const {
    const ForwardParams& call = p.decode.call;
    return alone && call.sinks ? call.sinks + s.head + (first + at) % call.problem.group : nullptr;
  }
  FLEXOPS_DEVICE void operator()(int at, int column, const float (&o)[8],
                                 const Total& total) const {
    const ForwardParams& call = p.decode.call;
    const int group = call.problem.group, of_query = (first + at) / group;
    const Sequence of(call.problem, s.batch, s.head + (first + at) % group);
    if (alone) {
      store_columns<T>(call, of, of_query, column, o);
      if (column == 0) store_log_sum(call, of, of_query, total.log2_sum());
      return;
    }
    if (p.cluster) {
      store_part(rows + at * stride + column, o);
      if (column == 0) sums[at] = total.log2_sum();
      return;
    }
    const i64 to = part_row(p.decode, part, of, of_query);
    store_part(p.decode.parts + to * call.problem.head_dim_v + column, o);
    if (column == 0) p.decode.parts_sums[to] = total.log2_sum();
  }
};

/// Where a block of threads keeps its part for its cluster, behind what the warps put together.
template <class Shape>
struct Kept {
  float *rows, *sums;  // [kM, kColumnsV]; [kM], log2 of the sum of 2^score
  explicit FLEXOPS_DEVICE Kept(u8* memory)
      : rows(reinterpret_cast<float*>(memory) + Shape::kSums + Shape::kWarps * Shape::kM),
        sums(rows + Shape::kM * Shape::kColumnsV) {
    static_assert(
        4 * (Shape::kSums + Shape::kM * (Shape::kWarps + Shape::kColumnsV + 1)) <= Shape::kBytes,
        "room for a part");
  }
};

/// Puts the parts of a tile together, the only one of its sequence and head. Part i has every
/// parts-th vector of 8 columns from i on.
template <class T, class Shape>
FLEXOPS_DEVICE void combine_cluster(const CacheParams& p, const Cached& s, int part, int parts,
                                    const Kept<Shape>& kept) {
  using hopper::cluster_load, hopper::kMostClusterBlocks;
  const ForwardParams& call = p.decode.call;
  const int group = call.problem.group, vectors = call.problem.head_dim_v / 8;
  __syncwarp();
  hopper::cluster_sync();
#pragma unroll 1
  for (int i = part + parts * static_cast<int>(threadIdx.x); i < s.length_q * group * vectors;
       i += parts * Shape::kThreads) {
    const int at = i / vectors, column = i % vectors * 8;
    float exponents[kMostClusterBlocks], most = -infinity(), o[8] = {};
#pragma unroll
    for (int j = 0; j < kMostClusterBlocks; ++j) {
      exponents[j] = j < parts ? cluster_load(kept.sums + at, j) : -infinity();
      most = fmaxf(most, exponents[j]);
    }
    Total total(most, call.sinks ? call.sinks + s.head + at % group : nullptr);
#pragma unroll
    for (int j = 0; j < kMostClusterBlocks; ++j) {
      if (j >= parts) break;
      const float weight = exp2_approx(exponents[j] - total.shift);
      total.sum += weight;
      const float4* const row =
          reinterpret_cast<const float4*>(kept.rows + at * Shape::kColumnsV + column);
      const float4 low = cluster_load(row, j), high = cluster_load(row + 1, j);
      const float parts_of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) o[k] = fmaf(weight, parts_of[k], o[k]);
    }
    const float factor = total.factor();
#pragma unroll
    for (int k = 0; k < 8; ++k) o[k] *= factor;
    const Sequence of(call.problem, s.batch, s.head + at % group);
    store_columns<T>(call, of, at / group, column, o);
    if (column == 0) store_log_sum(call, of, at / group, total.log2_sum());
  }
  __syncwarp();
  hopper::cluster_leave();
}

/// Appends and attends: the keys of blocks [begin, end), as a part of a tile. With `all` also
/// appends what the tile does not see. kRows: of the tile, which may be fewer than the product's.
template <class T, class Shape, class Modifier, int kRows = Shape::kM>
FLEXOPS_DEVICE void attend_part(const CacheParams& p, u8* memory, const Cached& s, int first,
                                int begin, int end, bool all, int part, bool alone) {
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Q = Panels<Shape::kM, Shape::kColumns>;
  constexpr int kN = Shape::kKeys, kWarps = Shape::kWarps, kStages = Shape::kStages,
                kStage = Shape::kStage;
  static_assert(Q::kBytes <= kStage, "queries pass through the stage that is filled last");
  const ForwardParams& call = p.decode.call;
  const Problem& problem = call.problem;
  const int group = problem.group;

  // Start the copies of this warp's first blocks of keys and values, without the new tokens.
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const u32 whole = static_cast<u32>(__cvta_generic_to_shared(memory)),
            ring = whole + warp * kStages * kStage;
  const bool one_page = (!p.table && !p.ring) || p.page.by % kN == 0;  // of a block
  // The page of a warp's next block is looked up one block ahead.
  int page = s.row;
  if (p.table && begin + warp < end) page = Place(p, s, (begin + warp) * kN).row;
  const auto load = [&](int n, int stage, int limit) {
    if (n < end) {
      const u32 k = ring + stage * kStage, v = k + K::kBytes;
      if (one_page) {
        u32 within = n * kN;
        if (p.table || p.ring) divide(within, p.page, within);
        const Place at(page, static_cast<int>(within));
        if (p.table && n + kWarps < end) page = Place(p, s, (n + kWarps) * kN).row;
        const int there = at.row < 0 ? 0 : limit - n * kN;
        load_rows_by_warp<K>(k, at.in<const T>(call.k, s), call.k.row, there, problem.head_dim);
        load_rows_by_warp<V>(v, at.in<const T>(call.v, s), call.v.row, there, problem.head_dim_v);
      } else {
        load_pages_by_warp<K, T>(k, p, call.k, s, n * kN, limit, problem.head_dim);
        load_pages_by_warp<V, T>(v, p, call.v, s, n * kN, limit, problem.head_dim_v);
      }
    }
    async_commit();
  };
  const int fresh = p.fused ? s.cached : s.length_k;  // the first token that is not in memory yet
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load(begin + warp + i * kWarps, i, fresh);
  wait_for_previous();
  if (p.overlaps) let_next_start();

  // Rotate Q, and put it where this block's last stage will be.
  const u32 q = whole + (kStages - 1) * kStage;
  stage_queries<T, Q, Shape::kThreads>(p, s, first, q);
  // Append the new tokens of this part, to memory and to the blocks that have been loaded; and with
  // `all` the others. The last threads begin: the first ones wait for Q meanwhile.
  const int from = all ? fresh : max(fresh, begin * kN),
            to = all ? s.length_k : min(s.length_k, end * kN), vectors = vectors_of_token(problem),
            count = (to - from) * vectors;
#pragma unroll 1
  for (int base = 0; base < count; base += Shape::kThreads) {
    const int i = base + Shape::kThreads - 1 - static_cast<int>(threadIdx.x),
              token = from + i / vectors, column = i % vectors * 8, n = token / kN,
              row = token % kN;
    uint4 value = {0, 0, 0, 0};
    if (i < count) value = new_columns<T>(p, s, token, column);
    if (base == 0) {  // after the zeros that stand for new tokens
      async_wait(0);
      __syncthreads();
    }
    if (i >= count) continue;
    if (uint4* const at = cached_columns<T>(p, s, token, column)) {
      *at = value;
    } else {
      value = {0, 0, 0, 0};
    }
    const int block = n - begin, stage = block / kWarps;
    if (block < 0 || n >= end || stage >= kStages - 1) continue;
    const u32 k = whole + (block % kWarps * kStages + stage) * kStage;
    store_shared(column < problem.head_dim
                     ? K::place(k, row, column / 8)
                     : V::place(k + K::kBytes, row, (column - problem.head_dim) / 8),
                 value);
  }
  if (from < to && (to - 1) / kN - begin >= kWarps * (kStages - 1))
    __threadfence();  // cp.async reads them from the L2 cache
  __syncthreads();

  // This lane's two rows.
  const int row[2] = {first + lane_row(), first + lane_row() + 8},
            query[2] = {row[0] / group, row[1] / group};
  Cached of_row[2] = {s, s};
  of_row[0].head += row[0] % group, of_row[1].head += row[1] % group;
  DecodeRows<Shape, Modifier> own = {{},
                                     {query[0], query[1]},
                                     {Modifier(problem, of_row[0]), Modifier(problem, of_row[1])},
                                     {s.visible(problem, query[0]), s.visible(problem, query[1])}};
#pragma unroll
  for (int step = 0; step < Shape::kColumns / 16; ++step)
    Q::load_left(own.q[step], q, 0, 16 * step);
  __syncthreads();  // the stage is free

  // Online softmax over this warp's blocks.
  const float scale = exponent_scale<Modifier>(problem);
  float out[Shape::kColumnsV / 2] = {};
  Rows rows;
  int stage = 0;
#pragma unroll 1
  for (int n = begin + warp; n < end; n += kWarps) {
    async_wait(kStages - 2);
    __syncwarp();  // block n is there, and the one before no longer used
    load(n + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1, s.length_k);
    const u32 k = ring + stage * kStage, v = k + K::kBytes;
    attend_block<T>(own, k, v, n * kN, scale, rows, out);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // Combine the warps, and write the result, or the part.
  async_wait(0);
  __syncthreads();
  const Kept<Shape> kept(memory);
  const Finish<T> finish = {p, s, first, part, alone, kept.rows, kept.sums, Shape::kColumnsV};
  combine_warps<Shape>(reinterpret_cast<float*>(memory), rows, out, scale,
                       min(kRows, s.length_q * group - first), problem.head_dim_v, finish, finish);
}

/// Grid: tiles * splits * batch * heads_k blocks, as decode().
template <class T, int kDim, int kDimV, int kWarps, int kN, class Modifier>
__global__ void __launch_bounds__(32 * kWarps, 2)
    cached_attend(const FLEXOPS_GRID_CONSTANT CacheParams p) {
  using Shape = Decode<T, kDim, kDimV, kWarps, kN>;
  __align__(1024) extern __shared__ u8 memory[];
  if (!p.early) wait_for_previous();
  const Problem& problem = p.decode.call.problem;
  const int tile = static_cast<int>(blockIdx.x) % p.decode.call.tiles,
            rest = static_cast<int>(blockIdx.x) / p.decode.call.tiles;
  const int split = rest % p.decode.splits, both = rest / p.decode.splits;
  const Cached s(p, both / problem.heads_k, both % problem.heads_k * problem.group);
  const TileKeys seen(p, s, tile, Shape::kM, kN);
  if (split >= seen.parts) return wait_for_previous();
  const int begin = seen.lowest + split * seen.each, end = min(begin + seen.each, seen.highest);
  const bool all =
      tile == 0 && split == 0 && (seen.lowest * kN > s.cached || seen.highest * kN < s.length_k);
  attend_part<T, Shape, Modifier>(p, memory, s, tile * Shape::kM, begin, end, all, split,
                                  seen.parts == 1);
#if FLEXOPS_HAS_CLUSTERS
  if (p.cluster && seen.parts > 1)
    combine_cluster<T, Shape>(p, s, split, seen.parts, Kept<Shape>(memory));
#endif
}

/// Grid: batch * heads_q * length_q blocks of 128, one for each query and head.
template <class T>
__global__ void __launch_bounds__(128) cached_combine(const FLEXOPS_GRID_CONSTANT CacheParams p) {
  if (!p.early) wait_for_previous();
  const Problem& problem = p.decode.call.problem;
  const int query = static_cast<int>(blockIdx.x) % problem.length_q,
            both = static_cast<int>(blockIdx.x) / problem.length_q, head = both % problem.heads_q;
  constexpr int kM = 16;
  const Cached s(p, both / problem.heads_q, head);
  const TileKeys seen(p, s, (query * problem.group + head % problem.group) / kM, kM, p.keys);
  wait_for_previous();
  if (p.overlaps) let_next_start();
  if (seen.parts > 1) combine_splits<T>(p.decode, s, query, seen.parts);
}

}  // namespace flexops::attention
