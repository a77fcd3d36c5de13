// Elements of fp32, fp16 or bf16 as floats: N at once where the type is known when compiling, one at a time where it is told at run time.
//
//   auto raw = fetch<bf16, 8>(pointer, index, type);     // one 16-byte access; nothing is converted yet
//   float value[8];  widen(value, raw);
//   put<bf16>(out, index, value, type);
//
// With AnyElement for the type and N = 1, `type` decides.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/element_type.h"
#include "common/vec.cuh"

namespace flexops {

/// Stands for a type that is told at run time.
struct AnyElement {};

namespace detail {
template <typename T>
struct Stored {
  using type = T;
};
template <>
struct Stored<AnyElement> {  // converted when it is fetched
  using type = float;
};
}  // namespace detail

/// N elements as they are fetched.
template <typename T, int N>
using Elements = Vec<typename detail::Stored<T>::type, N>;

/// How many elements make 16 bytes.
template <typename T>
inline constexpr int kPerVector = sizeof(T) == 4 ? 4 : 8;
template <>
inline constexpr int kPerVector<AnyElement> = 1;

FLEXOPS_DEVICE float fetch_one(const void* from, i64 index, ElementType type) {
  if (type == ElementType::bf16) return to_float(static_cast<const bf16*>(from)[index]);
  if (type == ElementType::f16) return to_float(static_cast<const f16*>(from)[index]);
  return static_cast<const float*>(from)[index];
}

FLEXOPS_DEVICE void put_one(void* to, i64 index, float value, ElementType type) {
  if (type == ElementType::bf16) {
    static_cast<bf16*>(to)[index] = from_float<bf16>(value);
  } else if (type == ElementType::f16) {
    static_cast<f16*>(to)[index] = from_float<f16>(value);
  } else {
    static_cast<float*>(to)[index] = value;
  }
}

/// Elements [index, index + N), in one access.
template <typename T, int N, Cache cache = Cache::streaming>
FLEXOPS_DEVICE Elements<T, N> fetch(const void* from, i64 index, ElementType type) {
  if constexpr (kPerVector<T> == 1) {
    Elements<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.at[i] = fetch_one(from, index + i, type);
    return out;
  } else {
    return load<cache>(reinterpret_cast<const Vec<T, N>*>(static_cast<const T*>(from) + index));
  }
}

template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<float, N>& in) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = in.at[i];
}
template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<bf16, N>& in) {
  const auto words = bit_cast<Vec<u32, N / 2>>(in);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = bit_cast<float>(i % 2 ? words.at[i / 2] & 0xffff0000u : words.at[i / 2] << 16);
}
template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<f16, N>& in) {
  const auto words = bit_cast<Vec<u32, N / 2>>(in);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(f16{static_cast<u16>(words.at[i / 2] >> (i % 2 * 16))});
}

/// Writes N numbers, rounded to T, 16 bytes at a time (fewer if they are fewer).
template <typename T, int N, Cache cache = Cache::streaming>
FLEXOPS_DEVICE void put(void* to, i64 index, const float (&value)[N], ElementType type) {
  if constexpr (kPerVector<T> == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) put_one(to, index + i, value[i], type);
  } else if constexpr (sizeof(T) == 4) {
    constexpr int kPart = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < N; i += kPart) {
      Vec<T, kPart> part;
#pragma unroll
      for (int k = 0; k < kPart; ++k) part.at[k] = value[i + k];
      store<cache>(reinterpret_cast<Vec<T, kPart>*>(static_cast<T*>(to) + index + i), part);
    }
  } else {
    Vec<u32, N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words.at[i] = pack2<T>(value[2 * i], value[2 * i + 1]);
    store<cache>(reinterpret_cast<Vec<u32, N / 2>*>(static_cast<T*>(to) + index), words);
  }
}

/// N neighbouring numbers of a small tensor that many threads read, as they are fetched. Its type is told at run time; if N is more than 1,
/// its address and `index` are multiples of 16 bytes and of N.
template <int N>
struct Shared {
  Vec < u32, N<4 ? N : 4> words[N < 4 ? 1 : N / 4];

  FLEXOPS_DEVICE void load(const void* from, i64 index, ElementType type) {
    if constexpr (N == 1) {
      words[0].at[0] = bit_cast<u32>(fetch_one(from, index, type));
    } else if (type == ElementType::f32) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i)
        words[i] = flexops::load<Cache::normal>(reinterpret_cast<const Vec<u32, 4>*>(static_cast<const float*>(from) + index + 4 * i));
    } else {
      const auto halves = flexops::load<Cache::normal>(reinterpret_cast<const Vec<u32, N / 2>*>(static_cast<const u16*>(from) + index));
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
      for (int i = 0; i < N; ++i) out[i] = bit_cast<float>(i % 2 ? words[0].at[i / 2] & 0xffff0000u : words[0].at[i / 2] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = to_float(f16{static_cast<u16>(words[0].at[i / 2] >> (i % 2 * 16))});
    }
  }
};

}  // namespace flexops
