// Attention's backward launcher: tiles, tensor maps, and the kernels of rows before and after.

#include "attention/attention_backward.cuh"
#include "attention/attention_backward_hopper.cuh"
#include "attention/attention_backward_queries_hopper.cuh"
#include "attention/attention_launch.h"

namespace flexops {
namespace attention {
namespace {

// ---- which kernels there are ------------------------------------------------------------------------------------------------------------

/// Tiles of keys, with the kernels before and after them.
template <class Params>
struct Backward : Tiling<Params> {
  PerType<BackwardRowsParams> before, after;
};
template <int D>
constexpr Backward<BackwardHopperParams> hopper_tiling() {
  using Shape = BackwardHopper<D, D, true>;
  return {{D, D, Shape::kM, Shape::kN, Shape::kThreads, Shape::kBytes, FLEXOPS_COMMON_VARIANTS(backward_hopper, D, D, true)},
          FLEXOPS_PER_COMMON_TYPE(backward_before, D),
          FLEXOPS_PER_COMMON_TYPE(backward_after, D)};
}
template <int D, int M, int N, int kStages>
constexpr Backward<BackwardParams> tiling() {
  using Shape = BackwardShape<bf16, D, D, M, N, kStages>;
  return {{D, D, M, N, Shape::kThreads, Shape::kBytes, FLEXOPS_COMMON_VARIANTS(backward, D, D, M, N, kStages)},
          FLEXOPS_PER_COMMON_TYPE(backward_before, D),
          FLEXOPS_PER_COMMON_TYPE(backward_after_mma, D, M)};
}

/// Where dQ is to be summed in a fixed order: dK and dV, and dQ, by kernels of their own.
struct Apart {
  Tiling<BackwardHopperParams> keys, queries;
  PerType<BackwardRowsParams> before;
};
template <int D, int N, int kStagesV>
constexpr Apart apart_tiling() {
  using Keys = BackwardHopper<D, D, false>;
  using Queries = QueryGradient<D, D, N, 2, kStagesV>;
  return {
      {D, D, Keys::kM, Keys::kN, Keys::kThreads, Keys::kBytes, FLEXOPS_COMMON_VARIANTS(backward_hopper, D, D, false)},
      {D, D, Queries::kM, N, Queries::kThreads, Queries::kBytes, FLEXOPS_COMMON_VARIANTS(backward_queries_hopper, D, D, N, 2, kStagesV)},
      FLEXOPS_PER_COMMON_TYPE(backward_before, D)};
}

/// Tests' choice: more shared memory than this a block does not have.
int64_t shared_allowed = INT64_MAX;

int64_t widest(const Attention& a) { return a.head_dim > a.head_dim_v ? a.head_dim : a.head_dim_v; }

const Apart& choose_apart(const Attention& a) {
  static constexpr Apart kNarrow = apart_tiling<64, 128, 2>(), kWide = apart_tiling<128, 128, 2>(), kWidest = apart_tiling<256, 64, 1>();
  return widest(a) <= 64 ? kNarrow : widest(a) <= 128 ? kWide : kWidest;
}
/// Of up to 128 columns.
const Backward<BackwardHopperParams>& choose_hopper(const Attention& a) {
  static constexpr Backward<BackwardHopperParams> kNarrow = hopper_tiling<64>(), kWide = hopper_tiling<128>();
  return widest(a) <= kNarrow.dim ? kNarrow : kWide;
}
const Backward<BackwardParams>& choose(const Attention& a) {
  static constexpr Backward<BackwardParams> kTilings[] = {tiling<64, 64, 128, 2>(), tiling<128, 64, 128, 2>(), tiling<128, 32, 128, 1>(),
                                                          tiling<256, 64, 64, 1>(), tiling<256, 32, 64, 1>()};
  for (const auto& tiling : kTilings) {
    if (widest(a) <= tiling.dim && tiling.bytes <= least(gpu_facts().shared_of_block, shared_allowed)) return tiling;
  }
  return kTilings[4];
}

/// Of more than 128 columns that is faster, too.
bool takes_apart(const AttentionBackward& c) { return c.deterministic || widest(c.problem) > 128; }

// ---- what kernels are told --------------------------------------------------------------------------------------------------------------

int64_t padded_rows(const Attention& a) {
  return kRowTile * (a.packed() ? ceil_div(a.rows_q + a.batch * kRowTile, kRowTile) : a.batch * ceil_div(a.length_q, kRowTile));
}

BackwardRowsParams make_rows(const AttentionBackward& c, float* workspace) {
  const int64_t padded = padded_rows(c.problem), rows = c.problem.heads_q * padded;
  BackwardRowsParams r = {};
  r.problem = make_problem(c.problem);
  r.o = make_tensor(c.o), r.d_o = make_tensor(c.d_o), r.dq = make_tensor(c.dq);
  r.lse = c.lse, r.d_lse = c.d_lse, r.lse_batch = c.lse_batch, r.lse_head = c.lse_head;
  r.exponent = workspace, r.delta = workspace + rows, r.dq_sums = workspace + 2 * rows, r.padded_rows = padded;
  return r;
}

/// How many key heads' tiles are handed out together: at least so many that all multiprocessors have a block of them, and none much smaller
/// than the others. The last one's long blocks are otherwise alone at the end.
int section_of_keys(int64_t heads, int64_t bytes_of_head, int64_t tiles) {
  const int64_t fewest = ceil_div(gpu_facts().processors, tiles > 0 ? tiles : 1), fitting = section_of(heads, bytes_of_head, 1);
  const int64_t sections = heads / least(heads, fewest > fitting ? fewest : fitting);
  return static_cast<int>(ceil_div(heads, sections));
}

/// Of the kernel that goes over keys in blocks of `keys`.
BackwardParams make_backward(const AttentionBackward& c, const BackwardRowsParams& r, int64_t dim, int64_t keys) {
  const Attention& a = c.problem;
  BackwardParams p = {};
  p.problem = r.problem;
  p.q = make_tensor(c.q), p.k = make_tensor(c.k), p.v = make_tensor(c.v), p.d_o = r.d_o;
  p.dk = make_tensor(c.dk), p.dv = make_tensor(c.dv), p.dq = r.dq;
  p.exponent = r.exponent, p.delta = r.delta, p.dq_sums = r.dq_sums, p.padded_rows = r.padded_rows;
  p.tiles = static_cast<int>(ceil_div(a.length_k, keys));
  p.section = section_of_keys(a.batch * a.heads_k, a.length_q * (a.heads_q / a.heads_k) * dim * 8, p.tiles);  // Q, dO, and dQ in float32
  return p;
}

BackwardHopperParams make_all_maps(const AttentionBackward& c, const Tiling<BackwardHopperParams>& tiling) {
  const Attention& a = c.problem;
  BackwardHopperParams p = make_maps(c, tiling);
  p.d_o = make_map(c.d_o, a, a.head_dim_v, a.rows_q, a.heads_q, tiling.dim_v, tiling.rows);
  return p;
}

// ---- launches ---------------------------------------------------------------------------------------------------------------------------

LaunchConfig rows_config(const Attention& a, int64_t rows, void* stream) {
  return {blocks(ceil_div(a.length_q, rows), a.heads_q, a.batch), {kRowThreads}, stream};
}

/// The kernel of a tiling, between those of rows. `params`: its parameters, of what it is told of a call.
template <class Params, class MakeParams>
const char* launch_backward(const AttentionBackward& c, const Backward<Params>& tiling, float* workspace, void* stream,
                            const MakeParams& params) {
  const Attention& a = c.problem;
  const BackwardRowsParams r = make_rows(c, workspace);
  BackwardParams p = make_backward(c, r, tiling.dim, tiling.keys);
  const int tiles = p.tiles;
  if (!fits_grid(tiles, a.batch, a.heads_k)) return kTooMany;
  if (a.length_q > 0) launch(tiling.before.of(a), rows_config(a, kRowTile, stream), r);
  // In a fixed order, blocks of keys are launches of their own: within one, each element of dQ is added to once.
  const int each = c.deterministic ? 1 : tiles;
  for (int first = 0; first < tiles; first += each) {
    p.first_tile = first, p.tiles = each;
    launch_tiles<Params>(tiling, a, each * a.batch * a.heads_k, stream, params(p));
  }
  if (a.length_q > 0) launch(tiling.after.of(a), rows_config(a, tiling.rows, stream), r);
  return last_error();
}

/// On Hopper in a fixed order: dK and dV, then dQ, by kernels of their own.
const char* launch_apart(const AttentionBackward& c, float* workspace, void* stream) {
  const Attention& a = c.problem;
  const Apart& tiling = choose_apart(a);
  BackwardRowsParams r = make_rows(c, workspace);
  r.dq_sums = nullptr;
  launch(tiling.before.of(a), rows_config(a, kRowTile, stream), r);
  BackwardHopperParams keys = make_all_maps(c, tiling.keys);
  keys.call = make_backward(c, r, tiling.keys.dim, tiling.keys.keys);
  if (!fits_grid(keys.call.tiles, a.batch, a.heads_k)) return kTooMany;
  launch_tiles(tiling.keys, a, keys.call.tiles * a.batch * a.heads_k, stream, keys);
  BackwardHopperParams queries = make_all_maps(c, tiling.queries);
  queries.call = keys.call;
  const int64_t group = a.heads_q / a.heads_k;
  queries.call.tiles = static_cast<int>(ceil_div(a.length_q, tiling.queries.rows));
  queries.call.section = section_of(a.batch * a.heads_q, a.length_k * tiling.queries.dim * 4 / group, group);  // K and V
  if (!fits_grid(queries.call.tiles, a.batch, a.heads_q)) return kTooMany;
  launch_tiles(tiling.queries, a, queries.call.tiles * a.batch * a.heads_q, stream, queries);
  return last_error();
}

}  // namespace
}  // namespace attention

int64_t attention_workspace(const AttentionBackward& call) {
  const Attention& a = call.problem;
  if (attention::is_empty(a)) return 0;
  const int64_t dim = !attention::takes_hopper(a)    ? attention::choose(a).dim
                      : attention::takes_apart(call) ? 0
                                                     : attention::choose_hopper(a).dim;
  return a.heads_q * attention::padded_rows(a) * (2 + dim) * 4;
}

const char* attention_backward_cuda(const AttentionBackward& c, void* workspace, void* stream) {
  using namespace attention;
  const Attention& a = c.problem;
  float* const floats = static_cast<float*>(workspace);
  if (is_empty(a)) return nullptr;
  if (!takes_hopper(a)) return launch_backward(c, choose(a), floats, stream, [](const BackwardParams& call) { return call; });
  if (takes_apart(c)) return launch_apart(c, floats, stream);
  const auto& tiling = choose_hopper(a);
  BackwardHopperParams p = make_all_maps(c, tiling);
  return launch_backward(c, tiling, floats, stream, [&](const BackwardParams& call) { return p.call = call, p; });
}

}  // namespace flexops

// For tests, which run on one GPU what others with less shared memory take.
extern "C" __attribute__((visibility("default"))) void flexops_attention_shared(int64_t bytes) {
  flexops::attention::shared_allowed = bytes;
}
