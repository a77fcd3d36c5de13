// Attention's backward launcher: tiles, tensor maps, and the kernels of rows before and after.

#include "attention/attention_backward.cuh"
#include "attention/attention_backward_hopper.cuh"
#include "attention/attention_backward_queries_hopper.cuh"
#include "attention/attention_launch.h"

namespace flexops {
namespace attention {
namespace {

// ---- which kernels there are ----

/// Tiles of keys, with the kernels before and after them.
template <class Params>
struct Backward : Tiling<Params> {
  PerType<BackwardRowsParams> before, after;
};
template <int D>
constexpr Backward<BackwardHopperParams> hopper_tiling() {
  using Shape = BackwardHopper<D, D, true>;
  return {{D, D, Shape::kM, Shape::kN, Shape::kThreads, Shape::kBytes,
           FLEXOPS_COMMON_VARIANTS(backward_hopper, D, D, true)},
          FLEXOPS_PER_COMMON_TYPE(backward_before, D),
          FLEXOPS_PER_COMMON_TYPE(backward_after, D)};
}
template <int D, int M, int N, int kStages>
constexpr Backward<BackwardParams> tiling() {
  using Shape = BackwardShape<bf16, D, D, M, N, kStages>;
  return {{D, D, M, N, Shape::kThreads, Shape::kBytes,
           FLEXOPS_COMMON_VARIANTS(backward, D, D, M, N, kStages)},
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
  return {{D, D, Keys::kM, Keys::kN, Keys::kThreads, Keys::kBytes,
           FLEXOPS_COMMON_VARIANTS(backward_hopper, D, D, false)},
          {D, D, Queries::kM, N, Queries::kThreads, Queries::kBytes,
           FLEXOPS_COMMON_VARIANTS(backward_queries_hopper, D, D, N, 2, kStagesV)},
          FLEXOPS_PER_COMMON_TYPE(backward_before, D)};
}

/// Tests' choice: more shared memory than this a block does not have.
int64_t shared_allowed = INT64_MAX;
/// Tests' choice: 1: each query head has blocks of its own, 0: a block goes over all that share a
/// key head, -1: whichever is quicker.
int heads_split = -1;

int64_t widest(const Attention& a) { return a.head_dim > a.head_dim_v ? a.head_dim : a.head_dim_v; }

const Apart& choose_apart(const Attention& a) {
  static constexpr Apart kNarrow = apart_tiling<64, 128, 2>(), kWide = apart_tiling<128, 128, 2>(),
                         kWidest = apart_tiling<256, 64, 1>();
  return widest(a) <= 64 ? kNarrow : widest(a) <= 128 ? kWide : kWidest;
}
/// Of up to 128 columns.
const Backward<BackwardHopperParams>& choose_hopper(const Attention& a) {
  static constexpr Backward<BackwardHopperParams> kNarrow = hopper_tiling<64>(),
                                                  kWide = hopper_tiling<128>();
  return widest(a) <= kNarrow.dim ? kNarrow : kWide;
}
const Backward<BackwardParams>& choose(const Attention& a) {
  static constexpr Backward<BackwardParams> kTilings[] = {
      tiling<64, 64, 128, 2>(), tiling<128, 64, 128, 2>(), tiling<128, 32, 128, 1>(),
      tiling<256, 64, 64, 1>(), tiling<256, 32, 64, 1>()};
  for (const auto& tiling : kTilings) {
    if (widest(a) <= tiling.dim &&
        tiling.bytes <= least(gpu_facts().shared_of_block, shared_allowed))
      return tiling;
  }
  return kTilings[4];
}

/// Of more than 128 columns that is faster, too.
bool takes_apart(const AttentionBackward& c) { return c.deterministic || widest(c.problem) > 128; }

// ---- the kernels' parameters ----

/// Whether a query head has blocks of its own, whose dK and dV are then added up, or a block goes
/// over all query heads that share a key head. The latter takes the fewest passes over memory, but
/// leaves multiprocessors idle where there are few blocks, or one that is longer than the others.
/// In tiles of queries, and as an H200 has it, a block costs four more, and adding up six.
bool splits_heads(const AttentionBackward& c) {
  constexpr int64_t kOfBlock = 4, kOfSums = 6;
  const Attention& a = c.problem;
  const int64_t group = a.heads_q / a.heads_k;
  if (group == 1) return false;
  if (heads_split >= 0) return heads_split;
  const auto is_quicker = [&](const auto& tiling) {
    const int64_t left = as_window(a.window_left), right = as_window(a.window_right),
                  seen = least(a.length_q, left + right + tiling.keys);
    const int64_t longest = ceil_div(seen, tiling.rows),
                  mean =
                      (left == kUnlimited) == (right == kUnlimited) ? longest : (longest + 1) / 2;
    const int64_t blocks = ceil_div(a.length_k, tiling.keys) * a.batch * a.heads_k,
                  processors = gpu_facts().processors;
    const int64_t together = blocks * (group * mean + kOfBlock) / processors,
                  longest_block = group * longest + kOfBlock;
    return blocks * group * (mean + kOfBlock) / processors + kOfSums <
           (together > longest_block ? together : longest_block);
  };
  return !takes_hopper(a) ? is_quicker(choose(a))
         : takes_apart(c) ? is_quicker(choose_apart(a).keys)
                          : is_quicker(choose_hopper(a));
}
int64_t bytes_of_parts(const AttentionBackward& c) {
  const Attention& a = c.problem;
  if (!splits_heads(c)) return 0;
  return ceil_div(
             (a.packed() ? 1 : a.batch) * a.heads_q * a.rows_k * (a.head_dim + a.head_dim_v) * 2,
             256) *
         256;
}

struct Workspace {
  void* parts;  // null if there are none
  float* rows;
};
Workspace divide(const AttentionBackward& c, void* workspace) {
  const int64_t bytes = bytes_of_parts(c);
  return {bytes ? workspace : nullptr,
          reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes)};
}

int64_t padded_rows(const Attention& a) {
  return kRowTile * (a.packed() ? ceil_div(a.rows_q + a.batch * kRowTile, kRowTile)
                                : a.batch * ceil_div(a.length_q, kRowTile));
}

BackwardRowsParams make_rows(const AttentionBackward& c, float* workspace) {
  const int64_t padded = padded_rows(c.problem), rows = c.problem.heads_q * padded;
  BackwardRowsParams r = {};
  r.problem = make_problem(c.problem);
  r.o = make_tensor(c.o), r.d_o = make_tensor(c.d_o), r.dq = make_tensor(c.dq);
  r.lse = c.lse, r.d_lse = c.d_lse, r.lse_batch = c.lse_batch, r.lse_head = c.lse_head;
  r.exponent = workspace, r.delta = workspace + rows, r.dq_sums = workspace + 2 * rows,
  r.padded_rows = padded;
  return r;
}

/// How many groups of query heads have their tiles handed out together: at least so many that all
/// multiprocessors have a block, and none much smaller than the others. The last one's long blocks
/// are otherwise alone at the end.
int section_of_keys(int64_t heads, int64_t bytes_of_head, int64_t tiles) {
  const int64_t fewest = ceil_div(gpu_facts().processors, tiles > 0 ? tiles : 1),
                fitting = section_of(heads, bytes_of_head, 1);
  const int64_t sections = heads / least(heads, fewest > fitting ? fewest : fitting);
  return static_cast<int>(ceil_div(heads, sections));
}

/// Of the kernel that goes over keys in blocks of `keys`.
BackwardParams make_backward(const AttentionBackward& c, const BackwardRowsParams& r, void* parts,
                             int64_t dim, int64_t keys) {
  const Attention& a = c.problem;
  BackwardParams p = {};
  p.problem = r.problem;
  p.q = make_tensor(c.q), p.k = make_tensor(c.k), p.v = make_tensor(c.v), p.d_o = r.d_o;
  p.dk = make_tensor(c.dk), p.dv = make_tensor(c.dv), p.dq = r.dq;
  p.exponent = r.exponent, p.delta = r.delta, p.dq_sums = r.dq_sums, p.padded_rows = r.padded_rows;
  p.group = parts ? 1 : p.problem.group, p.tiles = static_cast<int>(ceil_div(a.length_k, keys));
  p.section = section_of_keys(a.batch * a.heads_q / p.group, a.length_q * p.group * dim * 8,
                              p.tiles);  // Q, dO, and dQ in float32
  if (parts) {
    const int64_t elements = (a.packed() ? 1 : a.batch) * a.heads_q * a.rows_k * a.head_dim;
    const auto make_part = [&](int64_t first, int64_t columns) -> Tensor {
      return {static_cast<char*>(parts) + first * 2, a.heads_q * a.rows_k * columns, columns,
              a.rows_k * columns};
    };
    p.dk = make_part(0, a.head_dim), p.dv = make_part(elements, a.head_dim_v);
  }
  return p;
}

BackwardHopperParams make_all_maps(const AttentionBackward& c,
                                   const Tiling<BackwardHopperParams>& tiling) {
  const Attention& a = c.problem;
  BackwardHopperParams p = make_maps(c, tiling);
  p.d_o = make_map(c.d_o, a, a.head_dim_v, a.rows_q, a.heads_q, tiling.dim_v, tiling.rows);
  return p;
}

// ---- launches ----

LaunchConfig rows_config(const Attention& a, int64_t rows, void* stream) {
  return {blocks(ceil_div(a.length_q, rows), a.heads_q, a.batch), {kRowThreads}, stream};
}

/// dK and dV from their parts.
void launch_sums(const AttentionBackward& c, const BackwardParams& p, void* stream) {
  static constexpr PerType<HeadSumsParams> kSums = FLEXOPS_PER_COMMON_TYPE(backward_sums);
  const Attention& a = c.problem;
  const int64_t vectors = (a.head_dim + a.head_dim_v) / 8;
  if (p.group == p.problem.group || a.rows_k == 0 || vectors == 0) return;
  HeadSumsParams s = {{p.dk.data, p.dv.data},
                      {make_tensor(c.dk), make_tensor(c.dv)},
                      {},
                      static_cast<int>(a.rows_k),
                      p.problem.group};
  s.columns[0] = p.problem.head_dim, s.columns[1] = p.problem.head_dim_v;
  launch(kSums.of(a),
         {blocks(a.rows_k, a.heads_k, a.packed() ? 1 : a.batch),
          {static_cast<unsigned>(vectors)},
          stream},
         s);
}

/// The kernel of a tiling, between those of rows. `params` makes its parameters
/// of a call.
template <class Params, class MakeParams>
const char* launch_backward(const AttentionBackward& c, const Backward<Params>& tiling,
                            const Workspace& workspace, void* stream, const MakeParams& params) {
  const Attention& a = c.problem;
  const BackwardRowsParams r = make_rows(c, workspace.rows);
  BackwardParams p = make_backward(c, r, workspace.parts, tiling.dim, tiling.keys);
  const int tiles = p.tiles;
  const int64_t groups = a.heads_q / p.group;
  if (!fits_grid(tiles, a.batch, groups)) return kTooMany;
  if (a.length_q > 0) launch(tiling.before.of(a), rows_config(a, kRowTile, stream), r);
  // In a fixed order, blocks of keys are launches of their own: within one, each element of dQ is
  // added to once.
  const int each = c.deterministic ? 1 : tiles;
  for (int first = 0; first < tiles; first += each) {
    p.first_tile = first, p.tiles = each;
    launch_tiles<Params>(tiling, a, each * a.batch * groups, stream, params(p));
  }
  launch_sums(c, p, stream);
  if (a.length_q > 0) launch(tiling.after.of(a), rows_config(a, tiling.rows, stream), r);
  return last_error();
}

/// On Hopper in a fixed order: dK and dV, then dQ, by kernels of their own.
const char* launch_apart(const AttentionBackward& c, const Workspace& workspace, void* stream) {
  const Attention& a = c.problem;
  const Apart& tiling = choose_apart(a);
  BackwardRowsParams r = make_rows(c, workspace.rows);
  r.dq_sums = nullptr;
  launch(tiling.before.of(a), rows_config(a, kRowTile, stream), r);
  BackwardHopperParams keys = make_all_maps(c, tiling.keys);
  keys.call = make_backward(c, r, workspace.parts, tiling.keys.dim, tiling.keys.keys);
  const int64_t groups = a.heads_q / keys.call.group;
  if (!fits_grid(keys.call.tiles, a.batch, groups)) return kTooMany;
  launch_tiles(tiling.keys, a, keys.call.tiles * a.batch * groups, stream, keys);
  launch_sums(c, keys.call, stream);
  BackwardHopperParams queries = make_all_maps(c, tiling.queries);
  queries.call = keys.call;
  const int64_t group = a.heads_q / a.heads_k;
  queries.call.tiles = static_cast<int>(ceil_div(a.length_q, tiling.queries.rows));
  queries.call.section = section_of(a.batch * a.heads_q,
                                    a.length_k * tiling.queries.dim * 4 / group, group);  // K and V
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
  return attention::bytes_of_parts(call) + a.heads_q * attention::padded_rows(a) * (2 + dim) * 4;
}

const char* attention_backward_cuda(const AttentionBackward& c, void* workspace, void* stream) {
  using namespace attention;
  const Attention& a = c.problem;
  if (is_empty(a)) return nullptr;
  const Workspace parts = divide(c, workspace);
  if (!takes_hopper(a))
    return launch_backward(c, choose(a), parts, stream,
                           [](const BackwardParams& call) { return call; });
  if (takes_apart(c)) return launch_apart(c, parts, stream);
  const auto& tiling = choose_hopper(a);
  BackwardHopperParams p = make_all_maps(c, tiling);
  return launch_backward(c, tiling, parts, stream,
                         [&](const BackwardParams& call) { return p.call = call, p; });
}

}  // namespace flexops

// For tests, which run on one GPU what others with less shared memory take.
extern "C" __attribute__((visibility("default"))) void flexops_attention_shared(int64_t bytes) {
  flexops::attention::shared_allowed = bytes;
}
extern "C" __attribute__((visibility("default"))) void flexops_attention_heads_split(int each) {
  flexops::attention::heads_split = each;
}
