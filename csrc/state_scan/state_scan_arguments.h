// What is common to operators of recurrences whose state is a matrix: from their arguments to a
// StateScan.
#pragma once

#include "common/host.h"

#include "state_scan/state_scan_kinds.h"

namespace flexops {

inline StateScan scan_of(Host& host, const TensorView& state, const TensorView& q,
                         const TensorView& k, const TensorView& v, const TensorView& decay,
                         const TensorView& rate, const TensorView& a, const TensorView& bias,
                         const TensorView& skip, int64_t gates, bool delta, bool normalize,
                         double scale, double low, double high, const TensorView& out) {
  const auto fits = [&](bool right, const char* name) {
    FLEXOPS_CHECK(right, host.op, ": ", name, " does not fit the others");
  };
  fits(v.dim == 4, "v");
  const int64_t batch = v.size(0), length = v.size(1), heads = v.size(2), columns = v.size(3);
  fits(q.dim == 4 && q.size(0) == batch && q.size(1) == length && q.size(2) > 0 &&
           heads % q.size(2) == 0,
       "q");
  const int64_t rows = q.size(3);
  for (int d = 0; d < 4; ++d) fits(k.dim == 4 && k.size(d) == q.size(d), "k");
  fits(state.dim == 4 && state.size(0) == batch && state.size(1) == heads &&
           state.size(2) == rows && state.size(3) == columns,
       "state");
  const auto of_steps = [&](const TensorView& gate) {
    return gate.dim == 3 && gate.size(0) == batch && gate.size(1) == length &&
           gate.size(2) == heads;
  };
  fits(of_steps(rate), "rate");
  fits(gates == kGatesSoftplus ? !decay : decay && of_steps(decay), "decay");
  FLEXOPS_CHECK(gates >= kGatesGiven && gates <= kGatesDelta, host.op,
                ": gates must be from 0 to 2, got ", gates);
  fits(gates == kGatesGiven ? !a && !bias : a && a.dim == 1 && a.size(0) == heads, "a");
  const auto strides = [](const TensorView& of) {
    return ScanStrides{of.stride(0), of.stride(1), of.stride(2)};
  };
  const auto gate = [&](const TensorView& of) {
    return of ? ScanGate{of.data, element_type(of), strides(of)}
              : ScanGate{nullptr, ElementType::f32, {}};
  };
  const auto of_head = [&](const TensorView& of, const char* name) {
    if (!of) return ScanGate{nullptr, ElementType::f32, {}};
    fits(of.dim == 1 && of.size(0) == heads, name);
    return ScanGate{of.data, element_type(of), {0, 0, of.stride(0)}};
  };
  FLEXOPS_CHECK(rows <= kMostStateRows, host.op, ": k must have at most ", kMostStateRows,
                " columns, got ", rows);
  return {state.as<float>(),
          q.data,
          k.data,
          v.data,
          out.data,
          element_type(v),
          strides(q),
          strides(k),
          strides(v),
          state.stride(0),
          state.stride(1),
          state.stride(2),
          state.stride(3),
          gate(decay),
          gate(rate),
          of_head(a, "a"),
          of_head(bias, "bias"),
          of_head(skip, "skip"),
          batch,
          length,
          static_cast<int>(heads),
          static_cast<int>(q.size(2)),
          static_cast<int>(rows),
          static_cast<int>(columns),
          static_cast<int>(gates),
          delta,
          normalize,
          static_cast<float>(scale),
          static_cast<float>(low),
          static_cast<float>(high)};
}

}  // namespace flexops
