// Adam with 8-bit states on the CPU: compiled once per ISA level (common/cpu.h). The same codes and
// random numbers as adam8bit.cuh.

#include "adam8bit/adam8bit.h"
#include "common/multi_tensor_cpu.h"

namespace flexops::FLEXOPS_ISA {

namespace {

constexpr int kBlock = static_cast<int>(kAdam8bitBlock);
static_assert(kBlock == kRowBlock && kBlock % kLanes == 0);
constexpr float kMost1 = 127.0f * 127.0f, kMost2 = 255.0f * 255.0f * 255.0f * 255.0f;

inline Floats absolute(Floats x) {
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7fffffff);
}
/// The lesser; `b` for a NaN.
inline Floats lesser(Floats a, float b) { return a < b ? a : Floats{} + b; }

inline uint32_t hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x21f0aaadu;
  x = (x ^ x >> 15) * 0x735a2d97u;
  return x ^ x >> 15;
}

inline Words random_word(Words x) {
  x *= 0x21f0aaadu;
  return (x ^ x >> 16) * 0x735a2d97u;
}

// Codes to floats and back. (The compiler's own conversion of vectors goes element by element.)
#if defined(__AVX512F__)
inline Floats load_codes(const int8_t* from) {
  return _mm512_maskz_cvtepi32_ps(
      0xffff,
      _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Floats load_codes(const uint8_t* from) {
  return _mm512_maskz_cvtepi32_ps(
      0xffff,
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
template <typename Code>
inline void store_codes(Code* to, Floats value) {
  const __m128i bytes =
      _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_maskz_cvttps_epi32(0xffff, value));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
#elif defined(__AVX2__)
inline Floats load_codes(const int8_t* from) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Floats load_codes(const uint8_t* from) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
template <typename Code>
inline void store_codes(Code* to, Floats value) {
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                       0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                       -1);  // each word's lowest byte, in both halves
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_cvttps_epi32(value), low);
  const __m128i packed =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), packed);
}
#else
template <typename Code>
inline Floats load_codes(const Code* from) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<float>(from[i]);
  return out;
}
template <typename Code>
inline void store_codes(Code* to, Floats value) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<Code>(static_cast<int>(value[i]));
}
#endif

/// floor(x) for x not negative, and less than 2^22.
inline Floats lower(Floats x) {
  const Floats near = x + 12582912.0f - 12582912.0f;  // rounded to nearest, by what the adder drops
  return near > x ? near - 1.0f : near;
}

inline Floats encode1(Floats exp_avg, float factor, Floats random) {
  const Floats power = lesser(absolute(exp_avg) * factor, kMost1), low = lower(square_root(power));
  const Floats code = power - low * low > random * (low * 2.0f + 1.0f) ? low + 1.0f : low;
  return exp_avg < 0.0f ? -code : code;
}
/// Of the root of exp_avg_sq, which is at hand, by the root of the factor.
inline Floats encode2(Floats root, float factor, Floats random) {
  const Floats scaled = lesser(root * factor, 255.0f * 255.0f),
               square = scaled > 1.0f ? scaled : Floats{} + 1.0f;
  const Floats low = lower(square_root(square)), low2 = low * low;
  const Floats gap = ((low * 4.0f + 6.0f) * low + 4.0f) * low + 1.0f;
  return square * square - low2 * low2 > random * gap ? low + 1.0f : low;
}

/// The largest of a block's numbers, none of which is negative; NaN if one is there.
inline float largest(const float* x) {
  Ints most = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    const Ints bits = reinterpret_cast<Ints>(
        absolute(load_floats(x + i)));  // in the order of the numbers, with NaN on top
    most = bits > most ? bits : most;
  }
  int32_t out = 0;
  for (int i = 0; i < kLanes; ++i) out = most[i] > out ? most[i] : out;
  return float_from_bits(static_cast<uint32_t>(out));
}

inline float scale_factor(float scale, float most) {
  const float factor = scale > 0.0f && scale < __builtin_inff() ? most / scale : 0.0f;
  return factor < 3e38f ? factor : 3e38f;
}

/// One block: where parameters, gradients and codes lie (in the tensors, or in a Buffer), and what
/// is computed from them.
struct Block {
  float *param, *grad;
  int8_t* codes1;
  uint8_t* codes2;
  float exp_avg[kBlock], exp_avg_sq[kBlock], root[kBlock];  // root: of exp_avg_sq
};

/// Room for a block that is not float32, or not whole: then padded with zeros.
struct Buffer {
  float param[kBlock], grad[kBlock];
  int8_t codes1[kBlock];
  uint8_t codes2[kBlock];
};

inline void step_floats(Block& b, const Adam8bitStep& s, float scale1, float scale2) {
  const float unit1 = scale1 * (1.0f / kMost1), unit2 = scale2 * (1.0f / kMost2),
              eps = s.eps > 1e-30f ? s.eps : 1e-30f;
  for (int i = 0; i < kBlock; i += kLanes) {
    const Floats root1 = load_codes(b.codes1 + i), root2 = load_codes(b.codes2 + i),
                 square2 = root2 * root2;
    Floats p = load_floats(b.param + i), g = load_floats(b.grad + i) * s.sign;
    if (s.l2 != 0.0f) g = g + p * s.l2;
    if (s.decay != 0.0f) p = p - p * s.decay;
    const Floats m = root1 * absolute(root1) * unit1 * s.beta1 + g * s.one_minus_beta1;
    const Floats v = square2 * square2 * unit2 * s.beta2 + (g * g) * s.one_minus_beta2,
                 root = square_root(v);
    p = p - (m * s.step_size) / (root * s.inverse_bias2 + eps);
    store_floats(b.param + i, p);
    store_floats(b.exp_avg + i, m);
    store_floats(b.exp_avg_sq + i, v);
    store_floats(b.root + i, root);
  }
}

inline void encode(Block& b, float factor1, float factor2, uint32_t seed) {
  const float root_factor = square_root(factor2);
  Words place = {};
  for (int i = 0; i < kLanes; ++i) place[i] = static_cast<uint32_t>(i);
  for (int i = 0; i < kBlock; i += kLanes) {
    const Words random = random_word(place + (seed + static_cast<uint32_t>(i)));
    const auto unit = [](Words bits) {
      return __builtin_convertvector(reinterpret_cast<Ints>(bits), Floats) * 0x1p-16f;
    };
    store_codes(b.codes1 + i, encode1(load_floats(b.exp_avg + i), factor1, unit(random & 0xffffu)));
    store_codes(b.codes2 + i, encode2(load_floats(b.root + i), root_factor, unit(random >> 16)));
  }
}

inline void fetch(const TensorRow& row, int k, int64_t at, float* to, int64_t count) {
  const float* values = widen(row.array[k], at, count, row.type[k], to);
  if (values != to) memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
}

inline void put(const TensorRow& row, int k, int64_t at, const float* from, int64_t count) {
  narrow(from, row.array[k], at, count, row.type[k]);
}

}  // namespace

void adam8bit_cpu(const TensorRow& row, const Adam8bitStep& step, int64_t begin, int64_t end) {
  const Adam8bitStep s = step;
  const uint32_t step_seed = hash(s.step);
  const bool wide =
      row.type[kAdam8bitParam] == ElementType::f32 && row.type[kAdam8bitGrad] == ElementType::f32;
  Block b;
  Buffer buffer;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock;
    const size_t size = static_cast<size_t>(count);
    const bool in_place = wide && count == kBlock;
    int8_t* const codes1 = static_cast<int8_t*>(row.array[kAdam8bitExpAvg]) + at;
    uint8_t* const codes2 = static_cast<uint8_t*>(row.array[kAdam8bitExpAvgSq]) + at;
    float& scale1 = static_cast<float*>(row.array[kAdam8bitExpAvgScale])[at / kBlock];
    float& scale2 = static_cast<float*>(row.array[kAdam8bitExpAvgSqScale])[at / kBlock];
    if (in_place) {
      b.param = static_cast<float*>(row.array[kAdam8bitParam]) + at,
      b.grad = static_cast<float*>(row.array[kAdam8bitGrad]) + at;
      b.codes1 = codes1, b.codes2 = codes2;
    } else {
      if (count < kBlock) memset(&buffer, 0, sizeof buffer);
      b.param = buffer.param, b.grad = buffer.grad, b.codes1 = buffer.codes1,
      b.codes2 = buffer.codes2;
      fetch(row, kAdam8bitParam, at, b.param, count);
      fetch(row, kAdam8bitGrad, at, b.grad, count);
      memcpy(b.codes1, codes1, size);
      memcpy(b.codes2, codes2, size);
    }
    if (s.grad_scale != 0.0f) {
      for (int64_t i = 0; i < count; ++i) b.grad[i] /= s.grad_scale;
      if (!in_place) put(row, kAdam8bitGrad, at, b.grad, count);
    }
    step_floats(b, s, scale1, scale2);
    scale1 = largest(b.exp_avg);
    scale2 = largest(b.exp_avg_sq);
    encode(b, scale_factor(scale1, kMost1), scale_factor(scale2, kMost2),
           step_seed + static_cast<uint32_t>(at) + static_cast<uint32_t>(at >> 32) * 0x9e3779b9u);
    if (in_place) continue;
    put(row, kAdam8bitParam, at, b.param, count);
    memcpy(codes1, b.codes1, size);
    memcpy(codes2, b.codes2, size);
  }
}

}  // namespace flexops::FLEXOPS_ISA
