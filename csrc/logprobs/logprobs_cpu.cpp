// Log-probabilities on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/logprobs.py.

#include "logprobs/logprobs.h"

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

static const float kInfinity = __builtin_inff(), kNan = __builtin_nanf("");
constexpr float kLeast = -200.0f;  // a power of 0 times an exponent limited to this is 0, not NaN

/// tanh(x), and its derivative.
static Floats tanh_of(Floats x, Floats& slope) {
  const Floats e = power(-2.0f * absolute(x)), inverse = 1.0f / (1.0f + e), square = x * x;
  slope = 4.0f * e * inverse * inverse;
  const Floats far = (1.0f - e) * inverse;
  // The series, where 1 - e cancels.
  const Floats near =
      x + x * square *
              (square * (square * (square * (62.0f / 2835.0f) - 17.0f / 315.0f) + 2.0f / 15.0f) -
               1.0f / 3.0f);
  return absolute(x) < 0.25f ? near : x < 0.0f ? -far : far;
}

/// Logits to scaled logits, and the derivatives of these unless `slopes` is null. `out` may be `x`.
static void scale_block(const float* x, float* out, float* slopes, int64_t count,
                        const LogprobRows& shape) {
  const float inverse = 1.0f / shape.temperature;
  const float inverse_cap = shape.softcap > 0.0f ? 1.0f / shape.softcap : 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    Floats value = load_up_to(x + i, some);
    Floats slope = floats_of(inverse);
    if (shape.softcap > 0.0f) {
      Floats bend;
      const Floats capped = tanh_of(value * inverse_cap, bend) * shape.softcap;
      slope = value == -kInfinity ? floats_of(0.0f) : slope * bend;
      value = value == -kInfinity ? value : capped;
    }
    value *= inverse;
    store_up_to(out + i, value, some);
    if (slopes) store_up_to(slopes + i, slope, some);
  }
}

static float scaled(const void* logits, int64_t at, const LogprobRows& shape) {
  float value = load(logits, at, shape.type);
  scale_block(&value, &value, nullptr, 1, shape);
  return value;
}

/// Sum of powers[i] * (values[i] - base).
static float sum_weighted(const float* values, const float* powers, int64_t count, float base) {
  Floats sum = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    sum += load_up_to(powers + i, some) *
           greater(load_up_to(values + i, some) - base, floats_of(kLeast));
  }
  return sum_of_lanes(sum);
}

void logprobs_cpu(const void* logits, const int64_t* target, const LogprobRows& shape,
                  const LogprobResults& results, int64_t begin, int64_t end) {
  alignas(64) float buffer[kRowBlock], z[kRowBlock], powers[kRowBlock];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * shape.stride, wanted = target[row];
    float *const maximum = results.stats + row, *const total = maximum + shape.rows;
    if (wanted == shape.ignore_index) {
      results.logprobs[row] = results.entropy[row] = *maximum = *total = 0.0f;
      continue;
    }
    float highest = -kInfinity, base = 0.0f;
    double sum = 0.0, weighted = 0.0;
    for (int64_t at = 0; at < shape.length; at += kRowBlock) {
      const int64_t count = least(shape.length - at, kRowBlock);
      scale_block(widen(logits, offset + at, count, shape.type, buffer), z, nullptr, count, shape);
      const float now = greatest(z, count, highest);
      if (now > highest) {
        const double shift = static_cast<double>(highest > -kInfinity ? base - now : kLeast);
        const double factor = static_cast<double>(__builtin_expf(highest - now));
        weighted = (weighted + sum * shift) * factor, sum *= factor;
        highest = base = now;
      }
      sum += static_cast<double>(sum_powers<true>(z, powers, count, base));
      weighted += static_cast<double>(sum_weighted(z, powers, count, base));
    }
    const bool valid = wanted >= 0 && wanted < shape.length;
    *maximum = base, *total = static_cast<float>(sum);
    const float log = __builtin_logf(*total);
    results.logprobs[row] = (valid ? scaled(logits, offset + wanted, shape) - base : kNan) - log;
    results.entropy[row] = valid ? log - static_cast<float>(weighted / sum) : kNan;
  }
}

void logprobs_backward_cpu(const void* logits, const int64_t* target, const LogprobRows& shape,
                           const LogprobResults& results, const LogprobGradients& gradients,
                           void* out, int64_t out_stride, int64_t begin, int64_t end) {
  alignas(64) float buffer[kRowBlock], z[kRowBlock], slopes[kRowBlock], made[kRowBlock];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * shape.stride, to = row * out_stride, wanted = target[row];
    if (wanted == shape.ignore_index) {
      clear_row(out, to, shape.length, shape.type);
      continue;
    }
    const bool valid = wanted >= 0 && wanted < shape.length;
    const float base = results.stats[row], sum = results.stats[shape.rows + row];
    const float rise = gradients.of_logprobs[row], of_entropy = gradients.of_entropy[row];
    const float bend = of_entropy / sum;
    const float level =
        valid ? (rise + of_entropy * (results.entropy[row] - __builtin_logf(sum))) / sum : kNan;
    for (int64_t at = 0; at < shape.length; at += kRowBlock) {
      const int64_t count = least(shape.length - at, kRowBlock);
      scale_block(widen(logits, offset + at, count, shape.type, buffer), z, slopes, count, shape);
      float* const place = place_in_row(out, to + at, shape.type, made);
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t some = least(count - i, kLanes);
        const Floats exponent = load_up_to(z + i, some) - base;
        const Floats gradient =
            -power(exponent) * (greater(exponent, floats_of(kLeast)) * bend + level);
        store_up_to(z + i, gradient, some);
      }
      if (wanted >= at && wanted < at + count) z[wanted - at] += rise;
      for (int64_t i = 0; i < count; ++i) place[i] = z[i] * slopes[i];
      narrow(place, out, to + at, count, shape.type);
    }
  }
}

}  // namespace flexops::FLEXOPS_ISA
