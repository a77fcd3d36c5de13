// Adam on the CPU: compiled once per ISA level (common/cpu.h).

#include "adam/adam.h"
#include "common/multi_tensor_cpu.h"

namespace flexops::FLEXOPS_ISA {

// 16-bit data goes through float buffers of this many elements, and the copy through one. Measured
// with the copy: at 1024 elements a step takes 15 to 20 % longer, because by the time that the copy
// is made a block has half left the first-level cache.
constexpr int64_t kBlock = 256;

/// One register (Floats) or one element (float): the formula, as in torch's fused Adam.
template <bool kAmsgrad, typename V>
static inline void update(float* param, const float* grad, float* exp_avg, float* exp_avg_sq,
                          float* max_exp_avg_sq, const AdamStep& s) {
  V p, g, m, v;
  memcpy(&p, param, sizeof p);
  memcpy(&g, grad, sizeof g);
  memcpy(&m, exp_avg, sizeof m);
  memcpy(&v, exp_avg_sq, sizeof v);
  g = g * s.sign;
  if (s.l2 != 0.0f) g = g + p * s.l2;
  if (s.decay != 0.0f) p = p - p * s.decay;
  m = m * s.beta1 + g * s.one_minus_beta1;
  v = v * s.beta2 + (g * g) * s.one_minus_beta2;
  V largest = v;
  if constexpr (kAmsgrad) {
    V before;
    memcpy(&before, max_exp_avg_sq, sizeof before);
    largest = v <= before ? before : v;  // NaN in v wins, as with torch.maximum
    memcpy(max_exp_avg_sq, &largest, sizeof largest);
  }
  p = p - (m * s.step_size) / (square_root(largest) * s.inverse_bias2 + s.eps);
  memcpy(exp_avg, &m, sizeof m);
  memcpy(exp_avg_sq, &v, sizeof v);
  memcpy(param, &p, sizeof p);
}

template <bool kAmsgrad>
static void update_block(float* param, const float* grad, float* exp_avg, float* exp_avg_sq,
                         float* max_exp_avg_sq, int64_t count, const AdamStep& step) {
  const AdamStep s = step;  // a copy that the stores below cannot alias
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    update<kAmsgrad, Floats>(param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                             kAmsgrad ? max_exp_avg_sq + i : nullptr, s);
  }
  for (; i < count; ++i) {
    few(i);
    update<kAmsgrad, float>(param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                            kAmsgrad ? max_exp_avg_sq + i : nullptr, s);
  }
}

static void unscale(float* grad, float scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i) grad[i] /= scale;
}

/// The block's gradients as floats: in place, or in `buffer`. A grad_scale is taken out of the
/// tensor, too.
static const float* fetch_grads(const TensorRow& t, const AdamStep& s, int64_t begin, int64_t count,
                                float* buffer) {
  const bool is_float = t.type[kAdamGrad] == ElementType::f32;
  float* grad = is_float ? static_cast<float*>(t.array[kAdamGrad]) + begin : buffer;
  if (!is_float) widen(t.array[kAdamGrad], begin, count, t.type[kAdamGrad], grad);
  if (s.grad_scale != 0.0f) {
    unscale(grad, s.grad_scale, count);
    if (!is_float) narrow(grad, t.array[kAdamGrad], begin, count, t.type[kAdamGrad]);
  }
  return grad;
}

/// The new parameters in their second dtype, past the caches: this CPU does not read them soon,
/// and the bytes decide.
static void write_copy(const TensorRow& t, const float* param, int64_t begin, int64_t count) {
  if (t.type[kAdamCopy] == ElementType::f32) {
    streaming_copy(static_cast<float*>(t.array[kAdamCopy]) + begin, param, count * 4);
    return;
  }
  uint16_t bits[kBlock];
  narrow(param, bits, 0, count, t.type[kAdamCopy]);
  streaming_copy(static_cast<uint16_t*>(t.array[kAdamCopy]) + begin, bits, count * 2);
}

/// A state's block as floats: in place, or in `buffer`.
static float* fetch_state(const TensorRow& t, AdamArray k, int64_t begin, int64_t count,
                          float* buffer) {
  if (t.is_f32(k)) return t.array[k] ? static_cast<float*>(t.array[k]) + begin : nullptr;
  widen(t.array[k], begin, count, t.type[k], buffer);
  return buffer;
}

/// Back from its buffer to where it came from. `shift`: which half of the random numbers rounds it,
/// if they do.
static void put_state(const TensorRow& t, const AdamStep& s, AdamArray k, float* values,
                      int64_t begin, int64_t count, int shift) {
  if (t.is_f32(k)) return;
  if (s.stochastic && shift >= 0 && t.type[k] == ElementType::bf16)
    round_block(values, begin, count, s.key, shift);
  narrow(values, t.array[k], begin, count, t.type[k]);
}

static void step_block(const TensorRow& t, const AdamStep& s, int64_t begin, int64_t count) {
  alignas(64) float grads[kBlock], params[kBlock], averages[kBlock], squares[kBlock],
      largest[kBlock];
  const bool is_float = t.type[kAdamParam] == ElementType::f32;
  const float* grad = fetch_grads(t, s, begin, count, grads);
  float* param = is_float ? static_cast<float*>(t.array[kAdamParam]) + begin : params;
  if (!is_float) widen(t.array[kAdamParam], begin, count, t.type[kAdamParam], param);
  float *exp_avg = fetch_state(t, kAdamExpAvg, begin, count, averages),
        *exp_avg_sq = fetch_state(t, kAdamExpAvgSq, begin, count, squares),
        *max_exp_avg_sq = fetch_state(t, kAdamMaxExpAvgSq, begin, count, largest);
  if (max_exp_avg_sq) {
    update_block<true>(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, count, s);
  } else {
    update_block<false>(param, grad, exp_avg, exp_avg_sq, nullptr, count, s);
  }
  put_state(t, s, kAdamExpAvg, exp_avg, begin, count, 0);
  put_state(t, s, kAdamExpAvgSq, exp_avg_sq, begin, count, 16);
  put_state(t, s, kAdamMaxExpAvgSq, max_exp_avg_sq, begin, count, -1);
  if (t.array[kAdamCopy]) write_copy(t, param, begin, count);
  if (!is_float) narrow(param, t.array[kAdamParam], begin, count, t.type[kAdamParam]);
}

void adam_cpu(const TensorRow& row, const AdamStep& step, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += kBlock)
    step_block(row, step, at, end - at < kBlock ? end - at : kBlock);
  if (row.array[kAdamCopy]) streaming_fence();
}

}  // namespace flexops::FLEXOPS_ISA
