// The launchers of products with 4-bit weights: raw pointers and numbers, no torch. Formulas and
// the layout of the weight: flexops/ops/int4_linear.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

constexpr int64_t kInt4TileN = 16, kInt4TileK = 64, kInt4TileBytes = 512;

/// A weight [n, k] in tiles of 16 rows and 64 columns.
struct Int4View {
  const uint8_t* packed;  // [tiles_n, tiles_k, 512]
  const void* scales;     // [tiles_n, groups, 16]
  const void* zeros;      // the same, or null: all are 8
  bool mxfp4;             // codes are MXFP4's numbers, without zero points
  ElementType scale_type, zero_type;
  int64_t n, k, group_size;
  int64_t tiles_n, tiles_k, groups;
};

struct Int4Product {
  Int4View weight;
  const void* x;     // [m, k], contiguous, aligned to 16 bytes
  const void* bias;  // [n], or null
  void* out;         // [m, n]
  ElementType type;  // of x, bias and out
  int64_t m;
};

/// Queued on `stream`; the pointers are the device's. Return nullptr, or CUDA's error text.
/// `plan`: 0, or a kernel's configuration (see int4_linear_cuda.cpp).
FLEXOPS_CUDA_DECLARE(const char* int4_product_cuda(const Int4Product& call, int64_t plan,
                                                   void* stream))
FLEXOPS_CUDA_DECLARE(const char* int4_unpack_cuda(const Int4View& weight, void* out,
                                                  ElementType type, void* stream))

/// The CPU's work on rows of x, then on tiles of rows [begin, end) of [0, tiles_n). `x`: room for
/// float32 [m, tiles_k * 64], in the order that the products read.
FLEXOPS_ISA_DECLARE(void int4_order_cpu(const Int4Product& call, float* x, int64_t begin,
                                        int64_t end))
FLEXOPS_ISA_DECLARE(void int4_product_cpu(const Int4Product& call, const float* x, int64_t begin,
                                          int64_t end))
FLEXOPS_ISA_DECLARE(void int4_unpack_cpu(const Int4View& weight, void* out, ElementType type,
                                         int64_t begin, int64_t end))

}  // namespace flexops
