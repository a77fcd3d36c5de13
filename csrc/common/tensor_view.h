// What a launcher is given of a tensor, without torch: launchers, CPU kernels and bindings include
// it. docs/builder.md has the convention.
#pragma once

#include "common/arithmetic.h"
#include "common/element_type.h"

namespace flexops {

FLEXOPS_INLINE const char* dtype_name(Dtype dtype) {
  constexpr const char* kNames[] = {
      "float32", "float16", "bfloat16", "float64",       "uint8",       "int8",          "int16",
      "int32",   "int64",   "bool",     "float8_e4m3fn", "float8_e5m2", "another dtype", "none"};
  return kNames[static_cast<int>(dtype)];
}

/// Bytes of one element; 0 for `other` and `none`.
FLEXOPS_INLINE int64_t dtype_size(Dtype dtype) {
  constexpr int64_t kSizes[] = {4, 2, 2, 8, 1, 1, 2, 4, 8, 1, 1, 1, 0, 0};
  return kSizes[static_cast<int>(dtype)];
}

constexpr int64_t kMostDims = 64;  // that a tensor of torch's has

/// Borrowed for the call. Sizes and strides count elements; an optional tensor that is not given is
/// false.
struct TensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::other;
  int64_t dim = -1, numel = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;  // the host's

  FLEXOPS_INLINE explicit operator bool() const { return dim >= 0; }
  /// From the last one, if d is negative.
  FLEXOPS_INLINE int64_t size(int64_t d) const { return sizes[d < 0 ? d + dim : d]; }
  FLEXOPS_INLINE int64_t stride(int64_t d) const { return strides[d < 0 ? d + dim : d]; }
  /// Elements of a row, along the last dimension, and how many rows there are. A scalar is one row
  /// of one.
  FLEXOPS_INLINE int64_t columns() const { return dim > 0 ? sizes[dim - 1] : 1; }
  FLEXOPS_INLINE int64_t rows() const { return columns() > 0 ? numel / columns() : 0; }
  /// Elements from one row to the next, where rows are evenly spaced (has_even_rows).
  FLEXOPS_INLINE int64_t row_stride() const {
    for (int64_t d = dim - 2; d >= 0; --d) {
      if (sizes[d] != 1) return strides[d];
    }
    return columns();
  }
  /// The element at which row number `row` begins, whatever the strides.
  FLEXOPS_INLINE int64_t row_start(int64_t row) const {
    int64_t at = 0;
    for (int64_t d = dim - 2; d >= 0; row /= sizes[d--]) at += row % sizes[d] * strides[d];
    return at;
  }
  FLEXOPS_INLINE bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim - 1; d >= 0; --d) {
      if (sizes[d] != 1 && strides[d] != expected) return numel == 0;
      expected *= sizes[d];
    }
    return true;
  }
  /// Whether elements of a row are neighbours, and rows follow each other at one distance, of less
  /// than 2^32 elements.
  FLEXOPS_INLINE bool has_even_rows() const {
    if (columns() > 1 && strides[dim - 1] != 1) return false;
    int64_t expected = -1;
    for (int64_t d = dim - 2; d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (expected != -1 && strides[d] != expected) return false;
      expected = strides[d] * sizes[d];
    }
    return row_stride() < (int64_t{1} << 32);
  }
  template <typename T>
  FLEXOPS_INLINE T* as() const {
    return static_cast<T*>(data);
  }
};

/// A list of tensors.
struct TensorViews {
  const TensorView* views = nullptr;
  int64_t count = 0;

  FLEXOPS_INLINE const TensorView& operator[](int64_t i) const { return views[i]; }
};

}  // namespace flexops
