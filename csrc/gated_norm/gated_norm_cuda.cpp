// The launchers of the gated RMS norm.

#include <type_traits>

#include "common/dispatch.cuh"
#include "common/launch.h"
#include "common/sum_parts.cuh"
#include "gated_norm/gated_norm.cuh"
#include "gated_norm/gated_norm.h"

namespace flexops {
namespace {

using gated_norm::Params;

/// Whether every group's columns are whole vectors of 16 bytes.
template <typename... Views>
bool has_vectors(int64_t groups, const TensorView& x, const TensorView& weight,
                 const Views&... others) {
  const bool whole = x.size(1) / groups % (16 / dtype_size(x.dtype)) == 0;
  return whole && aligned(weight.data) && aligned(x.data) && (aligned(others.data) && ...);
}

struct Plan {
  Params p = {};
  int64_t parts;
  int threads;
  bool vectors, wide;  // a team's threads do not hold a row
  int64_t shared_bytes;

  Dim3 grid() const { return blocks(parts * p.group_blocks); }
};

/// Teams are as small as rows allow. `streams`: tensors that are read.
Plan make_plan(const TensorView& x, int64_t groups, bool vectors, int streams) {
  Plan plan;
  Params& p = plan.p;
  plan.vectors = vectors;
  const Gpu& gpu = gpu_facts();
  const int64_t width = x.size(1) / groups, of_thread = gated_norm::kSlots * streams * 16;
  const int64_t held = ceil_div(width, vectors ? 16 / dtype_size(x.dtype) : 1);
  // Vectors that a block has no thread for are read twice.
  constexpr int64_t kReserved = 1024;  // the kernels' own shared memory
  const int64_t room = (gpu.shared_of_block - kReserved) / of_thread / 32 * 32,
                most = least(gated_norm::kMostThreads, room);
  plan.wide = !vectors || held > most;
  const int64_t warps =
      least(ceil_div(held, 32) * 32,
            plan.wide ? least(gated_norm::kBound<gated_norm::kWide>, most) : most);
  p.lanes = static_cast<int>(!vectors || held > 16 ? warps : held > 8 ? 16 : 8);
  const int64_t teams = p.lanes < gated_norm::kThreads ? gated_norm::kThreads / p.lanes : 1;
  p.group_blocks = static_cast<int>(ceil_div(groups, teams));
  p.together = static_cast<int>(ceil_div(groups, p.group_blocks));
  p.rows = static_cast<int>(teams / p.together);
  plan.threads = static_cast<int>(ceil_div(teams * p.lanes, 32) * 32);
  plan.shared_bytes = plan.threads * of_thread;
  // Few tokens: as many blocks as run at once, each with tokens that lie apart, so that memory is
  // read in order. The same in several rounds for gradients. Results alone come fastest from many
  // blocks of neighbouring tokens.
  p.tokens = x.size(0), p.width = static_cast<int>(width), p.groups = static_cast<int>(groups);
  constexpr int64_t kFew = 4;  // tokens of a team
  const bool gradients = streams == 3;
  const int64_t rounds = gradients || plan.threads > 512 ? 4 : 16;
  const int64_t places =
      ceil_div(gpu.processors * (gated_norm::kMostThreads / plan.threads), p.group_blocks);
  const bool few = p.tokens < places * rounds * p.rows * kFew;
  const int64_t of_team = ceil_div(p.tokens, places * (few ? 1 : rounds) * p.rows);
  const int64_t of_block = (of_team > kFew ? of_team : kFew) * p.rows;
  plan.parts = ceil_div(p.tokens, of_block);
  if (gradients || few) {
    p.block_step = p.rows, p.row_step = plan.parts * p.rows, p.part = p.tokens;
  } else {
    p.block_step = p.part = of_block, p.row_step = p.rows;
  }
  return plan;
}

template <int N>
using Count = std::integral_constant<int, N>;

/// Calls body(T, W, Count of Lanes, Count of the elements of a vector).
template <typename F>
void with_teams(const TensorView& x, const TensorView& weight, const Plan& plan, const F& body) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto with_lanes = [&](auto w) {
      constexpr int N = kPerVector<T>;
      using gated_norm::kWarps, gated_norm::kWide;
      if (!plan.vectors) return body(type, w, Count<kWide>{}, Count<1>{});
      if (plan.wide) return body(type, w, Count<kWide>{}, Count<N>{});
      if (plan.p.lanes == 8) return body(type, w, Count<8>{}, Count<N>{});
      if (plan.p.lanes == 16) return body(type, w, Count<16>{}, Count<N>{});
      return body(type, w, Count<kWarps>{}, Count<N>{});
    };
    if (weight && weight.dtype != x.dtype) return with_lanes(float{});
    return with_lanes(T{});
  });
}

void set_options(Params& p, double eps, bool norm_first, bool sigmoid) {
  p.eps = static_cast<float>(eps), p.norm_first = norm_first, p.sigmoid = sigmoid;
}

Plan make_plan(const GatedNormBackward& c) {
  return make_plan(c.x, c.groups,
                   has_vectors(c.groups, c.x, c.weight, c.gate, c.grad, c.x_grad, c.gate_grad), 3);
}

}  // namespace

const char* gated_rms_norm_cuda(const TensorView& x, const TensorView& gate,
                                const TensorView& weight, double eps, int64_t groups,
                                bool norm_first, bool sigmoid, const TensorView& out,
                                void* stream) {
  if (x.numel == 0) return nullptr;
  Plan plan = make_plan(x, groups, has_vectors(groups, x, weight, gate, out), 2);
  Params& p = plan.p;
  set_options(p, eps, norm_first, sigmoid);
  p.x = x.data, p.gate = gate.data, p.weight = weight.data, p.out = out.data;
  LaunchConfig config{plan.grid(), blocks(plan.threads), stream, plan.shared_bytes};
  p.early = config.early = int64_t{config.grid.x} * config.grid.y <= kFewBlocks;
  with_teams(x, weight, plan, [&](auto type, auto w, auto lanes, auto n) {
    launch(kernel<gated_norm::gated_norm_forward<decltype(type), decltype(w), lanes, n>>, config,
           p);
  });
  return last_error();
}

int64_t gated_norm_parts_cuda(const GatedNormBackward& c) { return make_plan(c).parts; }

const char* gated_norm_backward_cuda(const GatedNormBackward& c, void* stream) {
  Plan plan = make_plan(c);
  Params& p = plan.p;
  set_options(p, c.eps, c.norm_first, c.sigmoid);
  p.grad = c.grad.data, p.x = c.x.data, p.gate = c.gate.data, p.weight = c.weight.data;
  p.out = c.x_grad.data, p.gate_grad = c.gate_grad.data, p.partial = c.partial;
  const LaunchConfig config{plan.grid(), blocks(plan.threads), stream, plan.shared_bytes};
  if (plan.parts > 0)
    with_teams(c.x, c.weight, plan, [&](auto type, auto w, auto lanes, auto n) {
      launch(kernel<gated_norm::gated_norm_backward<decltype(type), decltype(w), lanes, n>>, config,
             p);
    });
  if (!c.weight) return last_error();
  SumParts s = {};
  s.parts[0] = c.partial, s.out[0] = c.weight_grad.data;
  s.type[0] = static_cast<ElementType>(c.weight_grad.dtype);
  s.count = plan.parts, s.columns = static_cast<int>(c.x.size(1));
  launch(kernel<sum_parts>, {blocks(ceil_div(s.columns, kSumColumns)), {kSumThreads}, stream}, s);
  return last_error();
}

}  // namespace flexops
