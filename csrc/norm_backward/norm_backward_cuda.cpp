// The norms' backward launchers: one way or two, and the grid.

#include "norm_backward/norm_backward.cuh"

#include "norm/norm_launch.h"
#include "norm_backward/norm_backward.h"

namespace flexops {
namespace {

using norm::Backward;

bool has_vectors(const NormBackward& a, int64_t vector) {
  return a.columns % vector == 0 && a.x_stride % vector == 0 && a.grad_stride % vector == 0 &&
         a.grad_residual_stride % vector == 0 && aligned(a.x, 16) && aligned(a.grad, 16) &&
         aligned(a.grad_residual, 16) && aligned(a.grad_x, 16) && aligned(a.weight, 16);
}

/// Whether backward_walk has the weight as float32: no 16 bits hold its sum with an offset.
bool has_wide_weight(const NormBackward& a) {
  return a.weight && (a.weight_type != a.type || a.offset != 0.0f);
}

/// How a gradient is found. Both ways leave `blocks` sums of each column.
struct Plan {
  bool walks = false;  // backward_walk; else backward_input and backward_parameters
  bool vectors;        // else one element at a time
  int64_t blocks;
  int threads = 0;  // of backward_walk, as the rest
  int64_t shared_bytes = 0;
  unsigned cluster = 1;
};

/// Blocks that fill a multiprocessor, of as many groups as leave room for two
/// rows each.
bool plan_walk(Plan& plan, Backward& p, const NormBackward& a) {
  constexpr int64_t kReserved = 3072;  // the kernel's own shared memory
  const int64_t parts = norm::kParts, held = ceil_div(p.vectors, parts);
  if (held > norm::kWalkThreads) return false;
  p.lanes = norm::lanes_for(held, norm::kWalkThreads);
  const int64_t word = parts * 16, stages = norm::kStages * (a.grad_residual ? 3 : 2) * word;
  const int64_t weights = has_wide_weight(a) ? word * 4 / element_size(a.type) : word;
  const int64_t tuned = a.type == ElementType::f32 ? 256 : 512,
                most_threads = p.lanes > tuned ? p.lanes : tuned;
  const Gpu& gpu = gpu_facts();
  const int64_t a_sm = norm::kWalkThreads / most_threads, limit = gpu.shared_of_block,
                share = gpu.shared_of_processor / a_sm;
  const int64_t room = (limit < share ? limit : share) - kReserved;
  // Few rows are spread over all multiprocessors, in blocks of at least a warp.
  const int64_t processors = gpu.processors, warp = ceil_div(norm::kNarrowWarp, p.lanes);
  const int64_t shared_out = ceil_div(a.rows, processors),
                wanted = shared_out > warp ? shared_out : warp;
  int64_t groups = most_threads / p.lanes;
  while (groups / 2 >= wanted) groups /= 2;
  for (; groups > 0; groups /= 2) {
    const int64_t threads = groups * p.lanes;
    if (threads % norm::kNarrowWarp != 0) break;
    if (threads * (weights + stages) > room) continue;
    plan.threads = static_cast<int>(threads);
    plan.shared_bytes = threads * (weights + stages);
    const int64_t needed = ceil_div(a.rows, groups), most = a_sm * processors;
    plan.blocks = needed < most ? needed : most;
    return true;
  }
  return false;
}

/// Only bf16 has a kernel of its own for RMS norm: layer norm's does it as well, a little slower
/// where 16-bit data come fast.
KernelOf<Backward> find_walk(const NormBackward& a) {
  if (a.type == ElementType::f32) return kernel<norm::backward_walk<float, true, false>>;
  if (a.type == ElementType::f16) return rare_kernel<norm::backward_walk<f16, true, false>>;
  return a.centered ? kernel<norm::backward_walk<bf16, true, false>>
                    : kernel<norm::backward_walk<bf16, false, false>>;
}
#if !FLEXOPS_HIP
KernelOf<Backward> find_clustered_walk(const NormBackward& a) {
  if (a.type == ElementType::f32) return rare_kernel<norm::backward_walk<float, true, true>>;
  if (a.type == ElementType::f16) return rare_kernel<norm::backward_walk<f16, true, true>>;
  return a.centered ? rare_kernel<norm::backward_walk<bf16, true, true>>
                    : rare_kernel<norm::backward_walk<bf16, false, true>>;
}
#endif

/// Clusters of blocks, as many as the GPU holds at once, where a row is too long for a block.
bool plan_clusters(Plan& plan, Backward& p, const NormBackward& a) {
#if FLEXOPS_HIP
  (void)plan, (void)p, (void)a;
  return false;
#else
  if (gpu_facts().capability < 90) return false;
  const int64_t parts = norm::kParts, held = ceil_div(p.vectors, parts);
  const int64_t word = parts * 16, stages = norm::kStages * (a.grad_residual ? 3 : 2) * word;
  const int64_t weights = has_wide_weight(a) ? word * 4 / element_size(a.type) : word;
  // As many rows as possible at the same time, and then in many small blocks: while one waits for a
  // row's sums, others have work.
  constexpr int64_t kReserved = 3072;  // the kernel's own shared memory, and the driver's
  const Gpu& gpu = gpu_facts();
  int64_t size = 0, resident = 0;
  for (int64_t blocks = 2; blocks <= hopper::kMostClusterBlocks; ++blocks) {
    const int64_t lanes = ceil_div(ceil_div(held, blocks), norm::kNarrowWarp) * norm::kNarrowWarp,
                  bytes = lanes * (weights + stages);
    if (lanes > norm::kWalkThreads || bytes + kReserved > gpu.shared_of_block) continue;
    const int64_t of_processor =
        least(norm::kWalkThreads / lanes, gpu.shared_of_processor / (bytes + kReserved));
    if (of_processor * size < resident * blocks) continue;
    size = blocks, resident = of_processor, p.lanes = static_cast<int>(lanes);
  }
  if (size == 0) return false;
  plan.threads = p.lanes, plan.shared_bytes = p.lanes * (weights + stages);
  plan.cluster = static_cast<unsigned>(size), p.blocks = static_cast<int>(size);
  LaunchConfig config{blocks(size), blocks(plan.threads), nullptr, plan.shared_bytes};
  config.cluster = plan.cluster;
  plan.blocks = least(resident_clusters(find_clustered_walk(a), config), a.rows);
  return plan.blocks > 0;
#endif
}

Plan make_plan(Backward& p, const NormBackward& a) {
  Plan plan;
  const int64_t vector = 16 / element_size(a.type);
  plan.vectors = has_vectors(a, vector);
  p.rows = a.rows, p.columns = static_cast<int>(a.columns);
  p.vectors = static_cast<int>(plan.vectors ? a.columns / vector : a.columns);
  plan.walks = plan.vectors && (plan_walk(plan, p, a) || plan_clusters(plan, p, a));
  if (plan.walks) return plan;
  const int64_t across = ceil_div(p.vectors, norm::kShortThreads);
  const int64_t wanted = ceil_div(int64_t{gpu_facts().processors} * 16, across),
                most = ceil_div(a.rows, 16);
  plan.blocks = wanted < most ? wanted : most;
  p.lanes = norm::lanes_for((p.vectors + 1) / 2, norm::kMostThreads);
  return plan;
}

// By elements, by vectors.
const KernelOf<Backward> kInput[2][3] = {FLEXOPS_EACH_TYPE(rare_kernel, norm::backward_input, 1),
                                         FLEXOPS_EACH_TYPE(rare_kernel, norm::backward_input)};
const KernelOf<Backward> kParameters[2][3] = {
    FLEXOPS_EACH_TYPE(rare_kernel, norm::backward_parameters, 1),
    FLEXOPS_EACH_TYPE(rare_kernel, norm::backward_parameters)};

void walk(const Plan& plan, Backward& p, const NormBackward& a, void* stream) {
  // Rows that a block has at the same time are neighbours, but short ones: with those the last
  // round has work for every block.
  const bool spread = p.lanes <= norm::kNarrowWarp;
  p.block_step = spread ? 1 : plan.threads / p.lanes,
  p.group_step = spread ? static_cast<int>(plan.blocks) : 1;
  LaunchConfig config{blocks(plan.blocks * plan.cluster), blocks(plan.threads), stream,
                      plan.shared_bytes};
  config.cluster = plan.cluster;
#if !FLEXOPS_HIP
  if (plan.cluster > 1) return launch(find_clustered_walk(a), config, p);
#endif
  launch(find_walk(a), config, p);
}

void read_twice(const Plan& plan, Backward& p, const NormBackward& a, void* stream) {
  const int type = static_cast<int>(a.type);
  if (a.grad_x) {
    const norm::Grid grid(p.lanes, a.rows);
    launch(kInput[plan.vectors][type], {blocks(grid.blocks), blocks(grid.threads), stream}, p);
  }
  if (!p.partial_weight && !p.partial_bias) return;
  p.rows_per_block = ceil_div(a.rows, plan.blocks);
  const int64_t across = ceil_div(p.vectors, norm::kShortThreads);
  launch(kParameters[plan.vectors][type],
         {blocks(across, plan.blocks), {norm::kShortThreads}, stream}, p);
}

void reduce(const Plan& plan, const Backward& p, const NormBackward& a, void* stream) {
  SumParts r;
  r.count = plan.blocks, r.columns = p.columns;
  int sums = 0;
  const auto add = [&](const float* partial, void* out, ElementType type) {
    if (out == nullptr) return;
    r.parts[sums] = partial, r.out[sums] = out, r.type[sums] = type;
    ++sums;
  };
  add(p.partial_weight, a.grad_weight, a.weight_type);
  add(p.partial_bias, a.grad_bias, a.bias_type);
  if (sums == 0) return;
  launch(kernel<sum_parts>, {blocks(ceil_div(p.columns, kSumColumns), sums), {kSumThreads}, stream},
         r);
}

}  // namespace

int64_t norm_partial_rows_cuda(const NormBackward& a) {
  Backward p;
  return make_plan(p, a).blocks;
}

const char* norm_backward_cuda(const NormBackward& a, void* stream) {
  Backward p;
  p.x = a.x, p.grad = a.grad, p.grad_residual = a.grad_residual, p.weight = a.weight;
  p.mean = a.mean, p.rstd = a.rstd, p.grad_x = a.grad_x;
  p.partial_weight = a.grad_weight ? a.partial : nullptr;
  p.partial_bias =
      a.grad_bias ? a.partial + (a.grad_weight ? a.partial_rows * a.columns : 0) : nullptr;
  p.x_stride = a.x_stride, p.grad_stride = a.grad_stride,
  p.grad_residual_stride = a.grad_residual_stride;
  p.inverse = 1.0f / static_cast<float>(a.columns);
  p.offset = a.offset, p.wide_weight = has_wide_weight(a);
  p.type = a.type, p.weight_type = a.weight_type, p.centered = a.centered;
  p.keep_in_l2 = norm::is_large(a.rows * a.columns, a.type);
  const Plan plan = make_plan(p, a);
  if (a.rows > 0) plan.walks ? walk(plan, p, a, stream) : read_twice(plan, p, a, stream);
  reduce(plan, p, a, stream);
  return last_error();
}

}  // namespace flexops
