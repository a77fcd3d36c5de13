// Attention over a cache: tiles, in how many parts keys are cut, and who appends.

#include "kvcache_attention/kvcache_attention.h"

#include "attention/attention_launch.h"
#include "kvcache_attention/kvcache_attention.cuh"

namespace flexops::attention {
namespace {

constexpr int64_t kMostFused = 8;  // tiles of queries that append the same tokens

template <int D, int DV, int kWarps, int N>
constexpr Tiling<CacheParams> tiling() {
  using Shape = Decode<bf16, D, DV, kWarps, N>;
  return {
      D,
      DV,
      Shape::kM,
      N,
      Shape::kThreads,
      Shape::kBytes,
      {{FLEXOPS_PER_TYPE(kernel, cached_attend, D, DV, kWarps, N, Plain),
        FLEXOPS_PER_TYPE(rare_kernel, cached_attend, D, DV, kWarps, N,
                         Modified<true, false, false>),
        FLEXOPS_PER_TYPE(rare_kernel, cached_attend, D, DV, kWarps, N,
                         Modified<false, true, false>),
        {},
        FLEXOPS_PER_TYPE(rare_kernel, cached_attend, D, DV, kWarps, N, Modified<true, true, false>),
        {}}}};
}
constexpr Tiling<CacheParams> kTilings[] = {tiling<64, 64, 4, 32>(), tiling<128, 128, 4, 16>(),
                                            tiling<192, 128, 2, 16>(), tiling<256, 256, 2, 16>()};
constexpr PerType<CacheParams> kAppend = FLEXOPS_PER_TYPE(kernel, append_new),
                               kCombine = FLEXOPS_PER_TYPE(kernel, cached_combine);

int64_t splits_of(const CacheAttention& c, const Tiling<CacheParams>& tiling) {
  const Attention& a = c.attend.problem;
  return c.splits > 0
             ? least(c.splits, kMostKeyParts)
             : choose_splits(a, decode_tiles(a, tiling.rows), tiling.threads, tiling.bytes);
}

Rotary rotary_of(const CacheAttention& c) {
  const Attention& a = c.attend.problem;
  return {c.cos,
          c.sin,
          c.cos_row,
          c.sin_row,
          static_cast<int>(c.half),
          static_cast<int>(c.positions),
          c.rotary_type,
          c.interleaved,
          a.window_left >= 0 || a.window_right >= 0};
}

}  // namespace
}  // namespace flexops::attention

namespace flexops {

using namespace attention;

int64_t kvcache_attention_workspace(const CacheAttention& c) {
  const Attention& a = c.attend.problem;
  if (is_empty(a) || a.length_q == 0) return 0;
  return decode_workspace_of(a, splits_of(c, first_fitting(kTilings, a)));
}

const char* kvcache_attention_cuda(const CacheAttention& c, void* workspace, void* stream) {
  const Attention& a = c.attend.problem;
  const bool none = is_empty(a) || a.length_q == 0;
  if (a.batch == 0 || a.heads_k == 0 || (none && c.added == 0)) return nullptr;
  const Tiling<CacheParams>& tiling = first_fitting(kTilings, a);
  CacheParams p = {};
  p.decode.call = make_forward(c.attend, tiling);
  const int64_t tiles = decode_tiles(a, tiling.rows), rows = a.batch * a.heads_q * a.length_q;
  p.decode.call.tiles = static_cast<int>(tiles);
  p.decode.splits = static_cast<int>(none ? 1 : splits_of(c, tiling));
  p.decode.parts = static_cast<float*>(workspace);
  p.decode.parts_sums = p.decode.parts + p.decode.splits * rows * a.head_dim_v;
  p.new_k = make_tensor(c.new_k), p.new_v = make_tensor(c.new_v);
  p.added = static_cast<int>(c.added), p.fused = c.added > 0 && !none && tiles <= kMostFused;
  p.length = static_cast<int>(c.length), p.seqlens = c.seqlens, p.batch_idx = c.batch_idx,
  p.leftpad = c.leftpad;
  p.table = c.table, p.table_row = c.table_row, p.page = static_cast<int>(c.page),
  p.rows = static_cast<int>(c.rows);
  p.keys = tiling.keys, p.least = tiling.threads / 32;  // a block of keys for each warp
  p.rotary = rotary_of(c);
  const int64_t all = a.batch * a.heads_k * tiles;
  if (!fits_grid(all, p.decode.splits, 1) || !fits_grid(a.batch, a.heads_k, c.added) ||
      !fits_grid(rows, 1, 1))
    return kTooMany;
  if (c.added > 0 && !p.fused)
    launch(kAppend.of(a), {blocks(a.batch * a.heads_k * c.added), {64}, stream}, p);
  if (none) return last_error();
  launch_tiles(tiling, a, all * p.decode.splits, stream, p);
  if (p.decode.splits > 1) launch(kCombine.of(a), {blocks(rows), {128}, stream}, p);
  return last_error();
}

}  // namespace flexops
