// A function of elements, at the speed of memory: 16 bytes at a time, at any address, up to a
// tensor's end.
//
//   template <typename T>
//   __global__ void add_kernel(const T* a, const T* b, T* out, i64 count) {
//     map_elements(out, count, [=](float a, float b) { return a + b; }, a, b);
//     // launched with blocks(ceil_div(count, 256 * kMapped<T>)) of {256}
//   }
//
// For more than that, load_up_to() and store_up_to() are what it is made of.
#pragma once

#include "common/elements.cuh"

namespace flexops {

/// How many elements each thread of map_elements() has.
template <typename T>
inline constexpr int kMapped = kPerVector<T>;

/// Elements [index, index + N) of `count`, as float32: up to 16 bytes in one access where they are
/// all there and begin at a multiple of 16 bytes, else one by one. What is beyond the last is 0.
template <int N, typename T>
FLEXOPS_DEVICE Vec<float, N> load_up_to(const T* from, i64 index, i64 count) {
  constexpr int kPart = N < kPerVector<T> ? N : kPerVector<T>;
  Vec<float, N> out;
  if (index + N <= count && is_aligned(from + index, kPart * sizeof(T))) {
#pragma unroll
    for (int i = 0; i < N; i += kPart) {
      float part[kPart];
      widen(part, load<T, kPart>(from, index + i));
#pragma unroll
      for (int k = 0; k < kPart; ++k) out.at[i + k] = part[k];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.at[i] = index + i < count ? to_float(from[index + i]) : 0.0f;
  }
  return out;
}

/// The reverse, rounded to T. Nothing is written beyond the last.
template <typename T, int N>
FLEXOPS_DEVICE void store_up_to(T* to, i64 index, i64 count, const Vec<float, N>& value) {
  if (index + N <= count &&
      is_aligned(to + index, (N < kPerVector<T> ? N : kPerVector<T>)*sizeof(T)))
    return store<T>(to, index, value.at);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (index + i < count) to[index + i] = from_float<T>(value.at[i]);
  }
}

namespace detail {
template <typename T, typename F, int N, typename... Rest>
FLEXOPS_DEVICE void store_mapped(T* out, i64 first, i64 count, const F& f, const Vec<float, N>& a,
                                 const Rest&... rest) {
  Vec<float, N> value;
#pragma unroll
  for (int i = 0; i < N; ++i) value.at[i] = f(a.at[i], rest.at[i]...);
  store_up_to(out, first, count, value);
}
}  // namespace detail

/// out[i] = f(in[i]...) for each i below `count`, computed in float32.
template <typename T, typename F, typename... In>
FLEXOPS_DEVICE void map_elements(T* out, i64 count, const F& f, const In*... in) {
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * kMapped<T>;
  detail::store_mapped(out, first, count, f, load_up_to<kMapped<T>>(in, first, count)...);
}

}  // namespace flexops
