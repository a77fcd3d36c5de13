// Attention of few queries: tiles, and in how many parts keys are cut.

#include "attention/attention_decode.cuh"

#include "attention/attention_launch.h"

namespace flexops::attention {
namespace {

int splits_wanted = -1;  // tests' choice; see the end of this file

template <int D, int DV, int kWarps, int N>
constexpr Tiling<DecodeParams> tiling() {
  using Shape = Decode<bf16, D, DV, kWarps, N>;
  return {D,
          DV,
          Shape::kM,
          N,
          Shape::kThreads,
          Shape::kBytes,
          FLEXOPS_VARIANTS(decode, D, DV, kWarps, N)};  // N: keys of a warp's blocks
}
constexpr Tiling<DecodeParams> kTilings[] = {tiling<64, 64, 4, 32>(), tiling<128, 128, 4, 16>(),
                                             tiling<192, 128, 2, 16>(), tiling<256, 256, 2, 16>()};
constexpr PerType<DecodeParams> kCombine = FLEXOPS_PER_TYPE(kernel, decode_combine);

int64_t tiles_of(const Attention& a, const Tiling<DecodeParams>& tiling) {
  return ceil_div(a.length_q * (a.heads_q / a.heads_k), tiling.rows);
}

/// In how many parts keys are cut: what takes the least time, counted in bytes that memory moves
/// meanwhile. A block of threads alone gets a share of memory's bandwidth only, and parts have to
/// be put together again.
int choose_splits(const Attention& a, const Tiling<DecodeParams>& tiling) {
  constexpr int64_t kLeastKeys = 64, kCombineBytes = 12 << 20;
  if (splits_wanted > 0) return static_cast<int>(least(splits_wanted, kMostSplits));
  const Gpu& gpu = gpu_facts();
  const int64_t resident =
      gpu.processors * (gpu.shared_of_processor >= 2 * (tiling.bytes + 1024) ? 2 : 1);
  const int64_t alone = gpu.processors * 9 / 16 * 128 /
                        tiling.threads;  // measured on an H200: so many blocks have all of it
  const int64_t each = tiles_of(a, tiling) * a.batch * a.heads_k;
  int64_t seen = a.length_k;
  if (a.window_left >= 0 && a.window_right >= 0)
    seen = least(seen, a.window_left + a.window_right + a.length_q);
  const int64_t bytes = seen * (a.head_dim + a.head_dim_v) * 2,
                part = a.batch * a.heads_q * a.length_q * a.head_dim_v * 8;
  const auto cost = [&](int64_t splits) {
    const int64_t all = splits * each, rest = all % resident;
    const int64_t moved = all - rest + (rest == 0 ? 0 : rest > alone ? rest : alone);
    return moved * bytes / splits + (splits > 1 ? kCombineBytes + splits * part : 0);
  };
  const int64_t most = least(least(kMostSplits, seen / kLeastKeys), 2 * resident / each + 1);
  int64_t best = 1, least_cost = cost(1);
  for (int64_t splits = 2; splits <= most; ++splits) {
    const int64_t found = cost(splits);
    if (found < least_cost) best = splits, least_cost = found;
  }
  return static_cast<int>(best);
}

}  // namespace

/// Tiles of 16 rows read the same keys again: up to 4 of them, which find these in the L2 cache.
bool takes_decode(const Attention& a) {
  return splits_wanted != 0 && a.length_q * (a.heads_q / a.heads_k) <= 64;
}

int64_t decode_workspace(const Attention& a) {
  const int64_t splits = choose_splits(a, first_fitting(kTilings, a));
  return splits > 1 ? splits * a.batch * a.heads_q * a.length_q * (a.head_dim_v + 1) * 4 : 0;
}

const char* launch_decode(const AttentionForward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  const Tiling<DecodeParams>& tiling = first_fitting(kTilings, a);
  DecodeParams p = {};
  p.call = make_forward(c, tiling);
  p.call.tiles = static_cast<int>(tiles_of(a, tiling));
  p.splits = choose_splits(a, tiling);
  const int64_t rows = a.batch * a.heads_q * a.length_q, all = a.batch * a.heads_k * p.call.tiles;
  p.parts = static_cast<float*>(workspace), p.parts_sums = p.parts + p.splits * rows * a.head_dim_v;
  if (!fits_grid(all, p.splits, 1)) return kTooMany;
  launch_tiles(tiling, a, all * p.splits, stream, p);
  if (p.splits > 1) launch(kCombine.of(a), {blocks(rows), {128}, stream}, p);
  return last_error();
}

}  // namespace flexops::attention

// For tests, which run all ways on one GPU. Splits of the keys of few queries: so many; 0 takes the
// kernels for many queries, -1 what is chosen otherwise.
extern "C" __attribute__((visibility("default"))) void flexops_attention_splits(int wanted) {
  flexops::attention::splits_wanted = wanted;
}
