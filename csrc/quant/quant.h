// The launchers of group-wise quantization: raw pointers and numbers, no torch. Formulas and
// format: flexops/ops/quant.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

/// A tensor seen as [outer, length, inner], in groups of `group_size` along `length`, and what
/// becomes of it.
///
///   codes  [outer, groups * group_bytes, inner]       bytes, contiguous; group_bytes = bits == 8 ?
///   group_size : (group_size + 1) / 2 scales [outer, groups, symmetric ? 1 : 2, inner]  of
///   scale_type, contiguous
///
/// The elements of `type` are at outer_stride * o + length_stride * l + inner_stride * i. One of
/// these is 1: length_stride (and inner is 1 then) or inner_stride. What dequantization writes is
/// contiguous.
struct QuantLayout {
  int64_t outer, length, inner;
  int64_t outer_stride, length_stride, inner_stride;
  int64_t groups, group_size, group_bytes;
  int bits;
  bool symmetric;
  ElementType type, scale_type;  // the same when quantizing
};

/// Queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* quantize_cuda(const void* x, uint8_t* packed, void* scales,
                                               const QuantLayout& layout, void* stream))
FLEXOPS_CUDA_DECLARE(const char* dequantize_cuda(const uint8_t* packed, const void* scales,
                                                 void* out, const QuantLayout& layout,
                                                 void* stream))

/// The CPU's work is cut into [0, outer * groups * quant_tiles(layout, columns)): a tile is one
/// group if inner is 1, else the groups of so many neighbouring columns. Rows must be long enough
/// for the hardware to read or write ahead, tiles small enough for the second-level cache.
constexpr int64_t kQuantizeColumns = 256, kDequantizeColumns = 1024;
inline int64_t quant_tiles(const QuantLayout& layout, int64_t columns) {
  return (layout.inner + columns - 1) / columns;
}

FLEXOPS_ISA_DECLARE(void quantize_cpu(const void* x, uint8_t* packed, void* scales,
                                      const QuantLayout& layout, int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void dequantize_cpu(const uint8_t* packed, const void* scales, void* out,
                                        const QuantLayout& layout, int64_t begin, int64_t end))

}  // namespace flexops
