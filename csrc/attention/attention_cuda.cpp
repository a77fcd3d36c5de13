// Attention's launchers: which kernel, its tiles, tensor maps and grid. The kernels' pages say what the tiles are; which ones are taken was
// measured (docs/benchmarks/2026-11-22-attention.md and 2026-11-23-attention-backward.md).

#include "attention/attention.h"
#include "attention/attention_backward.cuh"
#include "attention/attention_backward_hopper.cuh"
#include "attention/attention_backward_queries_hopper.cuh"
#include "attention/attention_decode.cuh"
#include "attention/attention_forward.cuh"
#include "attention/attention_forward_hopper.cuh"
#include "common/launch.h"

namespace flexops {
namespace {

using attention::BackwardHopper, attention::BackwardHopperParams, attention::BackwardParams, attention::BackwardRowsParams,
    attention::BackwardShape, attention::Decode, attention::DecodeParams, attention::Defined, attention::ForwardHopper,
    attention::ForwardHopperParams, attention::ForwardParams, attention::ForwardShape, attention::Modified, attention::Plain,
    attention::Problem, attention::QueryGradient;

// Tests' choices; see the end of this file.
bool hopper_allowed = true;
int splits_wanted = -1;

/// Whether the kernels of attention_*_hopper.cuh run here. Their machine code is Hopper's alone.
bool is_hopper() { return hopper_allowed && gpu_facts().capability == 90; }

// ---- which kernels there are ------------------------------------------------------------------------------------------------------------

enum ModifierKind { kPlain, kSoftcap, kAlibi, kBias, kAny, kDefined, kModifiers };

/// Plain ones are compiled ahead of time, the others when they are called.
template <class Params>
struct Variants {
  KernelOf<Params> kernel[2][kModifiers];  // float16, bfloat16
  KernelOf<Params> of(const Attention& a, ModifierKind modifier) const {
    const KernelOf<Params>& found = kernel[a.type == AttentionType::bf16][modifier];
    return modifier == kDefined ? KernelOf<Params>{detail::with_text(found.kernel, a.score_mod)} : found;
  }
};

#define FLEXOPS_VARIANTS_OF(T, name, ...)                                      \
  {kernel<attention::name<T, __VA_ARGS__, Plain>>,                             \
   rare_kernel<attention::name<T, __VA_ARGS__, Modified<true, false, false>>>, \
   rare_kernel<attention::name<T, __VA_ARGS__, Modified<false, true, false>>>, \
   rare_kernel<attention::name<T, __VA_ARGS__, Modified<false, false, true>>>, \
   rare_kernel<attention::name<T, __VA_ARGS__, Modified<true, true, true>>>,   \
   rare_kernel<attention::name<T, __VA_ARGS__, Defined>>}
#define FLEXOPS_VARIANTS(name, ...)                                                               \
  {                                                                                               \
    { FLEXOPS_VARIANTS_OF(f16, name, __VA_ARGS__), FLEXOPS_VARIANTS_OF(bf16, name, __VA_ARGS__) } \
  }

/// One tiling. `dim` and `dim_v`: the most columns that it takes.
template <class Params>
struct Forward {
  int dim, dim_v, rows, keys, threads, bytes;
  Variants<Params> variants;
};
template <int D, int DV, int G, int N>
constexpr Forward<ForwardHopperParams> forward_hopper_tiling() {
  using Shape = ForwardHopper<bf16, D, DV, G, N>;
  return {D, DV, Shape::kM, N, Shape::kThreads, Shape::kBytes, FLEXOPS_VARIANTS(forward_hopper, D, DV, G, N)};
}
template <int D, int DV, int kTiles, int N>
constexpr Forward<ForwardParams> forward_tiling() {
  using Shape = ForwardShape<bf16, D, DV, kTiles, N>;
  return {D, DV, Shape::kM, N, Shape::kThreads, Shape::kBytes, FLEXOPS_VARIANTS(forward, D, DV, kTiles, N)};
}

const Forward<ForwardHopperParams>& choose_forward_hopper(const Attention& p) {
  static constexpr Forward<ForwardHopperParams> kTilings[] = {
      forward_hopper_tiling<32, 32, 3, 128>(),   forward_hopper_tiling<64, 64, 3, 128>(),   forward_hopper_tiling<96, 96, 2, 128>(),
      forward_hopper_tiling<128, 128, 2, 128>(), forward_hopper_tiling<192, 128, 2, 128>(), forward_hopper_tiling<192, 192, 2, 112>(),
      forward_hopper_tiling<256, 256, 2, 80>()};
  static constexpr Forward<ForwardHopperParams> kLong = forward_hopper_tiling<128, 128, 2, 176>();
  for (const auto& tiling : kTilings) {
    if (p.head_dim > tiling.dim || p.head_dim_v > tiling.dim_v) continue;
    return tiling.dim == kLong.dim && p.length_k >= 8192 ? kLong : tiling;
  }
  return kTilings[6];
}
const Forward<ForwardParams>& choose_forward(const Attention& p) {
  static constexpr Forward<ForwardParams> kTilings[] = {forward_tiling<32, 32, 2, 64>(),   forward_tiling<64, 64, 2, 128>(),
                                                        forward_tiling<96, 96, 1, 128>(),  forward_tiling<128, 128, 2, 64>(),
                                                        forward_tiling<192, 128, 1, 64>(), forward_tiling<192, 192, 1, 64>(),
                                                        forward_tiling<256, 256, 1, 64>()};
  for (const auto& tiling : kTilings) {
    if (p.head_dim <= tiling.dim && p.head_dim_v <= tiling.dim_v) return tiling;
  }
  return kTilings[6];
}

/// One tiling of the kernel for few queries, with the one that puts splits together.
struct Decoding {
  int dim, dim_v, rows, keys, threads, bytes;  // keys: of a warp's blocks
  Variants<DecodeParams> variants;
  KernelOf<DecodeParams> combine[2];
};
template <int D, int DV, int kWarps, int N>
constexpr Decoding decode_tiling() {
  using Shape = Decode<bf16, D, DV, kWarps, N>;
  return {D,
          DV,
          Shape::kM,
          N,
          Shape::kThreads,
          Shape::kBytes,
          FLEXOPS_VARIANTS(decode, D, DV, kWarps, N),
          {kernel<attention::decode_combine<f16>>, kernel<attention::decode_combine<bf16>>}};
}
const Decoding& choose_decode(const Attention& p) {
  static constexpr Decoding kTilings[] = {decode_tiling<64, 64, 4, 32>(), decode_tiling<128, 128, 4, 16>(),
                                          decode_tiling<192, 128, 2, 16>(), decode_tiling<256, 256, 2, 16>()};
  for (const auto& tiling : kTilings) {
    if (p.head_dim <= tiling.dim && p.head_dim_v <= tiling.dim_v) return tiling;
  }
  return kTilings[3];
}

/// One tiling backward, with the kernels before and after it.
template <class Params>
struct Backward {
  int dim, rows, keys, threads, bytes;
  Variants<Params> variants;
  KernelOf<BackwardRowsParams> before[2], after[2];
};
template <int D>
constexpr Backward<BackwardHopperParams> backward_hopper_tiling() {
  using Shape = BackwardHopper<D, D, true>;
  return {D,
          Shape::kM,
          Shape::kN,
          Shape::kThreads,
          Shape::kBytes,
          FLEXOPS_VARIANTS(backward_hopper, D, D, true),
          {kernel<attention::backward_before<f16, D>>, kernel<attention::backward_before<bf16, D>>},
          {kernel<attention::backward_after<f16, D>>, kernel<attention::backward_after<bf16, D>>}};
}
template <int D, int M, int N, int kStages>
constexpr Backward<BackwardParams> backward_tiling() {
  using Shape = BackwardShape<bf16, D, D, M, N, kStages>;
  return {D,
          M,
          N,
          Shape::kThreads,
          Shape::kBytes,
          FLEXOPS_VARIANTS(backward, D, D, M, N, kStages),
          {kernel<attention::backward_before<f16, D>>, kernel<attention::backward_before<bf16, D>>},
          {kernel<attention::backward_after_mma<f16, D, M>>, kernel<attention::backward_after_mma<bf16, D, M>>}};
}

int64_t widest(const Attention& p) { return p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v; }

/// Where dQ is to be summed in a fixed order: dK and dV, and dQ, by kernels of their own.
struct BackwardApart {
  int dim, rows, keys, threads, bytes;
  Variants<BackwardHopperParams> variants;
  int queries_rows, queries_keys, queries_threads, queries_bytes;
  Variants<BackwardHopperParams> queries;
  KernelOf<BackwardRowsParams> before[2];
};
template <int D, int N, int kStagesV>
constexpr BackwardApart backward_apart() {
  using Shape = BackwardHopper<D, D, false>;
  using Queries = QueryGradient<D, D, N, 2, kStagesV>;
  return {D,
          Shape::kM,
          Shape::kN,
          Shape::kThreads,
          Shape::kBytes,
          FLEXOPS_VARIANTS(backward_hopper, D, D, false),
          Queries::kM,
          Queries::kN,
          Queries::kThreads,
          Queries::kBytes,
          FLEXOPS_VARIANTS(backward_queries_hopper, D, D, N, 2, kStagesV),
          {kernel<attention::backward_before<f16, D>>, kernel<attention::backward_before<bf16, D>>}};
}
const BackwardApart& choose_backward_apart(const Attention& p) {
  static constexpr BackwardApart kNarrow = backward_apart<64, 128, 2>(), kWide = backward_apart<128, 128, 2>(),
                                 kWidest = backward_apart<256, 64, 1>();
  return widest(p) <= 64 ? kNarrow : widest(p) <= 128 ? kWide : kWidest;
}
/// Of up to 128 columns.
const Backward<BackwardHopperParams>& choose_backward_hopper(const Attention& p) {
  static constexpr Backward<BackwardHopperParams> kNarrow = backward_hopper_tiling<64>(), kWide = backward_hopper_tiling<128>();
  return widest(p) <= kNarrow.dim ? kNarrow : kWide;
}
const Backward<BackwardParams>& choose_backward(const Attention& p) {
  static constexpr Backward<BackwardParams> kTilings[] = {backward_tiling<64, 64, 128, 2>(), backward_tiling<128, 64, 128, 2>(),
                                                          backward_tiling<128, 32, 128, 1>(), backward_tiling<256, 64, 64, 1>()};
  for (const auto& tiling : kTilings) {
    if (widest(p) <= tiling.dim && tiling.bytes <= gpu_facts().shared_of_block) return tiling;
  }
  return kTilings[3];
}

// ---- what kernels are told --------------------------------------------------------------------------------------------------------------

constexpr int64_t kSectionBytes = 32 << 20;  // of the L2 cache: of the heads that are worked on at the same time

int as_window(int64_t keys) { return keys < 0 || keys > attention::kUnlimited ? attention::kUnlimited : static_cast<int>(keys); }

Problem make_problem(const Attention& a) {
  Problem p = {};
  p.batch = static_cast<int>(a.batch), p.heads_q = static_cast<int>(a.heads_q), p.heads_k = static_cast<int>(a.heads_k);
  p.group = static_cast<int>(a.heads_q / a.heads_k);
  p.length_q = static_cast<int>(a.length_q), p.length_k = static_cast<int>(a.length_k);
  p.cumulative_q = a.cumulative_q, p.cumulative_k = a.cumulative_k;
  p.head_dim = static_cast<int>(a.head_dim), p.head_dim_v = static_cast<int>(a.head_dim_v);
  p.window_left = as_window(a.window_left), p.window_right = as_window(a.window_right);
  p.scale = a.scale, p.softcap = a.softcap;
  p.bias = a.bias, p.bias_type = static_cast<attention::BiasType>(a.bias_type);
  p.bias_batch = a.bias_strides[0], p.bias_head = a.bias_strides[1], p.bias_row = a.bias_strides[2], p.bias_column = a.bias_strides[3];
  p.alibi = a.alibi, p.alibi_batch = a.alibi_strides[0], p.alibi_head = a.alibi_strides[1];
  return p;
}

ModifierKind modifier_of(const Attention& a) {
  if (a.score_mod) return kDefined;
  const int features = (a.softcap > 0) + (a.alibi != nullptr) + (a.bias != nullptr);
  if (features == 0) return a.scale > 0 ? kPlain : kAny;  // a plain maximum is the product's, which has to be the score's
  return features > 1 ? kAny : a.softcap > 0 ? kSoftcap : a.alibi ? kAlibi : kBias;
}

attention::Tensor make_tensor(const AttentionTensor& t) { return {t.data, t.batch, t.row, t.head}; }

/// How many heads' tiles are handed out together, a multiple of `group`.
int section_of(int64_t heads, int64_t bytes_of_head, int64_t group) {
  const int64_t fitting = bytes_of_head > 0 ? kSectionBytes / bytes_of_head / group * group : heads;
  return static_cast<int>(least(heads, fitting > group ? fitting : group));
}

/// The same backward, of key heads: at least so many that all multiprocessors have a block of them, and none much smaller than the others.
/// The last one's long blocks are otherwise alone at the end.
int section_of_keys(int64_t heads, int64_t bytes_of_head, int64_t tiles) {
  const int64_t fewest = ceil_div(gpu_facts().processors, tiles > 0 ? tiles : 1), fitting = section_of(heads, bytes_of_head, 1);
  const int64_t sections = heads / least(heads, fewest > fitting ? fewest : fitting);
  return static_cast<int>(ceil_div(heads, sections));
}

/// The copy engine's description of a tensor, of which it loads `rows` rows of a panel of columns at once. What lies outside is zeros.
hopper::TensorMap make_map(const AttentionTensor& t, const Attention& a, int64_t columns, int64_t rows_there, int64_t heads,
                           int tile_columns, int tile_rows) {
  hopper::TensorMap map = {};
  const int64_t sizes_there[4] = {columns, rows_there, heads, a.packed() ? 1 : a.batch};
  const int64_t strides_there[3] = {t.row, t.head, t.batch};
  uint64_t sizes[4], strides[3];
  for (int d = 0; d < 4; ++d) sizes[d] = static_cast<uint64_t>(sizes_there[d]);
  // The strides of dimensions with one entry mean nothing, to torch, but have to be multiples of 16 bytes.
  for (int d = 0; d < 3; ++d) strides[d] = static_cast<uint64_t>(sizes_there[d + 1] > 1 ? strides_there[d] : ceil_div(columns, 8) * 8) * 2;
  const bool wide = tile_columns % 64 == 0;
  const unsigned box[4] = {wide ? 64u : 32u, static_cast<unsigned>(tile_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle64 = 2, kSwizzle128 = 3, kPromote256 = 3;  // CU_TENSOR_MAP_...
  detail::note(detail::in_context([&] {
    return detail::Driver::get().cuTensorMapEncodeTiled(&map, a.type == AttentionType::bf16 ? kBfloat16 : kFloat16, 4, t.data, sizes,
                                                        strides, box, steps, 0, wide ? kSwizzle128 : kSwizzle64, kPromote256, 0);
  }));
  return map;
}

// ---- forward ----------------------------------------------------------------------------------------------------------------------------

ForwardParams make_forward(const AttentionForward& c, int64_t rows, int dim, int dim_v) {
  const Attention& a = c.problem;
  ForwardParams p = {};
  p.problem = make_problem(a);
  p.q = make_tensor(c.q), p.k = make_tensor(c.k), p.v = make_tensor(c.v), p.o = make_tensor(c.o);
  p.lse = c.lse, p.lse_batch = c.lse_batch, p.lse_head = c.lse_head, p.sinks = a.sinks;
  p.tiles = static_cast<int>(ceil_div(a.length_q, rows));
  const int64_t group = a.heads_q / a.heads_k;
  p.section = section_of(a.batch * a.heads_q, a.length_k * (dim + dim_v) * 2 / group, group);
  return p;
}

constexpr const char* kTooMany = "attention has more tiles than a grid";
bool fits_grid(int64_t tiles, int64_t batch, int64_t heads) { return tiles * batch * heads < int64_t{1} << 31; }

// ---- few queries ------------------------------------------------------------------------------------------------------------------------

/// Tiles of 16 rows read the same keys again: up to 4 of them, which find these in the L2 cache.
bool takes_decode(const Attention& a) { return splits_wanted != 0 && a.length_q * (a.heads_q / a.heads_k) <= 64; }

int64_t decode_tiles(const Attention& a, const Decoding& tiling) { return ceil_div(a.length_q * (a.heads_q / a.heads_k), tiling.rows); }

/// In how many parts keys are cut: what takes the least time, counted in bytes that memory moves meanwhile. A block of threads alone gets a
/// share of memory's bandwidth only, and parts have to be put together again.
int decode_splits(const Attention& a, const Decoding& tiling) {
  constexpr int64_t kLeastKeys = 256, kCombine = 12 << 20;
  if (splits_wanted > 0) return static_cast<int>(least(splits_wanted, attention::kMostSplits));
  const Gpu& gpu = gpu_facts();
  const int64_t resident = gpu.processors * (gpu.shared_of_processor >= 2 * (tiling.bytes + 1024) ? 2 : 1);
  const int64_t alone = gpu.processors * 9 / 16 * 128 / tiling.threads;  // measured on an H200: so many blocks have all of it
  const int64_t each = decode_tiles(a, tiling) * a.batch * a.heads_k;
  int64_t seen = a.length_k;
  if (a.window_left >= 0 && a.window_right >= 0) seen = least(seen, a.window_left + a.window_right + a.length_q);
  const int64_t bytes = seen * (a.head_dim + a.head_dim_v) * 2, part = a.batch * a.heads_q * a.length_q * a.head_dim_v * 8;
  const auto cost = [&](int64_t splits) {
    const int64_t all = splits * each, rest = all % resident;
    const int64_t moved = all - rest + (rest == 0 ? 0 : rest > alone ? rest : alone);
    return moved * bytes / splits + (splits > 1 ? kCombine + splits * part : 0);
  };
  const int64_t most = least(least(attention::kMostSplits, seen / kLeastKeys), 2 * resident / each + 1);
  int64_t best = 1, least_cost = cost(1);
  for (int64_t splits = 2; splits <= most; ++splits) {
    const int64_t found = cost(splits);
    if (found < least_cost) best = splits, least_cost = found;
  }
  return static_cast<int>(best);
}

const char* launch_decode(const AttentionForward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  const Decoding& tiling = choose_decode(a);
  DecodeParams p = {};
  p.call = make_forward(c, tiling.rows, tiling.dim, tiling.dim_v);
  p.call.tiles = static_cast<int>(decode_tiles(a, tiling));
  p.splits = decode_splits(a, tiling);
  const int64_t rows = a.batch * a.heads_q * a.length_q, all = a.batch * a.heads_k * p.call.tiles;
  p.parts = static_cast<float*>(workspace), p.parts_sums = p.parts + p.splits * rows * a.head_dim_v;
  if (!fits_grid(all, p.splits, 1)) return kTooMany;
  launch(tiling.variants.of(a, modifier_of(a)), {blocks(all * p.splits), {static_cast<unsigned>(tiling.threads)}, stream, tiling.bytes}, p);
  if (p.splits > 1) launch(tiling.combine[a.type == AttentionType::bf16], {blocks(rows), {128}, stream}, p);
  return last_error();
}

// ---- backward ---------------------------------------------------------------------------------------------------------------------------

int64_t padded_rows(const Attention& a) {
  constexpr int64_t kTile = attention::kRowTile;
  return kTile * (a.packed() ? ceil_div(a.rows_q + a.batch * kTile, kTile) : a.batch * ceil_div(a.length_q, kTile));
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

constexpr unsigned kRowThreads = attention::kRowThreads;
LaunchConfig rows_config(const Attention& a, int64_t rows, void* stream) {
  return {blocks(ceil_div(a.length_q, rows), a.heads_q, a.batch), {kRowThreads}, stream};
}

/// Both ways: the kernel, between those of rows. `queue` puts it into the stream.
template <class Tiling, class Queue>
const char* launch_backward(const AttentionBackward& c, const Tiling& tiling, void* workspace, void* stream, const Queue& queue) {
  const Attention& a = c.problem;
  const BackwardRowsParams r = make_rows(c, static_cast<float*>(workspace));
  BackwardParams p = make_backward(c, r, tiling.dim, tiling.keys);
  const int tiles = p.tiles;
  if (!fits_grid(tiles, a.batch, a.heads_k)) return kTooMany;
  const bool is_bf16 = a.type == AttentionType::bf16, some = a.length_q > 0;
  if (some) launch(tiling.before[is_bf16], rows_config(a, attention::kRowTile, stream), r);
  // In a fixed order, blocks of keys are launches of their own: within one, each element of dQ is added to once.
  const int each = c.deterministic ? 1 : tiles;
  for (int first = 0; first < tiles; first += each) {
    p.first_tile = first, p.tiles = each;
    queue(p, LaunchConfig{blocks(each * a.batch * a.heads_k), {static_cast<unsigned>(tiling.threads)}, stream, tiling.bytes});
  }
  if (some) launch(tiling.after[is_bf16], rows_config(a, tiling.rows, stream), r);
  return last_error();
}

/// The maps of a kernel that loads so many queries and keys at once.
BackwardHopperParams make_backward_maps(const AttentionBackward& c, int dim, int rows, int keys) {
  const Attention& a = c.problem;
  BackwardHopperParams p = {};
  p.q = make_map(c.q, a, a.head_dim, a.rows_q, a.heads_q, dim, rows);
  p.d_o = make_map(c.d_o, a, a.head_dim_v, a.rows_q, a.heads_q, dim, rows);
  p.k = make_map(c.k, a, a.head_dim, a.rows_k, a.heads_k, dim, keys);
  p.v = make_map(c.v, a, a.head_dim_v, a.rows_k, a.heads_k, dim, keys);
  return p;
}

/// On Hopper in a fixed order: dK and dV, then dQ, by kernels of their own.
const char* launch_backward_apart(const AttentionBackward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  const BackwardApart& tiling = choose_backward_apart(a);
  BackwardRowsParams r = make_rows(c, static_cast<float*>(workspace));
  r.dq_sums = nullptr;
  launch(tiling.before[a.type == AttentionType::bf16], rows_config(a, attention::kRowTile, stream), r);
  BackwardHopperParams p = make_backward_maps(c, tiling.dim, tiling.rows, tiling.keys);
  p.call = make_backward(c, r, tiling.dim, tiling.keys);
  if (!fits_grid(p.call.tiles, a.batch, a.heads_k)) return kTooMany;
  launch(tiling.variants.of(a, modifier_of(a)),
         LaunchConfig{blocks(p.call.tiles * a.batch * a.heads_k), {static_cast<unsigned>(tiling.threads)}, stream, tiling.bytes}, p);
  const BackwardParams call = p.call;
  p = make_backward_maps(c, tiling.dim, tiling.queries_rows, tiling.queries_keys);
  p.call = call;
  const int64_t group = a.heads_q / a.heads_k;
  p.call.tiles = static_cast<int>(ceil_div(a.length_q, tiling.queries_rows));
  p.call.section = section_of(a.batch * a.heads_q, a.length_k * tiling.dim * 4 / group, group);  // K and V
  if (!fits_grid(p.call.tiles, a.batch, a.heads_q)) return kTooMany;
  launch(tiling.queries.of(a, modifier_of(a)),
         LaunchConfig{
             blocks(p.call.tiles * a.batch * a.heads_q), {static_cast<unsigned>(tiling.queries_threads)}, stream, tiling.queries_bytes},
         p);
  return last_error();
}

/// The copy engine cannot be told of tensors without rows.
bool takes_hopper(const Attention& a) { return is_hopper() && a.rows_q > 0 && a.rows_k > 0; }
/// Of more than 128 columns that is faster, too.
bool takes_backward_apart(const AttentionBackward& c) { return c.deterministic || widest(c.problem) > 128; }
bool is_empty(const Attention& a) { return a.batch == 0 || a.heads_q == 0; }

}  // namespace

int64_t attention_workspace(const AttentionForward& call) {
  const Attention& a = call.problem;
  if (is_empty(a) || a.length_q == 0) return 0;
  if (!takes_decode(a)) return takes_hopper(a) ? 256 : 0;
  const int64_t splits = decode_splits(a, choose_decode(a));
  return splits > 1 ? splits * a.batch * a.heads_q * a.length_q * (a.head_dim_v + 1) * 4 : 0;
}

int64_t attention_workspace(const AttentionBackward& call) {
  const Attention& a = call.problem;
  if (is_empty(a)) return 0;
  const bool hopper = takes_hopper(a);
  const int64_t dim = !hopper ? choose_backward(a).dim : takes_backward_apart(call) ? 0 : choose_backward_hopper(a).dim;
  return a.heads_q * padded_rows(a) * (2 + dim) * 4;
}

const char* attention_cuda(const AttentionForward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  if (is_empty(a) || a.length_q == 0) return nullptr;
  if (takes_decode(a)) return launch_decode(c, workspace, stream);
  const auto run = [&](const auto& tiling, const auto& queue) {
    const ForwardParams p = make_forward(c, tiling.rows, tiling.dim, tiling.dim_v);
    if (!fits_grid(p.tiles, a.batch, a.heads_q)) return kTooMany;
    queue(tiling, p, LaunchConfig{blocks(p.tiles * a.batch * a.heads_q), {static_cast<unsigned>(tiling.threads)}, stream, tiling.bytes});
    return last_error();
  };
  if (!takes_hopper(a)) {
    return run(choose_forward(a), [&](const auto& tiling, const ForwardParams& p, const LaunchConfig& config) {
      launch(tiling.variants.of(a, modifier_of(a)), config, p);
    });
  }
  return run(choose_forward_hopper(a), [&](const auto& tiling, const ForwardParams& call, LaunchConfig config) {
    ForwardHopperParams p = {};
    p.q = make_map(c.q, a, a.head_dim, a.rows_q, a.heads_q, tiling.dim, tiling.rows);
    p.k = make_map(c.k, a, a.head_dim, a.rows_k, a.heads_k, tiling.dim, tiling.keys);
    p.v = make_map(c.v, a, a.head_dim_v, a.rows_k, a.heads_k, tiling.dim_v, tiling.keys);
    p.call = call;
    const unsigned tiles = config.grid.x;
    config.grid.x = static_cast<unsigned>(least(tiles, gpu_facts().processors));
    if (tiles > 2 * config.grid.x) {
      p.counter = static_cast<int*>(workspace);
      set_zero(static_cast<uint32_t*>(workspace), 1, stream);
    }
    launch(tiling.variants.of(a, modifier_of(a)), config, p);
  });
}

const char* attention_backward_cuda(const AttentionBackward& c, void* workspace, void* stream) {
  const Attention& a = c.problem;
  if (is_empty(a)) return nullptr;
  if (!takes_hopper(a)) {
    const auto& tiling = choose_backward(a);
    return launch_backward(c, tiling, workspace, stream, [&](const BackwardParams& p, const LaunchConfig& config) {
      launch(tiling.variants.of(a, modifier_of(a)), config, p);
    });
  }
  if (takes_backward_apart(c)) return launch_backward_apart(c, workspace, stream);
  const auto& tiling = choose_backward_hopper(a);
  BackwardHopperParams p = make_backward_maps(c, tiling.dim, tiling.rows, tiling.keys);
  return launch_backward(c, tiling, workspace, stream, [&](const BackwardParams& call, const LaunchConfig& config) {
    p.call = call;
    launch(tiling.variants.of(a, modifier_of(a)), config, p);
  });
}

}  // namespace flexops

// For tests, which run all ways on one GPU. Hopper's own kernels: 0 leaves them out. Splits of the keys of few queries: so many; 0 takes
// the kernels for many queries, -1 what is chosen otherwise.
extern "C" __attribute__((visibility("default"))) void flexops_attention_hopper(int allowed) { flexops::hopper_allowed = allowed != 0; }
extern "C" __attribute__((visibility("default"))) void flexops_attention_splits(int wanted) { flexops::splits_wanted = wanted; }
