// flexops::few_experts, few_experts_int4 and mxfp4_unpack: from their arguments to the launcher's.
#pragma once

#include "common/host.h"

#include "few_experts/few_experts.h"

namespace flexops {

inline void few_experts_host(Host& host, const TensorView& x, const TensorView& choices,
                             const TensorView& weights, const TensorView& gate_up,
                             const TensorView& down, const TensorView& gate_up_bias,
                             const TensorView& down_bias, bool columns, bool interleaved,
                             int64_t activation, double alpha, double limit,
                             const TensorView& out) {
  const int rows = columns ? 2 : 1, inputs = columns ? 1 : 2;
  const auto fits = [&](bool right, const char* name) {
    FLEXOPS_CHECK(right, host.op, ": ", name, " does not fit the others");
  };
  fits(x.dim == 2 && aligned(x.data), "x");
  const int64_t hidden = x.size(1), slots = choices.numel;
  fits(choices.dim == 2 && choices.size(0) == x.size(0), "choices");
  fits(weights.dim == 2 && weights.numel == slots, "weights");
  fits(gate_up.dim == 3 && gate_up.size(inputs) == hidden && gate_up.size(rows) % 2 == 0 &&
           aligned(gate_up.data),
       "gate_up");
  const int64_t experts = gate_up.size(0), inner = gate_up.size(rows) / 2;
  fits(down.dim == 3 && down.size(0) == experts && down.size(rows) == hidden &&
           down.size(inputs) == inner && aligned(down.data),
       "down");
  fits(hidden % 8 == 0 && inner % 8 == 0, "x");
  fits(!gate_up_bias || gate_up_bias.numel == experts * 2 * inner, "gate_up_bias");
  fits(!down_bias || down_bias.numel == experts * hidden, "down_bias");
  FLEXOPS_CHECK(activation > kFewNone && activation <= kFewClamped, host.op,
                ": activation must be from 1 to 4, got ", activation);
  if (slots == 0) return;
  void* const between = host.workspace<uint16_t>(slots * inner);
  host.check(few_experts_cuda(
      {x, choices, weights, gate_up, down, gate_up_bias, down_bias, out, between, columns,
       interleaved, activation, static_cast<float>(alpha), static_cast<float>(limit)},
      host.stream()));
}

inline void few_experts_int4_host(Host& host, const TensorView& x, const TensorView& choices,
                                  const TensorView& weights, const TensorView& gate_up,
                                  const TensorView& gate_up_scales, const TensorView& gate_up_zeros,
                                  const TensorView& down, const TensorView& down_scales,
                                  const TensorView& down_zeros, const TensorView& gate_up_bias,
                                  const TensorView& down_bias, int64_t group_size, bool mxfp4,
                                  bool interleaved, int64_t activation, double alpha, double limit,
                                  const TensorView& out) {
  const auto fits = [&](bool right, const char* name) {
    FLEXOPS_CHECK(right, host.op, ": ", name, " does not fit the others");
  };
  FLEXOPS_CHECK(group_size == 32 || (!mxfp4 && (group_size == 64 || group_size == 128)), host.op,
                ": group_size must be 32", mxfp4 ? "" : ", 64 or 128", ", got ", group_size);
  fits(x.dim == 2 && aligned(x.data), "x");
  const int64_t hidden = x.size(1), slots = choices.numel;
  fits(hidden > 0 && hidden % 16 == 0 && hidden % group_size == 0, "x");
  fits(choices.dim == 2 && choices.size(0) == x.size(0) && choices.size(1) <= kMostChoicesOfToken,
       "choices");
  fits(weights.dim == 2 && weights.numel == slots, "weights");
  fits(down.dim == 3 && 16 * down.size(0) % hidden == 0, "down");
  const int64_t experts = 16 * down.size(0) / hidden;
  fits(experts > 0 && gate_up.dim == 3 && gate_up.size(0) % (2 * experts) == 0, "gate_up");
  const int64_t inner = 16 * gate_up.size(0) / (2 * experts);
  fits(inner % group_size == 0, "down");
  const auto check = [&](const TensorView& packed, const TensorView& scales,
                         const TensorView& zeros, int64_t columns, const char* name) {
    const int64_t tiles = ceil_div(columns, 64), groups = ceil_div(tiles * 64, group_size);
    const auto of_groups = [&](const TensorView& of) {
      return of.dim == 3 && of.size(0) == packed.size(0) && of.size(1) == groups &&
             of.size(2) == 16;
    };
    fits(packed.size(1) == tiles && packed.size(2) == 512 && aligned(packed.data) &&
             of_groups(scales) && (!zeros || (of_groups(zeros) && !mxfp4)),
         name);
  };
  check(gate_up, gate_up_scales, gate_up_zeros, hidden, "gate_up");
  check(down, down_scales, down_zeros, inner, "down");
  fits(gate_up_scales.dtype == down_scales.dtype && !gate_up_zeros == !down_zeros, "down_scales");
  fits(!gate_up_bias || gate_up_bias.numel == experts * 2 * inner, "gate_up_bias");
  fits(!down_bias || down_bias.numel == experts * hidden, "down_bias");
  FLEXOPS_CHECK(activation > kFewNone && activation <= kFewClamped, host.op,
                ": activation must be from 1 to 4, got ", activation);
  if (slots == 0) return;
  void* const between = host.workspace<uint16_t>(slots * inner);
  host.check(few_experts_int4_cuda({x,
                                    choices,
                                    weights,
                                    {gate_up, gate_up_scales, gate_up_zeros},
                                    {down, down_scales, down_zeros},
                                    gate_up_bias,
                                    down_bias,
                                    out,
                                    between,
                                    experts,
                                    inner,
                                    group_size,
                                    mxfp4,
                                    interleaved,
                                    activation,
                                    static_cast<float>(alpha),
                                    static_cast<float>(limit)},
                                   host.stream()));
}

inline void mxfp4_unpack_host(Host& host, const TensorView& packed, const TensorView& scales,
                              int64_t n, int64_t k, Dtype, const TensorView& out) {
  const int64_t tiles = ceil_div(n, 16), tiles_k = ceil_div(k, 64);
  const auto fits = [&](const TensorView& of, int64_t b, int64_t c) {
    return of.dim == 3 && of.size(0) == tiles && of.size(1) == b && of.size(2) == c;
  };
  FLEXOPS_CHECK(fits(packed, tiles_k, 512) && aligned(packed.data), host.op,
                ": packed must have shape [", tiles, ", ", tiles_k, ", 512], got ",
                shape_text(packed));
  FLEXOPS_CHECK(fits(scales, 2 * tiles_k, 16), host.op, ": scales must have shape [", tiles, ", ",
                2 * tiles_k, ", 16], got ", shape_text(scales));
  FLEXOPS_CHECK(k % 32 == 0, host.op, ": k must be a multiple of 32, got ", k);
  if (out.numel)
    host.check(mxfp4_unpack_cuda({packed, scales, out, element_type(scales)}, host.stream()));
}

}  // namespace flexops
