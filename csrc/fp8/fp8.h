// The launchers of quantization to scaled bytes (fp8 and int8): raw pointers and numbers, no torch.
// Formulas: flexops/ops/fp8.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

/// Rows of `length` elements of `type`, `row_stride` apart in memory (the codes' rows are
/// contiguous), each cut into `segments` segments of `segment` elements, of which the last may be
/// short. Every segment has a scale: scales [rows, segments], float32, contiguous. A segment
/// without elements exists too: its scale is 1.
struct ScaledLayout {
  int64_t rows, length, row_stride;
  int64_t segment, segments;
  ElementType type;
  Dtype code;  // e4m3, e5m2, i8
};

/// Queued on `stream`; the pointers are the device's. Return nullptr, or CUDA's error text.

/// Finds scales and makes codes. `workspace`: 4 bytes, for a single segment only.
FLEXOPS_CUDA_DECLARE(const char* quantize_scaled_cuda(const void* x, uint8_t* codes, float* scales,
                                                      uint32_t* workspace,
                                                      const ScaledLayout& layout, void* stream))
/// Makes the codes of a single segment, by a scale that is given.
FLEXOPS_CUDA_DECLARE(const char* cast_scaled_cuda(const void* x, const float* scale, uint8_t* codes,
                                                  const ScaledLayout& layout, void* stream))
/// What `type` and `row_stride` (which must be `length`) tell is the output here.
FLEXOPS_CUDA_DECLARE(const char* dequantize_scaled_cuda(const uint8_t* codes, const float* scales,
                                                        void* out, const ScaledLayout& layout,
                                                        void* stream))

/// The CPU's work on segments [begin, end) of [0, rows * segments).
FLEXOPS_ISA_DECLARE(void quantize_scaled_cpu(const void* x, uint8_t* codes, float* scales,
                                             const ScaledLayout& layout, int64_t begin,
                                             int64_t end))
FLEXOPS_ISA_DECLARE(void dequantize_scaled_cpu(const uint8_t* codes, const float* scales, void* out,
                                               const ScaledLayout& layout, int64_t begin,
                                               int64_t end))
/// The same on elements [begin, end) of a single segment, whose scale is *scale. largest_bits gives
/// the bits of the largest magnitude: of a NaN, if there is one. The scale follows from it, and
/// whether the segment is broken.
FLEXOPS_ISA_DECLARE(uint32_t largest_bits_cpu(const void* x, ElementType type, int64_t begin,
                                              int64_t end))
FLEXOPS_ISA_DECLARE(float scale_cpu(uint32_t largest_bits, Dtype code))
FLEXOPS_ISA_DECLARE(void cast_scaled_cpu(const void* x, float scale, bool broken, uint8_t* codes,
                                         const ScaledLayout& layout, int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void uncast_scaled_cpu(const uint8_t* codes, float scale, void* out,
                                           const ScaledLayout& layout, int64_t begin, int64_t end))

}  // namespace flexops
