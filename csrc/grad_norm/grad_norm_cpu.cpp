// The gradients' norm and clipping on the CPU: compiled once per ISA level (common/cpu.h).

#include "common/multi_tensor_cpu.h"
#include "grad_norm/grad_norm.h"

namespace flexops::FLEXOPS_ISA {

namespace {

/// Calls body(values, count) on blocks of the row as floats.
template <typename F>
inline void for_each_block(const TensorRow& row, int64_t begin, int64_t end, const F& body) {
  alignas(64) float buffer[kRowBlock];
  for (int64_t from = begin; from < end; from += kRowBlock) {
    const int64_t count = end - from < kRowBlock ? end - from : kRowBlock;
    body(widen(row.array[0], from, count, row.type[0], buffer), count);
  }
}

inline double sum_squares(const TensorRow& row, int64_t begin, int64_t end) {
  constexpr int kChains = 4;  // additions that do not wait for each other
  double total = 0;
  for_each_block(row, begin, end, [&](const float* x, int64_t count) {
    Floats sums[kChains] = {};
    int64_t i = 0;
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
      for (int c = 0; c < kChains; ++c) {
        const Floats v = load_floats(x + i + c * kLanes);
        sums[c] = sums[c] + v * v;
      }
    }
    float rest = 0;
    for (; i < count; ++i) few(i), rest += x[i] * x[i];
    total += sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
  });
  return total;
}

inline double largest(const TensorRow& row, int64_t begin, int64_t end) {
  float most = 0;
  bool nan = false;
  for_each_block(row, begin, end, [&](const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float magnitude = __builtin_fabsf(x[i]);
      nan |= magnitude != magnitude;
      most = magnitude > most ? magnitude : most;
    }
  });
  return nan ? __builtin_nan("") : static_cast<double>(most);
}

inline double sum_powers(const TensorRow& row, double power, int64_t begin, int64_t end) {
  const float p = static_cast<float>(power);
  double total = 0;
  for_each_block(row, begin, end, [&](const float* x, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float magnitude = __builtin_fabsf(x[i]);
      sum += p == 1.0f ? magnitude : __builtin_powf(magnitude, p);
    }
    total += sum;
  });
  return total;
}

struct ClipRule {
  static constexpr int kArrays = 1, kUnscaled = -1;
  static constexpr unsigned kReads = 1, kWrites = 1, kTyped = 1;
};

}  // namespace

double grad_norm_cpu(const TensorRow& row, double norm_type, int64_t begin, int64_t end) {
  switch (norm_kind(norm_type)) {
    case NormKind::two:
      return sum_squares(row, begin, end);
    case NormKind::infinity:
      return largest(row, begin, end);
    default:
      return sum_powers(row, norm_type, begin, end);
  }
}

void clip_grads_cpu(const TensorRow& row, float factor, int64_t begin, int64_t end) {
  update_row<ClipRule>(row, false, begin, end, [factor](auto& x) { x[0] = x[0] * factor; });
}

}  // namespace flexops::FLEXOPS_ISA
