// Attention's forward launcher: tiles, tensor maps and grid.

#include "attention/attention_forward.cuh"
#include "attention/attention_forward_hopper.cuh"
#include "attention/attention_launch.h"

namespace flexops {
namespace attention {
namespace {

template <int D, int DV, int G, int N>
constexpr Tiling<ForwardHopperParams> hopper_tiling() {
  return tiling_of<ForwardHopper<bf16, D, DV, G, N>, ForwardHopperParams>(
      D, DV, N, FLEXOPS_VARIANTS(forward_hopper, D, DV, G, N));
}
template <int D, int DV, int kTiles, int N>
constexpr Tiling<ForwardParams> tiling() {
  return tiling_of<ForwardShape<bf16, D, DV, kTiles, N>, ForwardParams>(
      D, DV, N, FLEXOPS_VARIANTS(forward, D, DV, kTiles, N));
}

const Tiling<ForwardHopperParams>& choose_hopper(const Attention& a) {
  static constexpr Tiling<ForwardHopperParams> kTilings[] = {
      hopper_tiling<32, 32, 3, 128>(),   hopper_tiling<64, 64, 3, 128>(),
      hopper_tiling<96, 96, 2, 128>(),   hopper_tiling<128, 128, 2, 128>(),
      hopper_tiling<192, 128, 2, 128>(), hopper_tiling<192, 192, 2, 112>(),
      hopper_tiling<256, 256, 2, 80>()};
  static constexpr Tiling<ForwardHopperParams> kLong = hopper_tiling<128, 128, 2, 176>();
  const auto& found = first_fitting(kTilings, a);
  return found.dim == kLong.dim && a.length_k >= 8192 ? kLong : found;
}
const Tiling<ForwardParams>& choose(const Attention& a) {
  static constexpr Tiling<ForwardParams> kTilings[] = {
      tiling<32, 32, 2, 64>(),   tiling<64, 64, 2, 128>(),  tiling<96, 96, 1, 128>(),
      tiling<128, 128, 2, 64>(), tiling<192, 128, 1, 64>(), tiling<192, 192, 1, 64>(),
      tiling<256, 256, 1, 64>()};
  return first_fitting(kTilings, a);
}

const char* launch_forward(const AttentionForward& c, void* stream) {
  const Attention& a = c.problem;
  const auto& tiling = choose(a);
  const ForwardParams p = make_forward(c, tiling);
  if (!fits_grid(p.tiles, a.batch, a.heads_q)) return kTooMany;
  launch_tiles(tiling, a, p.tiles * a.batch * a.heads_q, stream, p);
  return last_error();
}

int64_t tiles_of(const Attention& a, const Tiling<ForwardHopperParams>& tiling) {
  return ceil_div(a.length_q, tiling.rows) * a.batch * a.heads_q;
}
/// Blocks of threads take tiles by a counter, which has to be allocated and set; of two for each
/// multiprocessor nothing is to be won.
bool takes_counter(int64_t tiles) { return tiles > 2 * gpu_facts().processors; }

const char* launch_forward_hopper(const AttentionForward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  const auto& tiling = choose_hopper(a);
  const ForwardParams call = make_forward(c, tiling);
  if (!fits_grid(call.tiles, a.batch, a.heads_q)) return kTooMany;
  ForwardHopperParams p = make_maps(c, tiling);
  p.call = call;
  const int64_t tiles = tiles_of(a, tiling), grid = least(tiles, gpu_facts().processors);
  if (takes_counter(tiles)) {
    p.counter = static_cast<int*>(workspace);
    set_zero(static_cast<uint32_t*>(workspace), 1, stream);
  }
  launch_tiles(tiling, a, grid, stream, p);
  return last_error();
}

}  // namespace
}  // namespace attention

int64_t attention_workspace(const AttentionForward& call) {
  const Attention& a = call.problem;
  if (attention::is_empty(a) || a.length_q == 0) return 0;
  if (attention::takes_decode(a)) return attention::decode_workspace(a);
  return attention::takes_hopper(a) &&
                 attention::takes_counter(attention::tiles_of(a, attention::choose_hopper(a)))
             ? 256
             : 0;
}

const char* attention_cuda(const AttentionForward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  if (attention::is_empty(a) || a.length_q == 0) return nullptr;
  if (attention::takes_decode(a)) return attention::launch_decode(c, workspace, stream);
  return attention::takes_hopper(a) ? attention::launch_forward_hopper(c, workspace, stream)
                                    : attention::launch_forward(c, stream);
}

}  // namespace flexops

// For tests, which run all ways on one GPU: 0 leaves Hopper's own kernels out.
extern "C" __attribute__((visibility("default"))) void flexops_attention_hopper(int allowed) {
  flexops::attention::hopper_allowed = allowed != 0;
}
