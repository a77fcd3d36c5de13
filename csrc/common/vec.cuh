// Vector loads and stores, up to 16 bytes at once, with hints for data that is touched once.
//
//   // One 16-byte access, aligned to that:
//   Vec<float, 4> v = load<Cache::streaming>(reinterpret_cast<const Vec<float, 4>*>(pointer));
//   store<Cache::streaming>(reinterpret_cast<Vec<float, 4>*>(out), v);
#pragma once

#include "common/device.cuh"

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FLEXOPS_HAS_CACHE_POLICY 1
#else
#define FLEXOPS_HAS_CACHE_POLICY 0
#endif

namespace flexops {

/// N elements that are loaded and stored as one; aligned to its size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

enum class Cache {
  normal,     // likely to be read again soon
  streaming,  // touched once: first to be evicted
  constant,   // loads of what is not written while the kernel runs: may move ahead of stores
};

namespace detail {
template <int Bytes>
struct Word;
template <>
struct Word<1> {
  using type = u8;
};
template <>
struct Word<2> {
  using type = u16;
};
template <>
struct Word<4> {
  using type = u32;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};
}  // namespace detail

/// Reads *pointer in one access of sizeof(V) bytes: 1, 2, 4, 8 or 16.
template <Cache cache, typename V>
FLEXOPS_DEVICE V load(const V* pointer) {
  using W = typename detail::Word<sizeof(V)>::type;
  const W* words = reinterpret_cast<const W*>(pointer);
#if FLEXOPS_HIP
  return bit_cast<V>(*words);
#else
  if constexpr (cache == Cache::streaming) return bit_cast<V>(__ldcs(words));
  if constexpr (cache == Cache::constant) return bit_cast<V>(__ldg(words));
  return bit_cast<V>(*words);
#endif
}

/// Whether the second-level cache shall keep what is read rather than what others put there: made
/// once, for load_with().
struct L2Policy {
  u64 bits = 0;
  FLEXOPS_DEVICE explicit L2Policy([[maybe_unused]] bool keep) {
#if FLEXOPS_HAS_CACHE_POLICY
    if (keep) {
      asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(bits));
    } else {
      asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(bits));
    }
#endif
  }
};

/// Reads *pointer, 16 bytes that are not written while the kernel runs, in one access.
template <typename V>
FLEXOPS_DEVICE V load_with(const V* pointer, const L2Policy& policy) {
  static_assert(sizeof(V) == 16, "one access");
#if FLEXOPS_HAS_CACHE_POLICY
  uint4 words;
  asm("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(pointer), "l"(policy.bits));
  return bit_cast<V>(words);
#else
  (void)policy;
  return load<Cache::normal>(pointer);
#endif
}

/// Writes *pointer in one access of sizeof(V) bytes: 1, 2, 4, 8 or 16.
template <Cache cache, typename V>
FLEXOPS_DEVICE void store(V* pointer, const V& value) {
  using W = typename detail::Word<sizeof(V)>::type;
  W* words = reinterpret_cast<W*>(pointer);
#if FLEXOPS_HIP
  *words = bit_cast<W>(value);
#else
  if constexpr (cache == Cache::streaming) {
    __stcs(words, bit_cast<W>(value));
  } else {
    *words = bit_cast<W>(value);
  }
#endif
}

/// Whether the address is a multiple of `bytes` (a power of two).
FLEXOPS_DEVICE bool is_aligned(const void* pointer, int bytes) {
  return (reinterpret_cast<u64>(pointer) & static_cast<u64>(bytes - 1)) == 0;
}

/// Asks the second-level cache for a line that will be read soon, perhaps by another block. On AMD
/// nothing.
FLEXOPS_DEVICE void prefetch(const void* pointer) {
#if FLEXOPS_HIP
  (void)pointer;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
#endif
}

}  // namespace flexops
