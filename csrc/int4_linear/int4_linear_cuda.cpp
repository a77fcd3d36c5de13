// The launchers of products with 4-bit weights: which kernel, its tiles, and the grid.

#include "int4_linear/int4_linear.h"

#include "common/launch.h"
#include "int4_linear/int4_few_rows.cuh"
#include "int4_linear/int4_many_rows.cuh"
#include "int4_linear/int4_unpack.cuh"

namespace flexops {
namespace {

using int4::Params;

/// A kernel's configuration: as a number, for measurements, `rows << 24 | warps_n << 16 | warps <<
/// 8 | cluster`.
struct Plan {
  int rows;     // tiles of 16 rows of the weight for a warp
  int warps_n;  // warps beside each other along n; 0: few_rows
  int warps;    // of a block; those that are not beside each other share the columns
  int cluster;  // blocks that share the columns
};

int log2_of(int64_t value) {
  int log = 0;
  while (int64_t{1} << log < value) ++log;
  return log;
}

Plan choose(const Int4Product& c, const Gpu& gpu) {
  const bool clusters = gpu.capability >= 90;
  const int64_t tiles = c.weight.tiles_n;
  if (c.m <= 8) {
    const int rows = tiles >= 8 * gpu.processors ? 2 : 1;
    return {rows, 0, c.weight.tiles_k >= 64 ? 16 : 8, 1};
  }
  if (c.m <= 16) {
    const int rows = 4;
    int cluster = 1;
    while (clusters && cluster < 8 && ceil_div(tiles, rows) * cluster < 2 * gpu.processors)
      cluster *= 2;
    return {rows, 0, 8, cluster};
  }
  int cluster = 1;
  const int64_t blocks = ceil_div(tiles, 8) * ceil_div(c.m, 64);
  while (clusters && cluster < 8 && 2 * blocks * cluster <= gpu.processors * 5 / 4) cluster *= 2;
  return {int4::kManyRows, 4, 8, cluster};
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
  p.bf16_scales = w.scale_type == ElementType::bf16;
  p.cluster = plan.cluster, p.token_tiles = 1, p.stages = 0, p.stage_bytes = 0, p.log_rows = 0;
  p.warps_n = plan.warps_n > 0 ? plan.warps_n : 1;
  return p;
}

template <class T, int kRows, int kTokens, int kAhead>
void launch_few(Params& p, const Plan& plan, void* stream) {
  const int64_t blocks_n = ceil_div(p.tiles_n, kRows);
  const LaunchConfig config{blocks(blocks_n * plan.cluster),
                            {static_cast<unsigned>(32 * plan.warps)},
                            stream,
                            int64_t{plan.warps} * kRows * kTokens * 512,
                            static_cast<unsigned>(plan.cluster),
                            gpu_facts().capability >= 90};
  p.log_rows = log2_of(16 * kRows);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::few_rows<T, kRows, kTokens, kAhead, true>>, config, p);
  launch(kernel<int4::few_rows<T, kRows, kTokens, kAhead, false>>, config, p);
}

template <class T>
void launch_few_rows(Params& p, const Plan& plan, void* stream) {
  if (p.m <= 8) {
    if (plan.rows == 1) return launch_few<T, 1, 1, 4>(p, plan, stream);
    if (plan.rows == 2) return launch_few<T, 2, 1, 3>(p, plan, stream);
    return launch_few<T, 4, 1, 2>(p, plan, stream);
  }
  if (plan.rows == 2) return launch_few<T, 2, 2, 2>(p, plan, stream);
  return launch_few<T, 4, 2, 2>(p, plan, stream);
}

template <class T, int kTokens>
void launch_many(Params& p, const Plan& plan, const Gpu& gpu, void* stream) {
  p.stage_bytes = kTokens * 1024 + plan.warps_n * int4::kWarpStage;
  const int64_t stage = int64_t{plan.warps / plan.warps_n} * p.stage_bytes;
  const int64_t parts = int64_t{plan.warps} * int4::kManyRows * kTokens * 512;
  p.stages = static_cast<int>(least(5, gpu.shared_of_block / stage));
  p.token_tiles = static_cast<int>(ceil_div(p.m, 8 * kTokens));
  const int64_t blocks_n = ceil_div(p.tiles_n, plan.warps_n * int4::kManyRows);
  const int64_t bytes = p.stages * stage;
  const LaunchConfig config{blocks(blocks_n * p.token_tiles * plan.cluster),
                            {static_cast<unsigned>(32 * plan.warps)},
                            stream,
                            bytes > parts ? bytes : parts,
                            static_cast<unsigned>(plan.cluster),
                            gpu.capability >= 90};
  p.log_rows = log2_of(plan.warps_n * int4::kManyRows * 16);
  if (p.group_shift == 5) return launch(rare_kernel<int4::many_rows<T, kTokens, true>>, config, p);
  launch(kernel<int4::many_rows<T, kTokens, false>>, config, p);
}

template <class T>
void launch_product(Params& p, const Plan& plan, const Gpu& gpu, void* stream) {
  if (plan.warps_n == 0) return launch_few_rows<T>(p, plan, stream);
  if (p.m <= 16) return launch_many<T, 2>(p, plan, gpu, stream);
  if (p.m <= 32) return launch_many<T, 4>(p, plan, gpu, stream);
  launch_many<T, 8>(p, plan, gpu, stream);
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
  Params p = make_params(call, chosen);
  if (call.type == ElementType::bf16) {
    launch_product<bf16>(p, chosen, gpu, stream);
  } else {
    launch_product<f16>(p, chosen, gpu, stream);
  }
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
