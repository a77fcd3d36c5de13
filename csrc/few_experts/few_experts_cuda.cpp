// The launcher of experts of few tokens: gate and up, then down.

#include "few_experts/few_experts.h"

#include "common/launch.h"
#include "few_experts/few_experts.cuh"

namespace flexops {
namespace {

using few_experts::Params;

/// Warps of a block, which share k, measured on an H200: where weights lie by rows, with up to
/// kShort columns and with more; where they lie by columns, of gate and up, and of down.
constexpr int kFew = 2, kSome = 4, kColumnsFirst = 8, kColumnsLast = 16, kShort = 2048;
/// Lanes beside each other where weights lie by columns: the fewer, the more blocks.
constexpr int kLanesFirst = 16, kLanesLast = 4;

/// Products for each of `rows` results' rows. kAdds: of down.
template <class T, bool kAdds>
void launch_part(Params& p, int64_t rows, bool columns, void* stream) {
  constexpr int kWarps = kAdds ? kColumnsLast : kColumnsFirst,
                kLanes = kAdds ? kLanesLast : kLanesFirst;
  const auto start = [&](KernelOf<Params> chosen, unsigned warps, int lines) {
    p.blocks = static_cast<int>(ceil_div(p.lines, lines));
    LaunchConfig config{blocks(rows * p.blocks), {32 * warps}, stream};
    config.early = gpu_facts().capability >= 90;
    launch(chosen, config, p);
  };
  if (columns)
    return start(kernel<few_experts::by_columns<T, kAdds, kWarps, kLanes>>, kWarps, 8 * kLanes);
  if (!kAdds && p.k <= kShort)
    return start(kernel<few_experts::by_rows<T, false, kFew>>, kFew, few_experts::kLines);
  start(kernel<few_experts::by_rows<T, kAdds, kSome>>, kSome, few_experts::kLines);
}

template <class T>
void launch_both(const FewExperts& call, void* stream) {
  const int64_t tokens = call.x.size(0), k = call.choices.size(1), hidden = call.x.size(1),
                inner = call.down.size(call.columns ? 1 : 2);
  Params p = {};
  p.choices = call.choices.data, p.wide = call.choices.dtype == Dtype::i64;
  p.scales = call.weights.data, p.float_scales = call.weights.dtype == Dtype::f32;
  p.experts = static_cast<int>(call.down.size(0)), p.per_token = static_cast<int>(k);
  p.activation = static_cast<int>(call.activation), p.interleaved = call.interleaved;
  p.alpha = call.alpha, p.limit = call.limit;
  p.x = call.x.data, p.weights = call.gate_up.data, p.out = call.inner;
  p.bias = call.gate_up_bias ? call.gate_up_bias.data : nullptr;
  p.lines = static_cast<int>(2 * inner), p.k = static_cast<int>(hidden);
  launch_part<T, false>(p, tokens * k, call.columns, stream);
  p.x = call.inner, p.weights = call.down.data, p.out = call.out.data;
  p.bias = call.down_bias ? call.down_bias.data : nullptr;
  p.lines = static_cast<int>(hidden), p.k = static_cast<int>(inner);
  launch_part<T, true>(p, tokens, call.columns, stream);
}

}  // namespace

const char* few_experts_cuda(const FewExperts& call, void* stream) {
  call.x.dtype == Dtype::bf16 ? launch_both<bf16>(call, stream) : launch_both<f16>(call, stream);
  return last_error();
}

}  // namespace flexops
