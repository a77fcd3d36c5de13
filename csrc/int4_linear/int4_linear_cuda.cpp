// The launchers of products with 4-bit weights: which kernel, its tiles, and the grid.

#include "int4_linear/int4_linear.h"

#include "common/launch.h"
#include "int4_linear/int4_few_rows.cuh"
#include "int4_linear/int4_many_rows.cuh"
#include "int4_linear/int4_many_rows_hopper.cuh"
#include "int4_linear/int4_unpack.cuh"

namespace flexops {
namespace {

using int4::Params;

/// A kernel's configuration: as a number, for measurements, `kind << 24 | a << 16 | b << 8 |
/// cluster`.
struct Plan {
  enum Kind { kFew = 1, kMany, kHopper };
  int kind;
  int a;        // few_rows: blocks of a multiprocessor; many_rows: warps beside each other along n;
                // many_rows_hopper: rows of x of a block
  int b;        // few_rows: stages; many_rows: warps of a block, the others share the columns
  int cluster;  // blocks that share the columns
};

int log2_of(int64_t value) {
  int log = 0;
  while (int64_t{1} << log < value) ++log;
  return log;
}

constexpr int kMostFewRows = 16, kMostPassRows = 16;

/// What few_rows makes of a product.
struct Few {
  int chunks, rows, stages, pass_rows;
  int64_t blocks, cost;
  int4::FewLayout layout;
  int chunk;
};
/// In how many stages the weight is streamed, or 0: there is no room for two.
Few make_few(const Int4Product& c, const Gpu& gpu, int resident, int stages, int cluster) {
  const int chunk = stages & 16 ? 8 : 4;
  stages &= 15;
  const bool small = c.weight.group_size == 32;
  const int m = static_cast<int>(c.m), tokens = m <= 2 ? 2 : m <= 8 ? 8 : 16;
  const int64_t groups = int64_t{gpu.processors} * resident / cluster;
  const int64_t used = groups < c.weight.tiles_n ? groups : c.weight.tiles_n;
  const int rows = static_cast<int>(ceil_div(c.weight.tiles_n, used));
  const int chunks =
      static_cast<int>(ceil_div(ceil_div(c.weight.tiles_k, chunk), cluster));
  const int most_pass = m <= 2 ? kMostPassRows : m <= 8 ? 8 : 4;
  const int pass_rows = rows < most_pass ? rows : most_pass;
  const auto layout = [&](int count) {
    return int4::FewLayout(chunk, m, tokens, chunks, pass_rows, count, small);
  };
  int64_t room = gpu.shared_of_processor / resident - 1024;
  if (room > gpu.shared_of_block) room = gpu.shared_of_block;
  if (stages == 0) {
    stages = 8;
    while (stages > 1 && layout(stages).bytes > room) --stages;
  }
  const int64_t weight = int64_t{rows} * chunks * chunk * (small ? 640 : 576);
  return {chunks,          rows,
          stages < 2 || layout(stages).bytes > room ? 0 : stages,
          pass_rows,       used * cluster,
          weight * resident + int64_t{m} * chunks * chunk * 128 * resident + (cluster > 1 ? 1500 * cluster : 0),
          layout(stages), chunk};
}

/// wgmma's kernel rounds scales to x's dtype.
bool takes_hopper(const Int4Product& c) { return c.type == c.weight.scale_type; }

/// Measured on one H200.
Plan choose(const Int4Product& c, const Gpu& gpu) {
  const int64_t processors = gpu.processors;
  const bool clusters = gpu.capability >= 90;
  if (c.m <= kMostFewRows) {
    Plan best = {};
    int64_t least = 0;
    for (int cluster = 1; cluster <= (clusters ? 8 : 1); cluster *= 2) {
      for (int resident = 2; resident >= 1; --resident) {
        const Few few = make_few(c, gpu, resident, 0, cluster);
        if (few.stages == 0 || (best.kind && few.cost >= least)) continue;
        best = {Plan::kFew, resident, few.stages, cluster}, least = few.cost;
      }
    }
    if (best.kind) return best;
  }
  if (gpu.capability == 90 && takes_hopper(c)) {
    const int tokens = c.m <= 32 ? 32 : c.m <= 64 ? 64 : 128;
    const int64_t count = ceil_div(c.weight.tiles_n, 8) * ceil_div(c.m, tokens);
    int cluster = 1;
    while (cluster < 8 && 2 * cluster * count <= processors + processors / 32 &&
           c.weight.tiles_k >= 16 * cluster)
      cluster *= 2;
    return {Plan::kHopper, tokens, 0, cluster};
  }
  const int64_t count = ceil_div(c.weight.tiles_n, 4) * ceil_div(c.m, 64);
  if (count >= 3 * processors && c.m > 32) return {Plan::kMany, 8, 8, 1};
  if (count > processors || gpu.shared_of_block < 180 << 10) return {Plan::kMany, 2, 4, 1};
  const int cluster = !clusters || 2 * count > processors ? 1 : 6 * count > processors ? 2 : 4;
  return {Plan::kMany, 2, 8, cluster};
}

Params make_params(const Int4Product& c, const Plan& plan) {
  const Int4View& w = c.weight;
  Params p;
  p.x = c.x, p.packed = w.packed, p.bias = c.bias, p.out = c.out;
  p.scales = static_cast<const uint16_t*>(w.scales);
  p.zeros = static_cast<const uint16_t*>(w.zeros);
  p.m = static_cast<int>(c.m), p.n = static_cast<int>(w.n), p.k = static_cast<int>(w.k);
  p.tiles_n = static_cast<int>(w.tiles_n), p.tiles_k = static_cast<int>(w.tiles_k);
  p.groups = static_cast<int>(w.groups), p.group_shift = log2_of(w.group_size);
  p.half_scales = w.scale_type == ElementType::f16;
  p.cluster = plan.cluster;
  return p;
}

LaunchConfig config_of(int64_t grid, int warps, int64_t shared_bytes, int cluster, void* stream) {
  return {blocks(grid),
          {static_cast<unsigned>(32 * warps)},
          stream,
          shared_bytes,
          static_cast<unsigned>(cluster),
          gpu_facts().capability >= 90};
}

template <class T, int kChunk, int kSlots, int kTokens>
void launch_few(Params& p, const Few& few, void* stream) {
  p.chunks = few.chunks, p.pass_rows = few.pass_rows, p.stages = few.stages;
  const LaunchConfig config =
      config_of(few.blocks, int4::kFewWarps, few.layout.bytes, p.cluster, stream);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::few_rows<T, kChunk, kSlots, kTokens, true>>, config, p);
  launch(kernel<int4::few_rows<T, kChunk, kSlots, kTokens, false>>, config, p);
}

template <class T, class S, int kTokens, int kBeside>
void launch_many(Params& p, const Plan& plan, void* stream) {
  const int64_t stage = kTokens * 1024 + kBeside * int4::kWarpStage;
  const int64_t staged = plan.b / kBeside * int4::kManyStages * stage;
  const int64_t parts = int64_t{plan.b} * int4::kManyRows * kTokens * 512;
  p.token_tiles = static_cast<int>(ceil_div(p.m, 8 * kTokens));
  p.warps_n = kBeside, p.log_rows = log2_of(16 * int4::kManyRows * kBeside);
  const int64_t grid = ceil_div(p.tiles_n, int4::kManyRows * kBeside) * p.token_tiles;
  const LaunchConfig config = config_of(grid * plan.cluster, plan.b,
                                        staged > parts ? staged : parts, plan.cluster, stream);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::many_rows<T, S, kTokens, kBeside, true>>, config, p);
  launch(kernel<int4::many_rows<T, S, kTokens, kBeside, false>>, config, p);
}

template <class T, class S>
void launch_many(Params& p, const Plan& plan, void* stream) {
  if (plan.a == 2) {
    if (p.m <= 32) return launch_many<T, S, 4, 2>(p, plan, stream);
    return launch_many<T, S, 8, 2>(p, plan, stream);
  }
  if (p.m <= 32) return launch_many<T, S, 4, 8>(p, plan, stream);
  launch_many<T, S, 8, 8>(p, plan, stream);
}

template <class T, int kN>
void launch_hopper(Params& p, void* stream) {
  p.token_tiles = static_cast<int>(ceil_div(p.m, kN));
  const int64_t grid = ceil_div(p.tiles_n, 4 * int4::kHopperGroups) * p.token_tiles * p.cluster;
  const LaunchConfig config = config_of(grid, 12, int4::kHopperShared<kN>, p.cluster, stream);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::many_rows_hopper<T, kN, true>>, config, p);
  launch(kernel<int4::many_rows_hopper<T, kN, false>>, config, p);
}

template <class T>
void launch_product(const Int4Product& c, const Plan& plan, void* stream) {
  Params p = make_params(c, plan);
  if (plan.kind == Plan::kFew) {
    const Few few = make_few(c, gpu_facts(), plan.a, plan.b, plan.cluster);
    if (few.stages == 0) return detail::note("this plan takes more shared memory than there is");
    if (few.chunk == 8) {
      if (c.m <= 2) return launch_few<T, 8, 4, 1>(p, few, stream);
      if (c.m <= 8) return launch_few<T, 8, 1, 1>(p, few, stream);
      return launch_few<T, 8, 1, 2>(p, few, stream);
    }
    if (c.m <= 2) return launch_few<T, 4, 4, 1>(p, few, stream);
    if (c.m <= 8) return launch_few<T, 4, 1, 1>(p, few, stream);
    return launch_few<T, 4, 1, 2>(p, few, stream);
  }
  if (plan.kind == Plan::kHopper) {
    if (!takes_hopper(c)) return detail::note("this plan takes scales of x's dtype");
    if (plan.a == 32) return launch_hopper<T, 32>(p, stream);
    if (plan.a == 64) return launch_hopper<T, 64>(p, stream);
    return launch_hopper<T, 128>(p, stream);
  }
  p.half_scales ? launch_many<T, f16>(p, plan, stream) : launch_many<T, bf16>(p, plan, stream);
}

template <class T>
void launch_unpack(int4::UnpackParams& p, void* stream) {
  launch(kernel<int4::unpack<T>>, {blocks(ceil_div(p.tiles, 8)), {256}, stream}, p);
}

}  // namespace

const char* int4_product_cuda(const Int4Product& call, int64_t plan, void* stream) {
  const Gpu& gpu = gpu_facts();
  const auto byte = [&](int shift) { return static_cast<int>(plan >> shift & 255); };
  const Plan chosen = plan ? Plan{byte(24), byte(16), byte(8), byte(0)} : choose(call, gpu);
  call.type == ElementType::bf16 ? launch_product<bf16>(call, chosen, stream)
                                 : launch_product<f16>(call, chosen, stream);
  return last_error();
}

const char* int4_unpack_cuda(const Int4View& w, void* out, ElementType type, void* stream) {
  int4::UnpackParams p;
  p.packed = w.packed, p.scales = w.scales, p.zeros = w.zeros, p.out = out;
  p.n = static_cast<int>(w.n), p.k = static_cast<int>(w.k);
  p.tiles_k = static_cast<int>(w.tiles_k), p.groups = static_cast<int>(w.groups);
  p.group_shift = log2_of(w.group_size);
  p.scale_type = w.scale_type, p.zero_type = w.zero_type;
  p.tiles = w.tiles_n * w.tiles_k;
  if (type == ElementType::f32) {
    launch_unpack<float>(p, stream);
  } else if (type == ElementType::f16) {
    launch_unpack<f16>(p, stream);
  } else {
    launch_unpack<bf16>(p, stream);
  }
  return last_error();
}

}  // namespace flexops
