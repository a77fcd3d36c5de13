// What attention's launchers share: the kernels of a tiling, by type and score modifier, and their
// parameters. Each direction's launcher chooses among its tilings; the kernels' pages
// say what the tiles are, and which ones are taken was measured (docs/benchmarks/README.md).
#pragma once

#include "attention/attention.cuh"
#include "attention/attention.h"
#include "common/launch.h"
#include "common/wgmma.cuh"

namespace flexops::attention {

// ---- which kernels there are ----

template <class Params>
struct PerType {
  KernelOf<Params> f16, bf16;
  const KernelOf<Params>& of(const Attention& a) const {
    return a.type == ElementType::bf16 ? bf16 : f16;
  }
};
#define FLEXOPS_PER_TYPE(which, name, ...) \
  {which<attention::name<f16, ##__VA_ARGS__>>, which<attention::name<bf16, ##__VA_ARGS__>>}
/// Where float16 is rare, as it is in training.
#define FLEXOPS_PER_COMMON_TYPE(name, ...) \
  {rare_kernel<attention::name<f16, ##__VA_ARGS__>>, kernel<attention::name<bf16, ##__VA_ARGS__>>}

enum ModifierKind { kPlain, kSoftcap, kAlibi, kBias, kAny, kDefined, kModifiers };

inline ModifierKind modifier_of(const Attention& a) {
  if (a.score_mod) return kDefined;
  const int features = (a.softcap > 0) + (a.alibi != nullptr) + (a.bias != nullptr);
  if (features == 0)
    return a.scale > 0 ? kPlain
                       : kAny;  // a plain maximum is the product's, which has to be the score's
  return features > 1 ? kAny : a.softcap > 0 ? kSoftcap : a.alibi ? kAlibi : kBias;
}

/// By ModifierKind. Plain ones are compiled ahead of time, the others when they are called.
template <class Params>
struct Variants {
  PerType<Params> kernels[kModifiers];
  KernelOf<Params> of(const Attention& a) const {
    const ModifierKind modifier = modifier_of(a);
    const KernelOf<Params>& found = kernels[modifier].of(a);
    return modifier == kDefined ? KernelOf<Params>{detail::with_text(found.kernel, a.score_mod)}
                                : found;
  }
};
#define FLEXOPS_VARIANTS_BESIDE(plain, name, ...)                                            \
  {                                                                                          \
    {                                                                                        \
      plain, FLEXOPS_PER_TYPE(rare_kernel, name, __VA_ARGS__, Modified<true, false, false>), \
          FLEXOPS_PER_TYPE(rare_kernel, name, __VA_ARGS__, Modified<false, true, false>),    \
          FLEXOPS_PER_TYPE(rare_kernel, name, __VA_ARGS__, Modified<false, false, true>),    \
          FLEXOPS_PER_TYPE(rare_kernel, name, __VA_ARGS__, Modified<true, true, true>),      \
          FLEXOPS_PER_TYPE(rare_kernel, name, __VA_ARGS__, Defined)                          \
    }                                                                                        \
  }
#define FLEXOPS_VARIANTS(name, ...) \
  FLEXOPS_VARIANTS_BESIDE(FLEXOPS_PER_TYPE(kernel, name, __VA_ARGS__, Plain), name, __VA_ARGS__)
#define FLEXOPS_COMMON_VARIANTS(name, ...) \
  FLEXOPS_VARIANTS_BESIDE(FLEXOPS_PER_COMMON_TYPE(name, __VA_ARGS__, Plain), name, __VA_ARGS__)

/// `dim` and `dim_v`: the most columns that it takes.
template <class Params>
struct Tiling {
  int dim, dim_v, rows, keys, threads, bytes;
  Variants<Params> variants;
};

template <class Shape, class Params>
constexpr Tiling<Params> tiling_of(int dim, int dim_v, int keys, const Variants<Params>& variants) {
  return {dim, dim_v, Shape::kM, keys, Shape::kThreads, Shape::kBytes, variants};
}

/// The first of them that takes so many columns, else the last.
template <class Params, int kCount>
const Tiling<Params>& first_fitting(const Tiling<Params> (&tilings)[kCount], const Attention& a) {
  for (const auto& tiling : tilings) {
    if (a.head_dim <= tiling.dim && a.head_dim_v <= tiling.dim_v) return tiling;
  }
  return tilings[kCount - 1];
}

template <class Params>
void launch_tiles(const Tiling<Params>& tiling, const Attention& a, int64_t grid, void* stream,
                  const Params& p, bool early = false, int64_t cluster = 1) {
  LaunchConfig config{blocks(grid), {static_cast<unsigned>(tiling.threads)}, stream, tiling.bytes};
  config.early = early, config.cluster = static_cast<unsigned>(cluster);
  launch(tiling.variants.of(a), config, p);
}

constexpr const char* kTooMany = "attention has more tiles than a grid";
inline bool fits_grid(int64_t tiles, int64_t batch, int64_t heads) {
  return tiles * batch * heads < int64_t{1} << 31;
}

// ---- which of them run here ----

/// Tests' choice: false leaves Hopper's own kernels out.
inline bool hopper_allowed = true;

/// Whether the kernels of attention_*_hopper.cuh run here. Their machine code is Hopper's alone,
/// and the copy engine has no map of tensors without rows.
inline bool takes_hopper(const Attention& a) {
  return hopper_allowed && gpu_facts().capability == 90 && a.rows_q > 0 && a.rows_k > 0;
}
inline bool is_empty(const Attention& a) { return a.batch == 0 || a.heads_q == 0; }

// ---- the kernels' parameters ----

inline int as_window(int64_t keys) {
  return keys < 0 || keys > kUnlimited ? kUnlimited : static_cast<int>(keys);
}

inline Problem make_problem(const Attention& a) {
  Problem p = {};
  p.batch = static_cast<int>(a.batch), p.heads_q = static_cast<int>(a.heads_q),
  p.heads_k = static_cast<int>(a.heads_k);
  p.group = static_cast<int>(a.heads_q / a.heads_k);
  p.length_q = static_cast<int>(a.length_q), p.length_k = static_cast<int>(a.length_k);
  p.cumulative_q = a.cumulative_q, p.cumulative_k = a.cumulative_k;
  p.head_dim = static_cast<int>(a.head_dim), p.head_dim_v = static_cast<int>(a.head_dim_v);
  p.window_left = as_window(a.window_left), p.window_right = as_window(a.window_right);
  p.scale = a.scale, p.softcap = a.softcap;
  p.bias = a.bias, p.bias_type = a.bias_type;
  p.bias_batch = a.bias_strides[0], p.bias_head = a.bias_strides[1], p.bias_row = a.bias_strides[2],
  p.bias_column = a.bias_strides[3];
  p.alibi = a.alibi, p.alibi_batch = a.alibi_strides[0], p.alibi_head = a.alibi_strides[1];
  return p;
}

inline Tensor make_tensor(const AttentionTensor& t) { return {t.data, t.batch, t.row, t.head}; }

/// How many heads' tiles are handed out together, a multiple of `group`: as many as the L2 cache
/// has room for.
inline int section_of(int64_t heads, int64_t bytes_of_head, int64_t group) {
  constexpr int64_t kSectionBytes =
      32 << 20;  // of the L2 cache: of the heads that are worked on at the same time
  const int64_t fitting = bytes_of_head > 0 ? kSectionBytes / bytes_of_head / group * group : heads;
  return static_cast<int>(least(heads, fitting > group ? fitting : group));
}

/// The copy engine's description of a tensor, of which it loads `rows` rows of a panel of columns
/// at once. What lies outside is zeros.
inline hopper::TensorMap make_map(const AttentionTensor& t, const Attention& a, int64_t columns,
                                  int64_t rows_there, int64_t heads, int tile_columns,
                                  int tile_rows) {
  hopper::TensorMap map = {};
  const int64_t sizes_there[4] = {columns, rows_there, heads, a.packed() ? 1 : a.batch};
  const int64_t strides_there[3] = {t.row, t.head, t.batch};
  uint64_t sizes[4], strides[3];
  for (int d = 0; d < 4; ++d) sizes[d] = static_cast<uint64_t>(sizes_there[d]);
  // The strides of dimensions with one entry mean nothing, to torch, but have to be multiples of 16
  // bytes.
  for (int d = 0; d < 3; ++d)
    strides[d] = static_cast<uint64_t>(sizes_there[d + 1] > 1 ? strides_there[d]
                                                              : ceil_div(columns, 8) * 8) *
                 2;
  const bool wide = tile_columns % 64 == 0;
  const unsigned box[4] = {wide ? 64u : 32u, static_cast<unsigned>(tile_rows), 1, 1},
                 steps[4] = {1, 1, 1, 1};
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle64 = 2, kSwizzle128 = 3,
                kPromote256 = 3;  // CU_TENSOR_MAP_...
  detail::note(detail::in_context([&] {
    return detail::Driver::get().cuTensorMapEncodeTiled(
        &map, a.type == ElementType::bf16 ? kBfloat16 : kFloat16, 4, t.data, sizes, strides, box,
        steps, 0, wide ? kSwizzle128 : kSwizzle64, kPromote256, 0);
  }));
  return map;
}

/// The maps of a kernel that loads so many queries and keys at once, without its call.
template <class Params, class Call>
Params make_maps(const Call& c, const Tiling<Params>& tiling) {
  const Attention& a = c.problem;
  Params p = {};
  p.q = make_map(c.q, a, a.head_dim, a.rows_q, a.heads_q, tiling.dim, tiling.rows);
  p.k = make_map(c.k, a, a.head_dim, a.rows_k, a.heads_k, tiling.dim, tiling.keys);
  p.v = make_map(c.v, a, a.head_dim_v, a.rows_k, a.heads_k, tiling.dim_v, tiling.keys);
  return p;
}

// ---- between the forward launchers ----

/// Of a kernel whose tiles have so many rows and columns.
template <class Tiling>
ForwardParams make_forward(const AttentionForward& c, const Tiling& tiling) {
  const Attention& a = c.problem;
  ForwardParams p = {};
  p.problem = make_problem(a);
  p.q = make_tensor(c.q), p.k = make_tensor(c.k), p.v = make_tensor(c.v), p.o = make_tensor(c.o);
  p.lse = c.lse, p.lse_batch = c.lse_batch, p.lse_head = c.lse_head, p.sinks = a.sinks;
  p.tiles = static_cast<int>(ceil_div(a.length_q, tiling.rows));
  const int64_t group = a.heads_q / a.heads_k;
  p.section =
      section_of(a.batch * a.heads_q, a.length_k * (tiling.dim + tiling.dim_v) * 2 / group, group);
  return p;
}

// ---- few queries, whose keys are split (attention_decode.cuh) ----

constexpr int64_t kMostKeyParts = 128;  // a lane of combine_splits' four warps for each

/// Tiles of `rows` rows of a sequence and key head.
inline int64_t decode_tiles(const Attention& a, int64_t rows) {
  return ceil_div(a.length_q * (a.heads_q / a.heads_k), rows);
}

/// In how many parts keys are cut: what takes the least time, counted in bytes that memory moves
/// meanwhile. A block of threads alone gets a share of memory's bandwidth only, and parts have to
/// be put together again. `tiles`: of each sequence and key head; `threads` and `shared_bytes` of a
/// block.
inline int64_t choose_splits(const Attention& a, int64_t tiles, int64_t threads,
                             int64_t shared_bytes) {
  constexpr int64_t kLeastKeys = 64, kCombineBytes = 12 << 20;
  const Gpu& gpu = gpu_facts();
  const int64_t resident =
      gpu.processors * (gpu.shared_of_processor >= 2 * (shared_bytes + 1024) ? 2 : 1);
  // Measured on an H200: 16 splits of 8 heads, 128 blocks, took 129 us where 10 took 140.
  const int64_t alone = gpu.processors * 15 / 16 * 128 / threads;
  const int64_t each = tiles * a.batch * a.heads_k;
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
  const int64_t most = least(least(kMostKeyParts, seen / kLeastKeys), 2 * resident / each + 1);
  int64_t best = 1, least_cost = cost(1);
  for (int64_t splits = 2; splits <= most; ++splits) {
    const int64_t found = cost(splits);
    if (found < least_cost) best = splits, least_cost = found;
  }
  return best;
}

/// Bytes for the parts.
inline int64_t decode_workspace_of(const Attention& a, int64_t splits) {
  return splits > 1 ? splits * a.batch * a.heads_q * a.length_q * (a.head_dim_v + 1) * 4 : 0;
}

/// See attention_decode.cuh.
bool takes_decode(const Attention& a);
int64_t decode_workspace(const Attention& a);
const char* launch_decode(const AttentionForward& c, void* workspace, void* stream);

}  // namespace flexops::attention
