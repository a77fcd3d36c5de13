// What the binding of grouped products with 4-bit weights hands to the launcher.
#pragma once

#include "int4_linear/int4_linear.h"

namespace flexops {

struct Int4Grouped {
  Int4View weight;     // of all groups' matrices, one behind the other
  const int* offsets;  // [groups]: where the rows of each end
  const void* x;       // [m, k], contiguous, aligned to 16 bytes
  void* out;           // [m, n / groups]
  ElementType type;    // of x and out
  int64_t m, groups;
};

/// Queued on `stream`. Returns nullptr, or CUDA's error text. `plan`: 0, or rows of x of a tile
/// (see int4_grouped_cuda.cpp).
const char* int4_grouped_cuda(const Int4Grouped& call, int64_t plan, void* stream);

}  // namespace flexops
