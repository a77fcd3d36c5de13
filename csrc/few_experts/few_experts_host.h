// flexops::few_experts: from its arguments to the launcher's.
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

}  // namespace flexops
