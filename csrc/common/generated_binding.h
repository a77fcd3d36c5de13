// What bindings that flexops/build/describe/binding.py writes are made of, beside binding.h.
#pragma once

#include "common/binding.h"

#include "common/cpu.h"

namespace flexops {

inline TensorView view_of(const std::optional<Tensor>& tensor) {
  return tensor ? view_of(*tensor) : TensorView{};
}

inline Text shape_text(const TensorView& tensor) { return sizes_text(tensor.sizes, tensor.dim); }

inline bool same_shape(const TensorView& a, const TensorView& b) {
  bool same = a.dim == b.dim;
  for (int64_t d = 0; same && d < a.dim; ++d) same = a.sizes[d] == b.sizes[d];
  return same;
}

[[gnu::noinline]] inline void check_dtype(const char* op, const char* name, Dtype dtype,
                                          const char* other_name, Dtype other) {
  FLEXOPS_CHECK(dtype == other, op, ": ", name, " must be ", dtype_name(other), ", as ", other_name,
                ", got ", dtype_name(dtype));
}

[[gnu::noinline]] inline void check_shape(const char* op, const char* name,
                                          const TensorView& tensor, const char* other_name,
                                          const TensorView& other) {
  FLEXOPS_CHECK(same_shape(tensor, other), op, ": ", name, " must have ", other_name, "'s shape ",
                shape_text(other), ", got ", shape_text(tensor));
}

inline Tensor cast(const Tensor& tensor, Dtype dtype) {
  Tensor out = empty_like_contiguous(tensor, dtype);
  copy(out, tensor);
  return out;
}

/// Casts tensors to float32, unless all that are given have one dtype.
struct Alike {
  Tensor* tensor;  // null if it is not given
  TensorView* view;
};
[[gnu::noinline]] inline void make_alike(std::initializer_list<Alike> tensors) {
  Dtype dtype = Dtype::none;
  bool same = true;
  for (const Alike& one : tensors) {
    if (!one.tensor) continue;
    same = same && (dtype == Dtype::none || dtype == one.view->dtype);
    dtype = one.view->dtype;
  }
  for (const Alike& one : tensors) {
    if (same || !one.tensor || one.view->dtype == Dtype::f32) continue;
    *one.tensor = cast(*one.tensor, Dtype::f32);
    *one.view = view_of(*one.tensor);
  }
}

/// Views of a list's tensors.
class ViewList {
 public:
  explicit ViewList(const TensorList& tensors) {
    views_.reserve(tensors.size());
    for (const Tensor& tensor : tensors) views_.push_back(view_of(tensor));
  }
  operator TensorViews() const { return {views_.data(), static_cast<int64_t>(views_.size())}; }

 private:
  std::vector<TensorView> views_;
};

/// Replaces a tensor by a contiguous copy, unless it lies as the launcher takes it: contiguous, or
/// in even rows if `rows`. `aligned`: on a GPU its rows also lie at multiples of 16 bytes, or as
/// far from them as those of a contiguous tensor that begins at one.
[[gnu::noinline]] inline void take(Tensor& tensor, TensorView& view, bool rows = false,
                                   bool aligned = false) {
  bool fits = view.is_contiguous() || (rows && view.has_even_rows());
  if (FLEXOPS_DEVICE_CUDA && aligned && fits && view.numel > 0) {
    const int64_t bytes = (view.row_stride() - view.columns()) * dtype_size(view.dtype);
    fits = flexops::aligned(view.data) && bytes % 16 == 0;
  }
  if (fits) return;
  tensor = contiguous_copy(tensor);
  view = view_of(tensor);
}
inline void take(std::optional<Tensor>& tensor, TensorView& view, bool rows = false,
                 bool aligned = false) {
  if (tensor) take(*tensor, view, rows, aligned);
}

/// Replaces a tensor by a contiguous copy, unless elements of its last dimension are neighbours
/// and, with `aligned`, on a GPU, rows begin at multiples of 16 bytes.
[[gnu::noinline]] inline void take_columns(Tensor& tensor, TensorView& view, bool aligned) {
  bool fits = view.columns() <= 1 || view.stride(-1) == 1;
  if (FLEXOPS_DEVICE_CUDA && aligned) {
    fits = fits && flexops::aligned(view.data);
    for (int64_t d = 0; d < view.dim - 1; ++d) {
      const int64_t bytes = view.strides[d] * dtype_size(view.dtype);
      fits = fits && (view.sizes[d] <= 1 || (bytes > 0 && bytes % 16 == 0));
    }
  }
  if (fits) return;
  tensor = contiguous_copy(tensor);
  view = view_of(tensor);
}
inline void take_columns(std::optional<Tensor>& tensor, TensorView& view, bool aligned) {
  if (tensor) take_columns(*tensor, view, aligned);
}

/// A dense tensor of the shape of `like`, whose dimensions lie in memory in the order of that
/// one's, the last one innermost. A dimension of stride 0 keeps its place among its neighbours.
[[gnu::noinline]] inline Tensor empty_in_order(const TensorView& like, Dtype dtype,
                                               const Tensor& place) {
  int64_t order[kMostDims], strides[kMostDims], stride = 1;
  for (int64_t d = 0; d < like.dim; ++d) {
    int64_t at = d;  // insertion sort
    for (; d + 1 < like.dim && at > 0; --at) {
      const int64_t before = like.strides[order[at - 1]];
      if (before <= 0 || before >= like.strides[d]) break;
      order[at] = order[at - 1];
    }
    order[at] = d;
  }
  for (int64_t i = like.dim - 1; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= like.sizes[order[i]] > 1 ? like.sizes[order[i]] : 1;
  }
  return empty_strided(like.sizes, strides, like.dim, dtype, place);
}

/// Makes the view one of the shape of `to`: what the tensor is broadcast along gets stride 0.
/// Elements of the last dimension are neighbours, or one. `strides` is where the view's are kept.
[[gnu::noinline]] inline void broadcast(const char* op, const char* name, Tensor& tensor,
                                        TensorView& view, const char* to_name, const TensorView& to,
                                        int64_t* strides) {
  const int64_t missing = to.dim - view.dim;
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < view.dim; ++d)
    fits = view.sizes[d] == 1 || view.sizes[d] == to.sizes[missing + d];
  FLEXOPS_CHECK(fits, op, ": ", name, " must be broadcastable to ", to_name, ", got shape ",
                shape_text(view), " for ", shape_text(to));
  if (view.dim > 0 && view.size(-1) != 1 && view.stride(-1) > 1) take(tensor, view);
  for (int64_t d = 0; d < to.dim; ++d)
    strides[d] = d < missing || view.sizes[d - missing] == 1 ? 0 : view.strides[d - missing];
  view.dim = to.dim, view.sizes = to.sizes, view.strides = strides, view.numel = to.numel;
}
inline void broadcast(const char* op, const char* name, std::optional<Tensor>& tensor,
                      TensorView& view, const char* to_name, const TensorView& to,
                      int64_t* strides) {
  if (tensor) broadcast(op, name, *tensor, view, to_name, to, strides);
}

/// What is written, as the launcher takes it: contiguous; finish() brings it back to where it
/// belongs.
struct Written {
  Tensor& target;
  Tensor tensor;

  Written(const char* op, const char* name, Tensor& t) : target(t), tensor(contiguous(t)) {
    FLEXOPS_CHECK(!is_expanded(t), op, ": ", name, kExpanded);
  }
  void finish() const {
    if (!target.is_contiguous()) copy(target, tensor);
  }
};

template <typename T>
const T* pointer_to(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

/// A tensor's dimension, counted from the last one if it is negative.
[[gnu::noinline]] inline int64_t size_of(const char* op, const char* name, const TensorView& tensor,
                                         int64_t d) {
  const int64_t at = d < 0 ? d + tensor.dim : d, least = d < 0 ? -d : d + 1;
  FLEXOPS_CHECK(at >= 0 && at < tensor.dim, op, ": ", name, " must have at least ",
                least == 1 ? Text{"one dimension"}
                           : Text{least, " dimensions, got shape ", shape_text(tensor)});
  return tensor.sizes[at];
}

/// A shape that is put together from others'.
class Shape {
 public:
  Shape(const char* op) : op_(op) {}
  [[gnu::noinline]] Shape& add(int64_t size) {
    FLEXOPS_CHECK(dim_ < kMostDims, op_, ": a shape has more than ", kMostDims, " dimensions");
    sizes_[dim_++] = size;
    return *this;
  }
  /// Dimensions [from, to) of a tensor, each counted from the last one if it is negative.
  [[gnu::noinline]] Shape& add(const TensorView& tensor, int64_t from, int64_t to) {
    for (int64_t d = counted(tensor, from), end = counted(tensor, to); d < end; ++d)
      add(tensor.sizes[d]);
    return *this;
  }
  [[gnu::noinline]] void check(const char* name, const TensorView& tensor) const {
    FLEXOPS_CHECK(same_shape(view(), tensor), op_, ": ", name, " must have shape ",
                  shape_text(view()), ", got ", shape_text(tensor));
  }
  Tensor make(Dtype dtype, const Tensor& like) const { return empty(sizes_, dim_, dtype, like); }

 private:
  TensorView view() const { return {nullptr, Dtype::other, dim_, 0, sizes_, nullptr}; }
  static int64_t counted(const TensorView& tensor, int64_t d) {
    const int64_t at = d < 0 ? d + tensor.dim : d;
    return at < 0 ? 0 : at < tensor.dim ? at : tensor.dim;
  }
  const char* op_;
  int64_t sizes_[kMostDims];
  int64_t dim_ = 0;
};

}  // namespace flexops
