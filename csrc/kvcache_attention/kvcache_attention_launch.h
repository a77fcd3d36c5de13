// What the launchers of attention over a cache share.
#pragma once

#include "attention/attention_launch.h"
#include "kvcache_attention/kvcache_attention.cuh"
#include "kvcache_attention/kvcache_attention.h"

namespace flexops::attention {

inline Rotary rotary_of(const CacheAttention& c) {
  const Attention& a = c.attend.problem;
  return {c.cos,
          c.sin,
          c.cos_row,
          c.sin_row,
          static_cast<int>(c.half),
          static_cast<int>(c.positions),
          c.rotary_type,
          c.interleaved,
          c.from_leftpad,
          a.window_left >= 0 || a.window_right >= 0,
          c.half % 8 == 0 && aligned(c.cos) && aligned(c.sin) && c.cos_row % 8 == 0 &&
              c.sin_row % 8 == 0};
}

/// But for the grid.
template <class Tiling>
CacheParams make_cache(const CacheAttention& c, const Tiling& tiling, int64_t splits,
                       void* workspace) {
  const Attention& a = c.attend.problem;
  CacheParams p = {};
  p.decode.call = make_forward(c.attend, tiling);
  p.decode.call.tiles = static_cast<int>(decode_tiles(a, tiling.rows));
  p.decode.splits = static_cast<int>(splits);
  p.decode.parts = static_cast<float*>(workspace);
  p.new_k = make_tensor(c.new_k), p.new_v = make_tensor(c.new_v);
  p.added = static_cast<int>(c.added), p.length = static_cast<int>(c.length), p.seqlens = c.seqlens,
  p.batch_idx = c.batch_idx, p.leftpad = c.leftpad;
  p.table = c.table, p.table_row = c.table_row, p.page = make_divisor(c.page > 0 ? c.page : 1),
  p.rows = static_cast<int>(c.rows);
  p.keys = tiling.keys, p.least = tiling.threads / 32;  // a block of keys for each warp
  p.rotary = rotary_of(c);
  return p;
}
inline int64_t rows_of(const Attention& a) { return a.batch * a.heads_q * a.length_q; }

/// Whether a call's kernels start beside the one before: of a small one, whose time is latency. A
/// large one's blocks would be where that one ends first, two on some multiprocessors: on an H200 8
/// MB took 11.5 us and not 12.8, 33 MB 19.9 and not 18.2.
inline bool overlaps(const CacheAttention& c, int64_t bits) {
  constexpr int64_t kMost = 16 << 20;
  const Attention& a = c.attend.problem;
  return gpu_facts().capability >= 90 &&
         a.batch * a.heads_k * a.length_k * (a.head_dim + a.head_dim_v) * bits / 8 <= kMost;
}

/// Puts parts together: a block for each query and head.
template <class Params>
void launch_combine(const PerType<Params>& kernels, const Attention& a, void* stream, bool early,
                    const Params& p) {
  LaunchConfig config{blocks(rows_of(a)), {128}, stream};
  config.early = early;
  launch(kernels.of(a), config, p);
}

}  // namespace flexops::attention
