// Attention of few queries: tiles, and in how many parts keys are cut.

#include "attention/attention_decode.cuh"

#include "attention/attention_launch.h"

namespace flexops::attention {
namespace {

int splits_wanted = -1;  // tests' choice; see the end of this file

template <int D, int DV, int kWarps, int N>
constexpr Tiling<DecodeParams> tiling() {
  return tiling_of<Decode<bf16, D, DV, kWarps, N>, DecodeParams>(
      D, DV, N, FLEXOPS_VARIANTS(decode, D, DV, kWarps, N));  // N: keys of a warp's blocks
}
constexpr Tiling<DecodeParams> kTilings[] = {tiling<64, 64, 4, 32>(), tiling<128, 128, 4, 16>(),
                                             tiling<192, 128, 2, 16>(), tiling<256, 256, 2, 16>()};
constexpr PerType<DecodeParams> kCombine = FLEXOPS_PER_TYPE(kernel, decode_combine);

int64_t splits_of(const Attention& a, const Tiling<DecodeParams>& tiling) {
  return splits_wanted > 0
             ? least(splits_wanted, kMostKeyParts)
             : choose_splits(a, decode_tiles(a, tiling.rows), tiling.threads, tiling.bytes);
}

}  // namespace

/// Tiles of 16 rows read the same keys again: up to 4 of them, which find these in the L2 cache.
bool takes_decode(const Attention& a) {
  return splits_wanted != 0 && a.length_q * (a.heads_q / a.heads_k) <= 64;
}

int64_t decode_workspace(const Attention& a) {
  return decode_workspace_of(a, splits_of(a, first_fitting(kTilings, a)));
}

const char* launch_decode(const AttentionForward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  const Tiling<DecodeParams>& tiling = first_fitting(kTilings, a);
  DecodeParams p = {};
  p.call = make_forward(c, tiling);
  p.call.tiles = static_cast<int>(decode_tiles(a, tiling.rows));
  p.splits = static_cast<int>(splits_of(a, tiling));
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
