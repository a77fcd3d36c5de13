// Attention of a few new queries over a cache of keys and values, to which the same kernel appends
// the new ones: attention_decode.cuh with lengths, first tokens, rows and pages of the cache that
// only the device knows.
//
// The grid depends on shapes alone. Of a sequence shorter than the cache, blocks of threads that
// find no keys left return, and cached_combine counts the parts as cached_attend does.
//
// Who appends: each block of threads the new keys among those that it reads, so that it waits for
// no other one. Where tiles of queries share keys, they write the same bytes. If the first tile
// does not see all of them, its first part appends them all. Above kMostFused tiles append_new has
// written it all before.
#pragma once

#include "attention/attention_decode.cuh"

namespace flexops::attention {

/// cos and sin, [positions, half]; half 0: nothing is rotated.
struct Rotary {
  const void *cos, *sin;
  i64 cos_row, sin_row;
  int half, positions;
  ElementType type;
  bool interleaved, by_query;  // by_query: query i is rotated at position i, not at 0, of the new
};

struct CacheParams {
  DecodeParams decode;  // k and v: the caches, length_k: how many tokens one sequence can have
  Tensor new_k, new_v;  // [batch, added, heads_k, columns]
  int added;            // tokens of each sequence
  bool fused;           // cached_attend appends them
  int length;           // cached before, if seqlens is null
  const i32 *seqlens, *batch_idx, *leftpad, *table;  // [batch], but table [batch, pages]; or null
  i64 table_row;
  int page, rows;  // tokens of a page; of the caches' first dimension
  int least;       // blocks of keys that a part has at least
  int keys;        // of a block
  Rotary rotary;
};

/// One sequence and head of the cache. Tokens are counted from where its row, or first page,
/// begins.
struct Cached : Sequence {
  int row, begin, cached;  // of the caches; first token; tokens before the call

  FLEXOPS_DEVICE Cached(const CacheParams& p, int batch_, int head_)
      : Sequence(p.decode.call.problem, batch_, head_) {
    const int capacity = length_k;
    row = p.batch_idx ? p.batch_idx[batch] : batch;
    cached = max(0, p.seqlens ? p.seqlens[batch] : p.length);
    length_k = p.table || (row >= 0 && row < p.rows) ? min(cached + p.added, capacity) : 0;
    begin = min(p.leftpad ? max(0, p.leftpad[batch]) : 0, length_k);
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
  FLEXOPS_DEVICE Place(const CacheParams& p, const Cached& s, int token)
      : row(s.row), within(token) {
    if (!p.table) return;
    row = p.table[s.batch * p.table_row + token / p.page], within = token % p.page;
    if (row >= p.rows) row = -1;
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

/// 8 columns of a row, rotated: by elements, because of each row it is done once.
template <class T>
FLEXOPS_DEVICE uint4 rotated(const Rotary& r, const T* row, int column, int position) {
  uint4 out = *reinterpret_cast<const uint4*>(row + column);
  if (column >= 2 * r.half) return out;
  const bool known = position >= 0 && position < r.positions;
  u32* const words = reinterpret_cast<u32*>(&out);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float both[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = column + 2 * i + j;
      const bool first = r.interleaved ? j == 0 : at < r.half;
      const int pair = r.interleaved ? at / 2
                       : first       ? at
                                     : at - r.half,
                other = r.interleaved ? at ^ 1
                        : first       ? at + r.half
                                      : at - r.half;
      both[j] = to_float(row[at]);
      if (at >= 2 * r.half) continue;
      const float x = both[j], y = to_float(row[other]),
                  cos =
                      known ? table_at(r.cos, r.type, position * r.cos_row + pair) : not_a_number(),
                  sin =
                      known ? table_at(r.sin, r.type, position * r.sin_row + pair) : not_a_number();
      both[j] = x * cos + (first ? -y : y) * sin;
    }
    words[i] = pack2<T>(both[0], both[1]);
  }
  return out;
}

/// Appends 8 columns of a new token: of its key, or, from the key's columns on, of its value.
template <class T>
FLEXOPS_DEVICE void append(const CacheParams& p, const Cached& s, int token, int column) {
  const Problem& problem = p.decode.call.problem;
  const Place at(p, s, token);
  if (at.row < 0) return;
  const bool of_key = column < problem.head_dim;
  const Tensor& from = of_key ? p.new_k : p.new_v;
  const T* const row = static_cast<const T*>(from.data) + s.batch * from.batch +
                       static_cast<i64>(token - s.cached) * from.row + s.head_k * from.head;
  if (of_key) {
    *reinterpret_cast<uint4*>(at.in<T>(p.decode.call.k, s) + column) =
        rotated(p.rotary, row, column, token);
  } else {
    column -= problem.head_dim;
    *reinterpret_cast<uint4*>(at.in<T>(p.decode.call.v, s) + column) =
        *reinterpret_cast<const uint4*>(row + column);
  }
}
/// Tokens [first, last) by the block's threads.
template <class T>
FLEXOPS_DEVICE void append_tokens(const CacheParams& p, const Cached& s, int first, int last) {
  const int vectors = (p.decode.call.problem.head_dim + p.decode.call.problem.head_dim_v) / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < (last - first) * vectors;
       i += static_cast<int>(blockDim.x))
    append<T>(p, s, first + i / vectors, i % vectors * 8);
}

/// All new tokens, where many tiles of queries read them. Grid: batch * heads_k * added blocks of
/// 64.
template <class T>
__global__ void __launch_bounds__(64) append_new(const FLEXOPS_GRID_CONSTANT CacheParams p) {
  const Problem& problem = p.decode.call.problem;
  const int both = static_cast<int>(blockIdx.x) / p.added,
            token = static_cast<int>(blockIdx.x) % p.added;
  const Cached s(p, both / problem.heads_k, both % problem.heads_k * problem.group);
  if (s.cached + token < s.length_k) append_tokens<T>(p, s, s.cached + token, s.cached + token + 1);
}

FLEXOPS_DEVICE void store_shared(u32 address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// Starts a warp's copies of the keys, or values, of tokens that may lie on several pages.
template <class Tile, class T>
FLEXOPS_DEVICE void load_pages_by_warp(u32 tile, const CacheParams& p, const Tensor& cache,
                                       const Cached& s, int first, int columns) {
  constexpr int kVectors = Tile::kColumns / 8;
#pragma unroll 1
  for (int i = lane_id(); i < Tile::kRows * kVectors; i += 32) {
    const int row = i / kVectors, vector = i % kVectors;
    const Place at(p, s, min(first + row, s.length_k - 1));
    const bool there = at.row >= 0 && first + row < s.length_k && 8 * vector < columns;
    async_copy16(Tile::place(tile, row, vector),
                 there ? at.in<const T>(cache, s) + 8 * vector : cache.data, there);
  }
}

/// Grid: tiles * splits * batch * heads_k blocks, as decode().
template <class T, int kDim, int kDimV, int kWarps, int kN, class Modifier>
__global__ void __launch_bounds__(32 * kWarps, 2)
    cached_attend(const FLEXOPS_GRID_CONSTANT CacheParams p) {
  using Shape = Decode<T, kDim, kDimV, kWarps, kN>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Q = Panels<Shape::kM, kDim>;
  constexpr int kM = Shape::kM, kStages = Shape::kStages, kStage = Shape::kStage;
  static_assert(Q::kBytes <= kStage, "queries pass through the stage that is filled last");
  __align__(1024) extern __shared__ u8 memory[];

  const ForwardParams& call = p.decode.call;
  const Problem& problem = call.problem;
  const int tile = static_cast<int>(blockIdx.x) % call.tiles,
            rest = static_cast<int>(blockIdx.x) / call.tiles;
  const int split = rest % p.decode.splits, both = rest / p.decode.splits, group = problem.group;
  const Cached s(p, both / problem.heads_k, both % problem.heads_k * group);
  const int first = tile * kM, rows_there = s.length_q * group;
  const TileKeys seen(p, s, tile, kM, kN);
  if (split >= seen.parts) return;
  const int begin = seen.lowest + split * seen.each, end = min(begin + seen.each, seen.highest);

  // Start the copies of this warp's first blocks of keys and values that have nothing new.
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const u32 whole = static_cast<u32>(__cvta_generic_to_shared(memory)),
            ring = whole + warp * kStages * kStage;
  const bool one_page = !p.table || p.page % kN == 0;  // of a block
  const auto load = [&](int n, int stage) {
    if (n < end) {
      const u32 k = ring + stage * kStage, v = k + K::kBytes;
      if (one_page) {
        const Place at(p, s, n * kN);
        const int there = at.row < 0 ? 0 : s.length_k - n * kN;
        load_rows_by_warp<K>(k, at.in<const T>(call.k, s), call.k.row, there, problem.head_dim);
        load_rows_by_warp<V>(v, at.in<const T>(call.v, s), call.v.row, there, problem.head_dim_v);
      } else {
        load_pages_by_warp<K, T>(k, p, call.k, s, n * kN, problem.head_dim);
        load_pages_by_warp<V, T>(v, p, call.v, s, n * kN, problem.head_dim_v);
      }
    }
    async_commit();
  };
  const int fresh = p.fused ? s.cached : s.length_k;  // the first token that is not in memory yet
  const auto is_old = [&](int n) {
    return n >= end || (n + 1) * kN <= fresh || fresh >= s.length_k;
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (const int n = begin + warp + i * kWarps; is_old(n)) load(n, i);
  }

  // Append the new tokens of this part; and the first part all, if its tile does not see them.
  const bool all =
      tile == 0 && split == 0 && (seen.lowest * kN > fresh || seen.highest * kN < s.length_k);
  const int from = all ? fresh : max(fresh, begin * kN),
            to = all ? s.length_k : min(s.length_k, end * kN);
  if (from < to) {
    append_tokens<T>(p, s, from, to);
    __threadfence();  // cp.async reads them from the L2 cache
  }
  // Rotate Q, and put it where this block's last stage will be.
  const u32 q = whole + (kStages - 1) * kStage;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kM * kDim / 8; i += Shape::kThreads) {
    const int row = i / (kDim / 8), column = i % (kDim / 8) * 8, query = (first + row) / group;
    uint4 value = {0, 0, 0, 0};
    if (first + row < rows_there && column < problem.head_dim) {
      const Sequence of(problem, s.batch, s.head + (first + row) % group);
      value = rotated(p.rotary, of.rows_q<const T>(call.q, query), column,
                      s.cached + (p.rotary.by_query ? query : 0));
    }
    store_shared(Q::place(q, row, column / 8), value);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (const int n = begin + warp + i * kWarps; !is_old(n)) load(n, i);
  }

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
  for (int step = 0; step < kDim / 16; ++step) Q::load_left(own.q[step], q, 0, 16 * step);
  __syncthreads();  // the stage is free

  // Online softmax over this warp's blocks.
  const float scale = exponent_scale<Modifier>(problem);
  float out[kDimV / 2] = {};
  Rows rows;
  int stage = 0;
#pragma unroll 1
  for (int n = begin + warp; n < end; n += kWarps) {
    async_wait(kStages - 2);
    __syncwarp();  // block n is there, and the one before no longer used
    load(n + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
    const u32 k = ring + stage * kStage, v = k + K::kBytes;
    attend_block<T>(own, k, v, n * kN, scale, rows, out);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // Combine the warps, and write the result, or the part.
  async_wait(0);
  __syncthreads();
  const bool alone = seen.parts == 1;
  combine_warps<Shape>(
      reinterpret_cast<float*>(memory), rows, out, scale, rows_there - first, problem.head_dim_v,
      [&](int at) {
        return alone && call.sinks ? call.sinks + s.head + (first + at) % group : nullptr;
      },
      [&](int at, int column, const float (&o)[8], const Total& total) {
        const Sequence of(problem, s.batch, s.head + (first + at) % group);
        const int of_query = (first + at) / group;
        if (alone) {
          store_columns<T>(call, of, of_query, column, o);
          if (column == 0) store_log_sum(call, of, of_query, total.log2_sum());
          return;
        }
        const i64 to = part_row(p.decode, split, of, of_query);
        store_part(p.decode.parts + to * problem.head_dim_v + column, o);
        if (column == 0) p.decode.parts_sums[to] = total.log2_sum();
      });
}

/// Grid: batch * heads_q * length_q blocks of 128, one for each query and head.
template <class T>
__global__ void __launch_bounds__(128) cached_combine(const FLEXOPS_GRID_CONSTANT CacheParams p) {
  const Problem& problem = p.decode.call.problem;
  const int query = static_cast<int>(blockIdx.x) % problem.length_q,
            both = static_cast<int>(blockIdx.x) / problem.length_q, head = both % problem.heads_q;
  constexpr int kM = 16;
  const Cached s(p, both / problem.heads_q, head);
  const TileKeys seen(p, s, (query * problem.group + head % problem.group) / kM, kM, p.keys);
  if (seen.parts > 1) combine_splits<T>(p.decode, s, query, seen.parts);
}

}  // namespace flexops::attention
