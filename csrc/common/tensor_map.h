// Encoding the copy engine's tensor maps, in launchers for Hopper.
#pragma once

#include "common/element_type.h"
#include "common/launch.h"
#include "common/wgmma.cuh"

namespace flexops {

namespace detail {
/// `type`, `swizzle`: CU_TENSOR_MAP_...; strides of bytes, of all dimensions but the first.
inline hopper::TensorMap encode(int type, const void* data, const uint64_t (&sizes)[4],
                                const uint64_t (&strides)[3], const unsigned (&box)[4],
                                int swizzle) {
  hopper::TensorMap map = {};
  const unsigned steps[4] = {1, 1, 1, 1};
  constexpr int kPromote256 = 3;
  note(in_context([&] {
    return Driver::get().cuTensorMapEncodeTiled(&map, type, 4, const_cast<void*>(data), sizes,
                                                strides, box, steps, 0, swizzle, kPromote256, 0);
  }));
  return map;
}
}  // namespace detail

/// A map of matrices[i][row][column] of 16-bit elements, from which boxes of 64 columns and
/// `box_rows` rows are loaded with the 128-byte swizzle. What lies outside is zeros. Strides count
/// elements and, like the address, are multiples of 16 bytes; sizes are not 0.
inline hopper::TensorMap map_matrices(Dtype type, const void* data, int64_t matrices, int64_t rows,
                                      int64_t columns, int64_t row_stride, int64_t matrix_stride,
                                      unsigned box_rows, unsigned box_matrices = 1) {
  const uint64_t sizes[4] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                             static_cast<uint64_t>(matrices), 1};
  // The stride of a dimension with one entry has no effect, but must be a multiple of 16 bytes.
  const uint64_t row_bytes = static_cast<uint64_t>(rows > 1 ? row_stride : 8) * 2,
                 matrix_bytes = static_cast<uint64_t>(matrices > 1 ? matrix_stride : 8) * 2;
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle128 = 3;
  return detail::encode(type == Dtype::bf16 ? kBfloat16 : kFloat16, data, sizes,
                        {row_bytes, matrix_bytes, matrix_bytes}, {64, box_rows, box_matrices, 1},
                        kSwizzle128);
}

/// A map of words[planes][rows][columns] of 32 bits, contiguous, from which boxes are loaded as
/// they lie. What lies outside is zeros. Rows are multiples of 16 bytes.
inline hopper::TensorMap map_words(const void* data, int64_t planes, int64_t rows, int64_t columns,
                                   unsigned box_planes, unsigned box_rows, unsigned box_columns) {
  const auto row = static_cast<uint64_t>(columns) * 4, plane = row * static_cast<uint64_t>(rows);
  constexpr int kUint32 = 2, kNoSwizzle = 0;
  return detail::encode(kUint32, data,
                        {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                         static_cast<uint64_t>(planes), 1},
                        {row, plane, plane}, {box_columns, box_rows, box_planes, 1}, kNoSwizzle);
}

}  // namespace flexops
