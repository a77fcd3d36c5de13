// Decay and rate of a step, from what a recurrence is given.
#pragma once

#include "common/elements.cuh"
#include "state_scan/state_scan_kinds.h"

namespace flexops::state_scan {

inline constexpr float kNormEpsilon = 1e-6f;

FLEXOPS_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

FLEXOPS_DEVICE float read_gate(const ScanGate& gate, i64 batch, i64 step, i64 head) {
  return load_any(gate.data,
                  batch * gate.strides.batch + step * gate.strides.step + head * gate.strides.head,
                  gate.type);
}

struct Gate {
  float logarithm, rate;  // logarithm: of the decay
};

FLEXOPS_DEVICE Gate gate_of(const StateScan& s, i64 batch, i64 step, i64 head) {
  const float rate = read_gate(s.rate, batch, step, head);
  if (s.gates == kGatesGiven) return {read_gate(s.decay, batch, step, head), rate};
  const float a = read_gate(s.a, 0, 0, head),
              bias = s.bias.data ? read_gate(s.bias, 0, 0, head) : 0.0f;
  if (s.gates == kGatesSoftplus) {
    const float length = softplus(rate + bias), kept = length < s.low    ? s.low
                                                       : length > s.high ? s.high
                                                                         : length;
    return {a * kept, kept};
  }
  const float decay = softplus(read_gate(s.decay, batch, step, head) + bias);
  return {-expf(a) * decay, s.high / (1.0f + expf(-rate))};
}

}  // namespace flexops::state_scan
