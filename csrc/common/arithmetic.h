// Whole numbers and addresses, as launchers, bindings and CPU kernels reckon with them.
#pragma once

#include <stdint.h>

// CPU kernels are compiled several times with different -m flags: what they share is inlined, or
// the linker keeps one of them for all.
#define FLEXOPS_INLINE [[gnu::always_inline]] inline

namespace flexops {

FLEXOPS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLEXOPS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FLEXOPS_INLINE bool aligned(const void* pointer, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace flexops
