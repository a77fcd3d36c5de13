// Recurrences whose state is a matrix, on the CPU: compiled once per ISA level (common/cpu.h). What
// they compute: flexops/ops/state_scan.py.

#include "state_scan/state_scan.h"

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

static float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

static float read_gate(const ScanGate& gate, int64_t batch, int64_t step, int64_t head) {
  const int64_t at =
      batch * gate.strides.batch + step * gate.strides.step + head * gate.strides.head;
  if (gate.type == ElementType::f32) return load_element<ElementType::f32>(gate.data, at);
  if (gate.type == ElementType::f16) return load_element<ElementType::f16>(gate.data, at);
  return load_element<ElementType::bf16>(gate.data, at);
}

struct ScanGates {
  float decay, rate;
};

static ScanGates read_gates(const StateScan& s, int64_t batch, int64_t step, int64_t head) {
  const float rate = read_gate(s.rate, batch, step, head);
  if (s.gates == kGatesGiven) return {__builtin_expf(read_gate(s.decay, batch, step, head)), rate};
  const float a = read_gate(s.a, 0, 0, head),
              bias = s.bias.data ? read_gate(s.bias, 0, 0, head) : 0.0f;
  if (s.gates == kGatesSoftplus) {
    const float length = softplus(rate + bias), kept = length < s.low    ? s.low
                                                       : length > s.high ? s.high
                                                                         : length;
    return {__builtin_expf(a * kept), kept};
  }
  const float decay = softplus(read_gate(s.decay, batch, step, head) + bias);
  return {__builtin_expf(-__builtin_expf(a) * decay), s.high / (1.0f + __builtin_expf(-rate))};
}

/// The factor of a row of q or k.
static float factor_of(const float* row, int64_t count, bool normalize) {
  if (!normalize) return 1.0f;
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += row[i] * row[i];
  return 1.0f / __builtin_sqrtf(sum + 1e-6f);
}

/// Some columns of one state, a step after another. Lanes behind `columns` stay 0.
static void scan_columns(const StateScan& s, int64_t batch, int64_t head, int64_t first,
                         int64_t columns) {
  alignas(64) float kept[kMostStateRows * kScanColumns], buffer_q[kMostStateRows],
      buffer_k[kMostStateRows];
  const int64_t shared = head / (s.heads / s.groups);
  float* const state =
      s.state + batch * s.state_batch + head * s.state_head + first * s.state_column;
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t c = 0; c < kScanColumns; ++c)
      kept[row * kScanColumns + c] =
          c < columns ? state[row * s.state_row + c * s.state_column] : 0.0f;
  }
  const float skip = s.skip.data ? read_gate(s.skip, 0, 0, head) : 0.0f;
  alignas(64) float values[kScanColumns] = {}, results[kScanColumns], buffer[kScanColumns];
  constexpr int kRegisters = kScanColumns / kLanes;
  for (int64_t step = 0; step < s.length; ++step) {
    const auto [decay, rate] = read_gates(s, batch, step, head);
    const float* const q =
        widen(s.q, batch * s.of_q.batch + step * s.of_q.step + shared * s.of_q.head, s.rows, s.type,
              buffer_q);
    const float* const k =
        widen(s.k, batch * s.of_k.batch + step * s.of_k.step + shared * s.of_k.head, s.rows, s.type,
              buffer_k);
    const float* const v =
        widen(s.v, batch * s.of_v.batch + step * s.of_v.step + head * s.of_v.head + first, columns,
              s.type, buffer);
    memcpy(values, v, static_cast<size_t>(columns) * sizeof(float));
    const float of_q = factor_of(q, s.rows, s.normalize) * s.scale,
                of_k = factor_of(k, s.rows, s.normalize);
    Floats change[kRegisters];
    for (int i = 0; i < kRegisters; ++i) change[i] = load_floats(values + i * kLanes);
    if (s.delta) {
      Floats along[kRegisters] = {};
      for (int64_t row = 0; row < s.rows; ++row) {
        for (int i = 0; i < kRegisters; ++i)
          along[i] += k[row] * load_floats(kept + row * kScanColumns + i * kLanes);
      }
      for (int i = 0; i < kRegisters; ++i) change[i] -= decay * of_k * along[i];
    }
    Floats sums[kRegisters] = {};
    for (int i = 0; i < kRegisters; ++i) change[i] *= rate * of_k;
    for (int64_t row = 0; row < s.rows; ++row) {
      for (int i = 0; i < kRegisters; ++i) {
        float* const at = kept + row * kScanColumns + i * kLanes;
        const Floats now = decay * load_floats(at) + k[row] * change[i];
        store_floats(at, now);
        sums[i] += q[row] * now;
      }
    }
    for (int i = 0; i < kRegisters; ++i)
      store_floats(results + i * kLanes, of_q * sums[i] + skip * load_floats(values + i * kLanes));
    const int64_t to = ((batch * s.length + step) * s.heads + head) * s.columns + first;
    narrow(results, s.out, to, columns, s.type);
  }
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t c = 0; c < columns; ++c)
      state[row * s.state_row + c * s.state_column] = kept[row * kScanColumns + c];
  }
}

void state_scan_cpu(const StateScan& s, int64_t begin, int64_t end) {
  const int64_t blocks = ceil_div(s.columns, kScanColumns);
  for (int64_t part = begin; part < end; ++part) {
    const int64_t state = part / blocks, first = part % blocks * kScanColumns;
    scan_columns(s, state / s.heads, state % s.heads, first,
                 least(s.columns - first, kScanColumns));
  }
}

}  // namespace flexops::FLEXOPS_ISA
