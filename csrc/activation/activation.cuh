// The activations' kernels. Formulas: flexops/ops/activation.py.
//
// Memory decides, so arithmetic has to stay below it: a bfloat16 gelu has some 28 instructions an
// element, three of them of the slow kind (exponential, reciprocal), before it is in the way. The
// three activations are two shapes of that:
//   silu, gelu(tanh)   x * sigmoid(t), t = x (a + b x^2), because (1 + tanh(u)) / 2 = sigmoid(2 u)
//   gelu(quick)        the same with t = 1.702 x
//   gelu(erf)          x * Phi(x) with Phi(-|x|) = exp(p(|x|)), p a polynomial fitted for the least
//   error of the result
// fp32 results take the accurate exponential and division and a longer polynomial; 16-bit ones are
// rounded so much that the approximate instructions, exact to about 2^-22, change nothing. Relative
// to the result, both keep digits for negative x that 1 + tanh(u) and 1 + erf(x) cancel away.
//
// A thread works on 16 bytes of several rows, in the same columns: a bias is read once, and sums
// over columns stay in registers.
#pragma once

#include "common/device.cuh"
#include "common/divisor.cuh"
#include "common/elements.cuh"
#include "common/vec.cuh"

namespace flexops::activation {

// Tuned on one H200.
//
// Not Cache::streaming, though each byte is touched once: where the second-level cache is full of
// what other kernels left there, lines that are to be evicted first have little room in it, and
// that costs 5 %.
inline constexpr Cache kLoad = Cache::normal, kStore = Cache::normal;
inline constexpr int kThreads = 64;
inline constexpr int kRows = 2, kBackwardRows = 1;  // of a thread: loads in flight
inline constexpr int kGatedRows = 1, kGatedBackwardRows = 1;
inline constexpr int kSumThreads = 128;  // with a bias's gradient: at most
inline constexpr int kSumRows = 4;       // of a thread, at once
inline constexpr int kSumBlocks = 4;     // a multiprocessor
inline constexpr int kTotalColumns = 32, kTotalThreads = 256;

// ---- arithmetic ----

/// Which activation; the coefficients of t are those of silu or gelu(tanh).
struct Function {
  float a, b;
  bool erf, relu2 = false;
};

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kFar =
    100.0f;  // x^2 from where on sigmoid(t) is 0 or 1; keeps b * x^2 finite

/// exp(x) if accurate; else 2^x, whose arguments the caller has scaled.
template <bool kAccurate>
FLEXOPS_DEVICE float power(float x) {
  return kAccurate ? expf(x) : quick_exp2(x);
}
template <bool kAccurate>
inline constexpr float kScale = kAccurate ? 1.0f : kLog2E;

template <bool kAccurate>
FLEXOPS_DEVICE float quotient(float x, float by) {
  if constexpr (kAccurate) return x / by;
#if FLEXOPS_HIP
  return x * __frcp_rn(by);
#else
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(by));
  return x * out;
#endif
}

/// Phi(-z), z >= 0: the normal distribution's tail. Relative error of the fit 2e-8 (accurate)
/// or 1.2e-5 for z <= 6, less where Phi(z) is what counts; further out, where it is below 1e-9, it
/// falls to 0 as it should, less exactly.
template <bool kAccurate>
FLEXOPS_DEVICE float tail(float z) {
  float p;
  if constexpr (kAccurate) {
    p = fmaf(z, -1.531102706e-10f, 6.960221438e-09f);
    p = fmaf(z, p, -1.427412781e-07f);
    p = fmaf(z, p, 1.741920406e-06f);
    p = fmaf(z, p, -1.395477726e-05f);
    p = fmaf(z, p, 7.481222887e-05f);
    p = fmaf(z, p, -2.405662755e-04f);
    p = fmaf(z, p, 6.093054189e-05f);
    p = fmaf(z, p, 4.769473433e-03f);
    p = fmaf(z, p, -3.633178705e-02f);
    p = fmaf(z, p, -3.183104439e-01f);
    p = fmaf(z, p, -7.978845336e-01f);
    p = fmaf(z, p, -6.931471806e-01f);
  } else {
    p = fmaf(z, -1.535996454e-06f, 5.554812508e-05f);
    p = fmaf(z, p, -8.829174893e-04f);
    p = fmaf(z, p, 8.325133469e-03f);
    p = fmaf(z, p, -5.360920176e-02f);
    p = fmaf(z, p, -4.587711596e-01f);
    p = fmaf(z, p, -1.151157741e+00f);
    p = fmaf(z, p, -1.0f);
  }
  return power<kAccurate>(p);
}

template <bool kErf, bool kAccurate>
FLEXOPS_DEVICE float activate(float x, const Function& f) {
  if constexpr (kErf) {
    const float q = tail<kAccurate>(fabsf(x));
    if constexpr (kAccurate)
      return x >= 0.0f ? fmaf(-fminf(x, 20.0f), q, x) : x * q;  // the minimum is for infinity
    return x * (x >= 0.0f ? 1.0f - q : q);
  } else {
    const float t = -kScale<kAccurate> * f.b;
    const float slope = fmaf(fminf(x * x, kFar), t, -kScale<kAccurate> * f.a);
    return quotient<kAccurate>(x, 1.0f + power<kAccurate>(x * slope));
  }
}

/// The activation and its derivative.
template <bool kErf, bool kAccurate>
FLEXOPS_DEVICE float differentiate(float x, const Function& f, float& value) {
  if constexpr (kErf) {
    const float q = tail<kAccurate>(fabsf(x)), phi = x >= 0.0f ? 1.0f - q : q;
    const float density = 0.3989422804f * power<kAccurate>(-0.5f * kScale<kAccurate> * x * x);
    value = x * phi;
    return fmaf(x, density, phi);
  } else {
    const float square = fminf(x * x, kFar);
    const float e =
        power<kAccurate>(-fabsf(x) * (kScale<kAccurate> * fmaf(f.b, square, f.a)));  // at most 1
    const float small = quotient<kAccurate>(e, 1.0f + e), large = 1.0f - small,
                sigmoid = x >= 0.0f ? large : small;
    value = x * sigmoid;
    return fmaf(x * (large * small), fmaf(3.0f * f.b, square, f.a), sigmoid);
  }
}

/// The same, or the square of the rectifier, which the functions above do not have: their other
/// callers would pay for the question.
template <bool kErf, bool kAccurate>
FLEXOPS_DEVICE float activate_any(float x, const Function& f) {
  if (!kErf && f.relu2) return x < 0.0f ? 0.0f : x * x;
  return activate<kErf, kAccurate>(x, f);
}
template <bool kErf, bool kAccurate>
FLEXOPS_DEVICE float differentiate_any(float x, const Function& f, float& value) {
  if (kErf || !f.relu2) return differentiate<kErf, kAccurate>(x, f, value);
  const float positive = x < 0.0f ? 0.0f : x;
  value = positive * positive;
  return 2.0f * positive;
}

/// The same for N numbers at once. Which activation it is, is known at run time: a branch for N of
/// them, and one kernel to compile, not two.
template <bool kAccurate, int N>
FLEXOPS_DEVICE void activate_all(float (&x)[N], const Function& f) {
  if (f.erf) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = activate<true, kAccurate>(x[i], f);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = activate<false, kAccurate>(x[i], f);
  }
}
/// `x` becomes the derivatives.
template <bool kAccurate, int N>
FLEXOPS_DEVICE void differentiate_all(float (&x)[N], const Function& f, float (&value)[N]) {
  if (f.erf) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = differentiate<true, kAccurate>(x[i], f, value[i]);
  } else if (f.relu2) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = differentiate_any<false, kAccurate>(x[i], f, value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = differentiate<false, kAccurate>(x[i], f, value[i]);
  }
}

template <typename T>
inline constexpr bool kIsAccurate = sizeof(T) != 2;

// ---- where a thread works ----

/// Where a thread works. By rows: in the same columns of `take` neighbouring rows. Flat: a tensor
/// without gaps is a matrix of one vector a row, and a thread's rows are a block's threads apart.
/// So that element `column` of row(u) is at row(u) * stride + column in both.
struct Walk {
  u32 first, step, column;

  FLEXOPS_DEVICE u32 row(int u) const { return first + u * step; }
};

template <int N, typename P>
FLEXOPS_DEVICE Walk walk_of(const P& p) {
  if (p.flat) return {blockIdx.x * (p.take * kThreads) + threadIdx.x, kThreads, 0};
  u32 vector;
  const u32 row = divide(blockIdx.x * kThreads + threadIdx.x, p.vectors, vector) * p.take;
  return {row, 1, vector * N};
}

FLEXOPS_DEVICE i64 place(u32 row, u32 stride, u32 column) {
  return static_cast<i64>(static_cast<u64>(row) * stride + column);
}

}  // namespace flexops::activation
