// Whole numbers and addresses, as launchers, bindings and CPU kernels reckon with them.
#pragma once

#include <stdint.h>

// CPU kernels are compiled several times with different -m flags: what they share is inlined, or
// the linker keeps one of them for all.
#define FLEXOPS_INLINE [[gnu::always_inline]] inline

namespace flexops {

FLEXOPS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLEXOPS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
/// Rounded up.
FLEXOPS_INLINE int log2_of(int64_t value) {
  int log = 0;
  while (int64_t{1} << log < value) ++log;
  return log;
}
FLEXOPS_INLINE bool aligned(const void* pointer, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

/// Vectors of 16 bytes, of as many elements each, that the longest of the rows at `data` has,
/// wherever it starts.
FLEXOPS_INLINE int64_t row_vectors(const void* data, int64_t stride, int64_t length,
                                   int64_t elements) {
  const int64_t head = aligned(data) && stride % elements == 0 ? 0 : elements - 1;
  return ceil_div(length + head, elements);
}

}  // namespace flexops
