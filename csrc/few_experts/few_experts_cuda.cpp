// The launcher of experts of few tokens: gate and up, then down.

#include "few_experts/few_experts.h"

#include "common/launch.h"
#include "few_experts/few_experts.cuh"
#include "few_experts/few_experts_codes.cuh"
#include "int4_linear/int4_unpack.cuh"

namespace flexops {
namespace {

using few_experts::Codes;
using few_experts::CodesParams;
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

/// Both kinds of products have this: what a call says, beside its weights.
template <class Call>
void take(Params& p, const Call& call, int64_t experts) {
  p.choices = call.choices.data, p.wide = call.choices.dtype == Dtype::i64;
  p.scales = call.weights.data, p.float_scales = call.weights.dtype == Dtype::f32;
  p.experts = static_cast<int>(experts), p.per_token = static_cast<int>(call.choices.size(1));
  p.activation = static_cast<int>(call.activation), p.interleaved = call.interleaved;
  p.alpha = call.alpha, p.limit = call.limit;
}
/// Of one product, of `lines` rows of weights with `k` columns each.
void take_part(Params& p, const void* x, const void* weights, const TensorView& bias, void* out,
               int64_t lines, int64_t k) {
  p.x = x, p.weights = weights, p.bias = bias ? bias.data : nullptr, p.out = out;
  p.lines = static_cast<int>(lines), p.k = static_cast<int>(k);
}

template <class T>
void launch_both(const FewExperts& call, void* stream) {
  const int64_t tokens = call.x.size(0), slots = call.choices.numel, hidden = call.x.size(1),
                inner = call.down.size(call.columns ? 1 : 2);
  Params p = {};
  take(p, call, call.down.size(0));
  take_part(p, call.x.data, call.gate_up.data, call.gate_up_bias, call.inner, 2 * inner, hidden);
  launch_part<T, false>(p, slots, call.columns, stream);
  take_part(p, call.inner, call.down.data, call.down_bias, call.out.data, hidden, inner);
  launch_part<T, true>(p, tokens, call.columns, stream);
}

/// Warps of a block with weights of 4 bits; of down, whose blocks have up to kFewTiles tiles of
/// columns, and more: measured on an H200. Two blocks of four warps in a cluster are as fast as one
/// of eight.
constexpr int kCodesFirst = 4, kCodesFew = 4, kCodesMany = 8, kFewTiles = 128;

template <class T, bool kAdds, int kWarps>
void launch_codes(const CodesParams& p, int64_t rows, int64_t group_size, bool mxfp4,
                  void* stream) {
  LaunchConfig config{blocks(rows * p.blocks), {32 * kWarps}, stream};
  config.early = gpu_facts().capability >= 90;
  if (mxfp4)
    return launch(kernel<few_experts::of_codes<T, kAdds, kWarps, Codes::mxfp4>>, config, p);
  if (group_size == 32)
    return launch(rare_kernel<few_experts::of_codes<T, kAdds, kWarps, Codes::whole32>>, config, p);
  launch(kernel<few_experts::of_codes<T, kAdds, kWarps, Codes::whole>>, config, p);
}

template <class T, bool kAdds>
void launch_codes(CodesParams& p, int64_t rows, int64_t group_size, bool mxfp4, void* stream) {
  p.tiles = p.lines / 16, p.tiles_k = static_cast<int>(ceil_div(p.k, 64));
  p.groups = static_cast<int>(ceil_div(int64_t{p.tiles_k} * 64, group_size));
  p.group_shift = group_size == 32 ? 5 : group_size == 64 ? 6 : 7;
  p.rounds = static_cast<int>(ceil_div(p.tiles_k, group_size == 32 ? 4 : 8));
  p.blocks = kAdds ? p.tiles : p.tiles / 2;
  if constexpr (kAdds) {
    if (p.tiles_k * p.per_token > kFewTiles)
      return launch_codes<T, true, kCodesMany>(p, rows, group_size, mxfp4, stream);
  }
  launch_codes<T, kAdds, kAdds ? kCodesFew : kCodesFirst>(p, rows, group_size, mxfp4, stream);
}

template <class T>
void launch_both(const FewExpertsInt4& call, void* stream) {
  const int64_t tokens = call.x.size(0), hidden = call.x.size(1);
  CodesParams p = {};
  take(p, call, call.experts);
  p.half_factors = call.gate_up.scales.dtype == Dtype::f16;
  const auto part = [&](const FewExpertsInt4::Weight& weight) {
    p.factors = weight.scales.as<uint16_t>();
    p.zeros = weight.zeros ? weight.zeros.as<uint16_t>() : nullptr;
  };
  part(call.gate_up);
  take_part(p, call.x.data, call.gate_up.packed.data, call.gate_up_bias, call.inner, 2 * call.width,
            hidden);
  launch_codes<T, false>(p, call.choices.numel, call.group_size, call.mxfp4, stream);
  part(call.down);
  take_part(p, call.inner, call.down.packed.data, call.down_bias, call.out.data, hidden,
            call.width);
  launch_codes<T, true>(p, tokens, call.group_size, call.mxfp4, stream);
}

}  // namespace

const char* few_experts_cuda(const FewExperts& call, void* stream) {
  call.x.dtype == Dtype::bf16 ? launch_both<bf16>(call, stream) : launch_both<f16>(call, stream);
  return last_error();
}
const char* few_experts_int4_cuda(const FewExpertsInt4& call, void* stream) {
  call.x.dtype == Dtype::bf16 ? launch_both<bf16>(call, stream) : launch_both<f16>(call, stream);
  return last_error();
}

const char* mxfp4_unpack_cuda(const Mxfp4Weight& weight, void* stream) {
  int4::UnpackParams p = {};
  p.packed = weight.packed.as<uint8_t>(), p.scales = weight.scales.data, p.out = weight.out.data;
  p.n = static_cast<int>(weight.out.size(0)), p.k = static_cast<int>(weight.out.size(1));
  p.tiles_k = static_cast<int>(weight.packed.size(1));
  p.groups = 2 * p.tiles_k, p.group_shift = 5;
  p.scale_type = weight.scale_type;
  p.tiles = weight.packed.size(0) * p.tiles_k;
  const LaunchConfig config = {blocks(ceil_div(p.tiles, 8)), {256}, stream};
  if (weight.out.dtype == Dtype::f32) {
    launch(rare_kernel<int4::unpack<float, true>>, config, p);
  } else if (weight.out.dtype == Dtype::f16) {
    launch(kernel<int4::unpack<f16, true>>, config, p);
  } else {
    launch(kernel<int4::unpack<bf16, true>>, config, p);
  }
  return last_error();
}

}  // namespace flexops
