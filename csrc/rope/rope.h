// The launchers of rotary embedding: raw pointers and numbers, no torch. Formulas:
// flexops/ops/rope.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

/// [batch, heads, length, head_dim], read from `in` and written to `out`, which may be the same.
/// Strides count elements, in that order; those of `out` have the last one 1, unless it is `in`.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads;
  int64_t in_strides[4], out_strides[4];
};

struct Rope {
  RopeTensor tensors[2];  // query and key; no heads: there is none
  ElementType type, table_type;
  bool interleaved, inverse, in_place;
  int64_t batch, length, head_dim;
  int64_t half;           // pairs that are rotated: columns of cos and sin that are read
  const void *cos, *sin;  // [max_positions, half], or a row for each position: [batch, length,
                          // half] or, of stride 0, [1, ...]
  int64_t cos_stride, sin_stride;  // of rows
  int64_t cos_batch, sin_batch;    // of batches: 0 if all share the rows
  int64_t max_positions;
  const void* positions;        // int64 or int32, or null for 0, 1, 2, ...
  bool wide_positions;          // int64
  int64_t position_strides[2];  // of batch (0 if all share them) and length
};

/// Queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* rope_cuda(const Rope& call, void* stream))

/// The CPU's work is cut into [0, batch * rope_tiles(length) * rope_parts(call)): tiles of
/// positions, whose cos and sin are loaded once, and the heads of a tile into parts, where there
/// are too few tiles for many threads.
constexpr int64_t kRopePositions = 16;
inline int64_t rope_tiles(int64_t length) { return (length + kRopePositions - 1) / kRopePositions; }
inline int64_t rope_parts(const Rope& call) {
  constexpr int64_t kEnough = 32;
  const int64_t tiles = call.batch * rope_tiles(call.length),
                heads = call.tensors[0].heads + call.tensors[1].heads;
  if (tiles == 0 || tiles >= kEnough) return 1;
  return heads < kEnough / tiles ? (heads > 0 ? heads : 1) : kEnough / tiles;
}
FLEXOPS_ISA_DECLARE(void rope_cpu(const Rope& call, int64_t begin, int64_t end))

}  // namespace flexops
