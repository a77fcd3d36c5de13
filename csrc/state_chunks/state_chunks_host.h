// flexops::state_chunks_ and what has a gradient: from their arguments to the launchers'.
#pragma once

#include "state_chunks/state_chunks.h"
#include "state_scan/state_scan_arguments.h"

namespace flexops {

/// Of the work of chunks, in bytes, unless one chunk of all states needs more; and of what
/// gradients keep, unless one sequence needs more.
constexpr int64_t kMostChunkWork = int64_t{128} << 20, kMostGradientWork = int64_t{1} << 30;

inline void check_chunks(const Host& host, const StateScan& scan) {
  const int most = scan.delta ? kMostDeltaRows : kMostChunkRows;
  FLEXOPS_CHECK(scan.rows <= most && scan.rows % kStateVector == 0, host.op,
                ": k must have at most ", most, " columns, and a multiple of ", kStateVector,
                ", got ", scan.rows);
  FLEXOPS_CHECK(scan.columns % kStateVector == 0, host.op, ": v must have a multiple of ",
                kStateVector, " columns, got ", scan.columns);
}

inline void run_chunks(Host& host, const StateScan& scan, const float* initial) {
  const int64_t chunks = ceil_div(scan.length, kChunkSteps), states = scan.batch * scan.heads,
                fitting = kMostChunkWork / (states * kChunkBytes),
                together = least(chunks, fitting < 1 ? 1 : fitting);
  void* const work = host.workspace<uint8_t>(states * together * kChunkBytes);
  host.check(state_chunks_cuda(scan, initial, work, together, host.stream()));
}

inline void state_chunks__host(Host& host, const TensorView& state, const TensorView& q,
                               const TensorView& k, const TensorView& v, const TensorView& decay,
                               const TensorView& rate, const TensorView& a, const TensorView& bias,
                               const TensorView& skip, int64_t gates, bool delta, bool normalize,
                               double scale, double low, double high, const TensorView& out) {
  const StateScan scan = scan_of(host, state, q, k, v, decay, rate, a, bias, skip, gates, delta,
                                 normalize, scale, low, high, out);
  check_chunks(host, scan);
  if (out.numel != 0) run_chunks(host, scan, scan.state);
}

inline void state_chunks_host(Host& host, const TensorView& q, const TensorView& k,
                              const TensorView& v, const TensorView& decay, const TensorView& rate,
                              const TensorView& skip, const TensorView& state, bool delta,
                              bool normalize, double scale, const TensorView& out,
                              const TensorView& last) {
  const StateScan scan = scan_of(host, last, q, k, v, decay, rate, {}, {}, skip, kGatesGiven, delta,
                                 normalize, scale, 0.0, 1.0, out);
  check_chunks(host, scan);
  if (out.numel != 0) run_chunks(host, scan, state.as<float>());
}

inline void state_chunks_backward_host(Host& host, const TensorView& grad, const TensorView& last,
                                       const TensorView& q, const TensorView& k,
                                       const TensorView& v, const TensorView& decay,
                                       const TensorView& rate, const TensorView& skip,
                                       const TensorView& state, bool delta, bool normalize,
                                       double scale, const TensorView& q_grad,
                                       const TensorView& k_grad, const TensorView& v_grad,
                                       const TensorView& decay_grad, const TensorView& rate_grad,
                                       const TensorView& skip_grad, const TensorView& state_grad) {
  StateScan scan = scan_of(host, last, q, k, v, decay, rate, {}, {}, skip, kGatesGiven, delta,
                           normalize, scale, 0.0, 1.0, v_grad);
  check_chunks(host, scan);
  FLEXOPS_CHECK(!delta || !skip, host.op, ": skip has a gradient without the delta rule only");
  if (v_grad.numel == 0) return;
  // Some sequences at once.
  const int64_t chunks = ceil_div(scan.length, kChunkSteps), heads = scan.heads,
                steps = scan.length * heads, kept = 2 * int64_t{scan.rows} * scan.columns,
                work = heads * chunks * kChunkBytes, states = heads * chunks * kept,
                values = delta ? 2 * steps * scan.columns : 0, all = scan.batch,
                fitting = kMostGradientWork / (work + 2 * states + values),
                together = least(all, fitting < 1 ? 1 : fitting);
  uint8_t* const memory = host.workspace<uint8_t>(together * (work + 2 * states + values));
  const auto from = [](const TensorView& of, int64_t sequence, int64_t stride, int64_t bytes) {
    return of ? static_cast<uint8_t*>(of.data) + sequence * stride * bytes : nullptr;
  };
  for (int64_t at = 0; at < all; at += together) {
    StateScan part = scan;
    part.batch = least(together, all - at);
    const auto moved = [&](const void* of, const ScanStrides& strides, int64_t bytes) {
      return static_cast<const uint8_t*>(of) + at * strides.batch * bytes;
    };
    part.q = moved(scan.q, scan.of_q, 2), part.k = moved(scan.k, scan.of_k, 2);
    part.v = moved(scan.v, scan.of_v, 2);
    for (ScanGate* gate : {&part.decay, &part.rate})
      gate->data = moved(gate->data, gate->strides, gate->type == ElementType::f32 ? 4 : 2);
    const int64_t of_state = heads * scan.rows * scan.columns;
    const auto of_states = [&](const TensorView& of) {
      return reinterpret_cast<float*>(from(of, at, of_state, 4));
    };
    const auto of_steps = [&](const TensorView& of) {
      return reinterpret_cast<float*>(from(of, at, steps, 4));
    };
    part.state = of_states(state_grad);
    uint8_t* const kept_states = memory + together * work;
    const ChunkGradients gradients = {of_states(state),
                                      of_states(last),
                                      from(grad, at, steps * scan.columns, 2),
                                      from(q_grad, at, steps * scan.rows, 2),
                                      from(k_grad, at, steps * scan.rows, 2),
                                      from(v_grad, at, steps * scan.columns, 2),
                                      of_steps(decay_grad),
                                      of_steps(rate_grad),
                                      of_steps(skip_grad),
                                      memory,
                                      kept_states,
                                      kept_states + together * states,
                                      kept_states + 2 * together * states};
    host.check(state_chunks_backward_cuda(part, gradients, host.stream()));
  }
}

}  // namespace flexops
