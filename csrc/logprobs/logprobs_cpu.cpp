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

/// Logits to scaled logits, and with a soft cap the derivatives of these unless `slopes` is null.
/// `out` may be `x`.
static void scale_block(const float* x, float* out, float* slopes, int64_t count,
                        const LogprobRows& shape) {
  const float inverse = 1.0f / shape.temperature;
  const float inverse_cap = shape.softcap > 0.0f ? 1.0f / shape.softcap : 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    Floats value = load_up_to(x + i, some);
    if (shape.softcap > 0.0f) {
      Floats bend;
      const Floats capped = tanh_of(value * inverse_cap, bend) * shape.softcap;
      const Floats slope = value == -kInfinity ? floats_of(0.0f) : bend * inverse;
      value = value == -kInfinity ? value : capped;
      if (slopes) store_up_to(slopes + i, slope, some);
    }
    store_up_to(out + i, value * inverse, some);
  }
}

/// A block of scaled logits: in place, if they are the logits.
struct ScaledBlock {
  alignas(64) float buffer[kRowBlock], z[kRowBlock], slopes[kRowBlock];

  const float* load(const void* logits, int64_t offset, int64_t count, const LogprobRows& shape,
                    bool with_slopes) {
    const float* const values = widen(logits, offset, count, shape.type, buffer);
    if (shape.temperature == 1.0f && !(shape.softcap > 0.0f)) return values;
    scale_block(values, z, with_slopes ? slopes : nullptr, count, shape);
    return z;
  }
};

static float scaled(const void* logits, int64_t at, const LogprobRows& shape) {
  float value = load(logits, at, shape.type);
  scale_block(&value, &value, nullptr, 1, shape);
  return value;
}

/// Add exp(z - base), and these times z - base.
static void add_powers(const float* z, int64_t count, float base, double& sum, double& weighted) {
  Floats sums[2] = {}, products[2] = {};
  const auto add = [&](int part, Floats value) {
    const Floats exponent = value - base, power_of = power(exponent);
    sums[part] += power_of, products[part] += power_of * greater(exponent, floats_of(kLeast));
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    add(0, load_floats(z + i)), add(1, load_floats(z + i + kLanes));
  for (; i + kLanes <= count; i += kLanes) add(0, load_floats(z + i));
  if (i < count) add(1, load_some(z + i, count - i, -kInfinity));
  sum += static_cast<double>(sum_of_lanes(sums[0] + sums[1]));
  weighted += static_cast<double>(sum_of_lanes(products[0] + products[1]));
}

void logprobs_cpu(const void* logits, const int64_t* target, const LogprobRows& shape,
                  const LogprobResults& results, int64_t begin, int64_t end) {
  ScaledBlock block;
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
      const float* const z = block.load(logits, offset + at, count, shape, false);
      const float now = greatest(z, count, highest);
      if (now > highest) {
        const float distance = base - now;
        const double shift = static_cast<double>(distance < kLeast ? kLeast : distance);
        const double factor = static_cast<double>(__builtin_expf(highest - now));
        weighted = (weighted + sum * shift) * factor, sum *= factor;
        highest = base = now;
      }
      add_powers(z, count, base, sum, weighted);
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
  ScaledBlock block;
  alignas(64) float made[kRowBlock];
  const float inverse = 1.0f / shape.temperature;
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
      const float* const z = block.load(logits, offset + at, count, shape, true);
      float* const place = place_in_row(out, to + at, shape.type, made);
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t some = least(count - i, kLanes);
        const Floats exponent = load_up_to(z + i, some) - base;
        Floats gradient = -power(exponent) * (greater(exponent, floats_of(kLeast)) * bend + level);
        if (wanted - at >= i && wanted - at < i + some) gradient[wanted - at - i] += rise;
        gradient *= shape.softcap > 0.0f ? load_up_to(block.slopes + i, some) : floats_of(inverse);
        store_up_to(place + i, gradient, some);
      }
      narrow(place, out, to + at, count, shape.type);
    }
  }
}

}  // namespace flexops::FLEXOPS_ISA
