// Loads of what a kernel reads once, which leave the first-level cache alone: worth 3 % where much
// more is written than read, as when codes become numbers, but costing 3 % where as much or more is
// read. Measured on one H200.
//
//   // Aligned to the vector; it must not be written meanwhile:
//   Vec<u32, 2> v = load_once(reinterpret_cast<const Vec<u32, 2>*>(pointer));
#pragma once

#include "common/device.cuh"
#include "common/vec.cuh"

namespace flexops {

/// Reads *pointer in one access of sizeof(V) bytes: 1, 2, 4, 8 or 16.
template <typename V>
FLEXOPS_DEVICE V load_once(const V* pointer) {
#if FLEXOPS_HIP
  return *pointer;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700  // which have no such load
  return load<Cache::constant>(pointer);
#else
  if constexpr (sizeof(V) == 4) {
    u32 w;
    asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(w) : "l"(pointer));
    return bit_cast<V>(w);
  } else if constexpr (sizeof(V) == 8) {
    uint2 w;
    asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                 : "=r"(w.x), "=r"(w.y)
                 : "l"(pointer));
    return bit_cast<V>(w);
  } else if constexpr (sizeof(V) == 16) {
    uint4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(pointer));
    return bit_cast<V>(w);
  } else {
    return load<Cache::constant>(pointer);
  }
#endif
}

}  // namespace flexops
