// Cross entropy on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/cross_entropy.py.

#include "cross_entropy/cross_entropy.h"

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

static const float kInfinity = __builtin_inff(), kNan = __builtin_nanf("");

/// What of a row its gradient needs: its greatest logit, and the sum of the powers of the distances
/// to it.
struct RowStats {
  float maximum, sum;

  float log_sum_exp() const { return maximum + __builtin_logf(sum); }
};

/// A row's gradient is slope * exp(logit - maximum) - shift, and less `drop` at the target.
struct Gradient {
  float maximum, slope, shift, drop;

  Gradient(const Logits& shape, const RowStats& row, float weight)
      : maximum(row.maximum),
        slope((shape.z_loss == 0.0f ? weight
                                    : weight * (1.0f + 2.0f * shape.z_loss * row.log_sum_exp())) /
              row.sum),
        shift(weight * shape.smoothing / static_cast<float>(shape.length)),
        drop(weight * (1.0f - shape.smoothing)) {}
};

static float sum_of(const float* values, int64_t count) {
  Floats sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load_floats(values + i);
  float rest = 0.0f;
  for (; i < count; ++i) few(i), rest += values[i];
  return sum_of_lanes(sum) + rest;
}

/// Of a row, and the sum of its logits if label smoothing asks for it: in one pass, block by block.
static RowStats find_stats(const void* logits, int64_t offset, const Logits& shape, double& total) {
  alignas(64) float buffer[kRowBlock];
  float maximum = -kInfinity, base = 0.0f;
  double sum = 0.0;
  for (int64_t at = 0; at < shape.length; at += kRowBlock) {
    const int64_t count = least(shape.length - at, kRowBlock);
    const float* x = widen(logits, offset + at, count, shape.type, buffer);
    const float highest = greatest(x, count, maximum);
    if (highest > maximum) {
      sum *= static_cast<double>(__builtin_expf(maximum - highest));
      maximum = base = highest;
    }
    sum += static_cast<double>(sum_powers<false>(x, nullptr, count, base));
    if (shape.smoothing != 0.0f) total += static_cast<double>(sum_of(x, count));
  }
  return {base, static_cast<float>(sum)};
}

static void gradient_block(const float* x, float* out, int64_t count, const Gradient& g) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Floats first = power(load_floats(x + i) - g.maximum) * g.slope - g.shift;
    const Floats second = power(load_floats(x + i + kLanes) - g.maximum) * g.slope - g.shift;
    store_floats(out + i, first), store_floats(out + i + kLanes, second);
  }
  for (; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    store_some(out + i, power(load_some(x + i, some, 0.0f) - g.maximum) * g.slope - g.shift, some);
  }
}

/// `out` may be the logits.
static void write_gradient(const void* logits, int64_t offset, void* out, int64_t out_offset,
                           const Logits& shape, const Gradient& g, int64_t target) {
  const ElementType type = shape.type;
  alignas(64) float buffer[kRowBlock], results[kRowBlock];
  for (int64_t at = 0; at < shape.length; at += kRowBlock) {
    const int64_t count = least(shape.length - at, kRowBlock);
    const float* x = widen(logits, offset + at, count, type, buffer);
    float* to = place_in_row(out, out_offset + at, type, results);
    gradient_block(x, to, count, g);
    if (target >= at && target < at + count) to[target - at] -= g.drop;
    narrow(to, out, out_offset + at, count, type);
  }
}

void cross_entropy_cpu(void* logits, const int64_t* target, const Logits& shape, float divisor,
                       bool write, const GradientFactors& factors, const LossStats& stats,
                       int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * shape.stride, wanted = target[row];
    if (wanted == shape.ignore_index) {
      stats.losses[row] = stats.maxima[row] = stats.sums[row] = 0.0f;
      if (write) clear_row(logits, offset, shape.length, shape.type);
      continue;
    }
    const bool valid = wanted >= 0 && wanted < shape.length;
    double total = 0.0;
    float chosen = kNan, buffer;
    if (valid) chosen = *widen(logits, offset + wanted, 1, shape.type, &buffer);
    const RowStats found = find_stats(logits, offset, shape, total);
    const float lse = found.log_sum_exp();
    float loss = __builtin_logf(found.sum) + (1.0f - shape.smoothing) * (found.maximum - chosen) +
                 shape.z_loss * lse * lse;
    if (shape.smoothing != 0.0f)
      loss += shape.smoothing *
              (found.maximum - static_cast<float>(total / static_cast<double>(shape.length)));
    stats.losses[row] = valid ? loss : kNan;
    stats.maxima[row] = found.maximum, stats.sums[row] = found.sum;
    if (!write) continue;
    const float factor = (factors.data ? factors.data[factors.each_row ? row : 0] : 1.0f) / divisor;
    write_gradient(logits, offset, logits, offset, shape,
                   Gradient(shape, found, valid ? factor : kNan), wanted);
  }
}

void cross_entropy_backward_cpu(const void* logits, const int64_t* target, const LossStats& stats,
                                const GradientFactors& factors, float divisor, void* out,
                                const Logits& shape, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t to = row * shape.length, wanted = target[row];
    if (wanted == shape.ignore_index) {
      clear_row(out, to, shape.length, shape.type);
      continue;
    }
    const bool valid = wanted >= 0 && wanted < shape.length;
    const float factor = factors.data[factors.each_row ? row : 0] / divisor;
    const Gradient g(shape, {stats.maxima[row], stats.sums[row]}, valid ? factor : kNan);
    write_gradient(logits, row * shape.stride, out, to, shape, g, wanted);
  }
}

void scale_rows_cpu(void* values, ElementType type, int64_t begin, int64_t end, float factor) {
  if (factor == 1.0f) return;
  alignas(64) float buffer[kRowBlock], results[kRowBlock];
  for (int64_t at = begin; at < end; at += kRowBlock) {
    const int64_t count = least(end - at, kRowBlock);
    const float* from = widen(values, at, count, type, buffer);
    float* to = place_in_row(values, at, type, results);
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
    narrow(to, values, at, count, type);
  }
}

}  // namespace flexops::FLEXOPS_ISA
