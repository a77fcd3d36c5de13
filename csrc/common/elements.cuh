// Elements of float, f16 or bf16: the one vocabulary of kernels for what they read, compute with
// and write.
//
//   auto raw = load<bf16, 8>(pointer, index);  // one access of 16 bytes, nothing converted yet
//   float value[8];
//   widen(value, raw);                         // to float32
//   store<bf16>(out, index, value);            // rounded to nearest even, in one access
//   Vec<bf16, 8> rounded = round<bf16>(value);  // the same without the store
//
// Of a type known at run time, one at a time: load_any, store_any, round_any. For what is
// done once a row or a column (sums, scales), and for kernels of types that differ, which are 27
// kinds where three are distinguished.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/element_type.h"
#include "common/vec.cuh"

namespace flexops {

/// How many elements make 16 bytes.
template <typename T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

/// Elements [index, index + N), in one access.
template <typename T, int N, Cache cache = Cache::normal>
FLEXOPS_DEVICE Vec<T, N> load(const void* from, i64 index) {
  return load<cache>(reinterpret_cast<const Vec<T, N>*>(static_cast<const T*>(from) + index));
}

template <typename T, int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<T, N>& in) {
  if constexpr (sizeof(T) == 4 || N == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(in.at[i]);
  } else {
    const auto words = bit_cast<Vec<u32, N / 2>>(in);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = half_of<T>(words.at[i / 2], i % 2);
  }
}

template <typename T, int N>
FLEXOPS_DEVICE Vec<T, N> round(const float (&in)[N]) {
  Vec<T, N> out;
  if constexpr (sizeof(T) == 4 || N == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) out.at[i] = from_float<T>(in[i]);
    return out;
  } else {
    Vec<u32, N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words.at[i] = pack2<T>(in[2 * i], in[2 * i + 1]);
    return bit_cast<Vec<T, N>>(words);
  }
}

/// Writes N numbers, rounded to T, up to 16 bytes at a time.
template <typename T, Cache cache = Cache::normal, int N>
FLEXOPS_DEVICE void store(void* to, i64 index, const float (&value)[N]) {
  constexpr int kPart = N < kPerVector<T> ? N : kPerVector<T>;
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    float part[kPart];
#pragma unroll
    for (int k = 0; k < kPart; ++k) part[k] = value[i + k];
    store<cache>(reinterpret_cast<Vec<T, kPart>*>(static_cast<T*>(to) + index + i), round<T>(part));
  }
}

/// What fills registers of 32 bits, or else T.
template <typename T, bool Whole>
struct Word {
  using Type = u32;
};
template <typename T>
struct Word<T, false> {
  using Type = T;
};

/// N elements as they are in memory, for loads long before their use: in whole registers if they
/// fill any, since halves of registers are moved by instructions of their own. Zeros until read.
template <typename T, int N>
struct Raw {
  static constexpr bool kWhole = N * sizeof(T) % 4 == 0;
  static constexpr int kBytes = N * sizeof(T) < 16 ? static_cast<int>(N * sizeof(T)) : 16;
  using Part =
      Vec<typename Word<T, kWhole>::Type, kBytes / (kWhole ? 4 : static_cast<int>(sizeof(T)))>;
  Part parts[N * sizeof(T) / kBytes] = {};

  FLEXOPS_DEVICE void read(const T* from) {
#pragma unroll
    for (int k = 0; k < static_cast<int>(N * sizeof(T)) / kBytes; ++k)
      parts[k] = load<Cache::normal>(reinterpret_cast<const Part*>(from) + k);
  }
  FLEXOPS_DEVICE float operator[](int i) const {
    constexpr int kPer = kBytes / static_cast<int>(sizeof(T));
    const auto& part = parts[i / kPer];
    if constexpr (!kWhole) {
      return to_float(part.at[i % kPer]);
    } else if constexpr (sizeof(T) == 4) {
      return bit_cast<float>(part.at[i % kPer]);
    } else {
      return half_of<T>(part.at[i % kPer / 2], i % 2);
    }
  }
};

template <typename T, int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Raw<T, N>& in) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = in[i];
}

FLEXOPS_DEVICE float load_any(const void* from, i64 index, ElementType type) {
  if (type == ElementType::bf16) return to_float(static_cast<const bf16*>(from)[index]);
  if (type == ElementType::f16) return to_float(static_cast<const f16*>(from)[index]);
  return static_cast<const float*>(from)[index];
}

FLEXOPS_DEVICE void store_any(void* to, i64 index, float value, ElementType type) {
  if (type == ElementType::bf16) {
    static_cast<bf16*>(to)[index] = from_float<bf16>(value);
  } else if (type == ElementType::f16) {
    static_cast<f16*>(to)[index] = from_float<f16>(value);
  } else {
    static_cast<float*>(to)[index] = value;
  }
}

/// The nearest number of that type.
FLEXOPS_DEVICE float round_any(float value, ElementType type) {
  if (type == ElementType::bf16) return to_float(from_float<bf16>(value));
  if (type == ElementType::f16) return to_float(from_float<f16>(value));
  return value;
}

/// N neighbouring numbers of a small tensor that many threads read (a bias, a table), as they are
/// loaded. Its type is known at run time, which costs a branch that all threads take alike; known
/// types would be three kernels for each. If N is more than 1, its address and `index` are
/// multiples of 16 bytes and of N.
template <int N>
struct Broadcast {
  Vec < u32, N<4 ? N : 4> words[N < 4 ? 1 : N / 4];

  FLEXOPS_DEVICE void load(const void* from, i64 index, ElementType type) {
    if constexpr (N == 1) {
      words[0].at[0] = bit_cast<u32>(load_any(from, index, type));
    } else if (type == ElementType::f32) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) words[i] = flexops::load<u32, 4>(from, index + 4 * i);
    } else {
      const auto halves = flexops::load<Cache::normal>(
          reinterpret_cast<const Vec<u32, N / 2>*>(static_cast<const u16*>(from) + index));
#pragma unroll
      for (int i = 0; i < N / 2; ++i) words[0].at[i] = halves.at[i];
    }
  }
  FLEXOPS_DEVICE void widen_to(float* out, ElementType type) const {
    if (N == 1 || type == ElementType::f32) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = bit_cast<float>(words[i / 4].at[i % 4]);
    } else if (type == ElementType::bf16) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = half_of<bf16>(words[0].at[i / 2], i % 2);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = half_of<f16>(words[0].at[i / 2], i % 2);
    }
  }
};

}  // namespace flexops
