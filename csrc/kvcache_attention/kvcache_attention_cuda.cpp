// Attention over a cache: tiles, in how many parts keys are cut, and who appends.

#include "kvcache_attention/kvcache_attention.h"

#include "attention/attention_launch.h"
#include "kvcache_attention/kvcache_attention.cuh"
#include "kvcache_attention/kvcache_attention_launch.h"

namespace flexops::attention {
namespace {

constexpr int64_t kMostFused = 8;  // tiles of queries that append the same tokens
// A cluster of 8 parts, without cached_combine, is faster than more parts of so many tokens.
constexpr int64_t kMostCluster = 8, kClusterTokens = 2048;

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
  if (c.splits > 0) return least(c.splits, kMostKeyParts);
  const int64_t tiles = decode_tiles(a, tiling.rows),
                splits = choose_splits(a, tiles, tiling.threads, tiling.bytes);
  const bool clusters = gpu_facts().capability >= 90 && tiles == 1 && a.length_k <= kClusterTokens;
  return clusters ? least(splits, kMostCluster) : splits;
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
  CacheParams p = make_cache(c, tiling, none ? 1 : splits_of(c, tiling), workspace);
  p.decode.parts_sums = p.decode.parts + p.decode.splits * rows_of(a) * a.head_dim_v;
  p.fused = c.added > 0 && !none && p.decode.call.tiles <= kMostFused;
  p.overlaps = overlaps(c, 16), p.early = c.early && p.overlaps && (p.fused || c.added == 0);
  const int64_t all = a.batch * a.heads_k * p.decode.call.tiles;
  if (!fits_grid(all, p.decode.splits, 1) || !fits_grid(a.batch, a.heads_k, c.added) ||
      !fits_grid(rows_of(a), 1, 1))
    return kTooMany;
  if (c.added > 0 && !p.fused)
    launch(kAppend.of(a), {blocks(a.batch * a.heads_k * c.added), {64}, stream}, p);
  if (none) return last_error();
  p.cluster = gpu_facts().capability >= 90 && p.decode.call.tiles == 1 && p.decode.splits > 1 &&
              p.decode.splits <= kMostCluster;
  launch_tiles(tiling, a, all * p.decode.splits, stream, p, p.overlaps,
               p.cluster ? p.decode.splits : 1);
  if (p.decode.splits > 1 && !p.cluster) launch_combine(kCombine, a, stream, p.overlaps, p);
  return last_error();
}

}  // namespace flexops
