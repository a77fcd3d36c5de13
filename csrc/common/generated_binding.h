// What bindings that flexops/op_builder/binding.py writes are made of, beside binding.h.
#pragma once

#include "common/binding.h"

#include "common/cpu.h"

namespace flexops {

inline TensorView view_of(const Tensor& tensor) {
  return {tensor.data(), tensor.dtype(), tensor.dim(), tensor.numel(), tensor.sizes(), tensor.strides()};
}
inline TensorView view_of(const std::optional<Tensor>& tensor) { return tensor ? view_of(*tensor) : TensorView{}; }

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

/// What is written, as the launcher takes it: contiguous; finish() brings it back to where it belongs.
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

/// A shape that is put together from others'.
class Shape {
 public:
  Shape(const char* op) : op_(op) {}
  Shape& add(int64_t size) {
    FLEXOPS_CHECK(dim_ < kMost, op_, ": a shape has more than ", kMost, " dimensions");
    sizes_[dim_++] = size;
    return *this;
  }
  Shape& add_all(int64_t size) { return add(size); }
  Shape& add_all(const Tensor& tensor) { return add(tensor, 0, INT64_MAX); }
  /// Dimensions [from, to) of a tensor, each counted from the last one if it is negative.
  Shape& add(const Tensor& tensor, int64_t from, int64_t to) {
    const int64_t* sizes = tensor.sizes();
    for (int64_t d = counted(tensor, from), end = counted(tensor, to); d < end; ++d) add(sizes[d]);
    return *this;
  }
  Shape& add(const char* name, const Tensor& tensor, int64_t d) {
    const int64_t dim = tensor.dim(), at = d < 0 ? d + dim : d;
    FLEXOPS_CHECK(at >= 0 && at < dim, op_, ": ", name, " must have at least ", d < 0 ? -d : d + 1, " dimensions, got shape ",
                  shape_text(tensor));
    return add(tensor.sizes()[at]);
  }
  bool is_of(const Tensor& tensor) const {
    const int64_t* sizes = tensor.sizes();
    bool same = tensor.dim() == dim_;
    for (int64_t d = 0; same && d < dim_; ++d) same = sizes[d] == sizes_[d];
    return same;
  }
  Text text() const {
    Text out{"["};
    for (int64_t d = 0; d < dim_; ++d) (out += d ? ", " : "") += sizes_[d];
    return out += "]";
  }
  Tensor make(Dtype dtype, const Tensor& like) const { return empty(sizes_, dim_, dtype, like); }

 private:
  static int64_t counted(const Tensor& tensor, int64_t d) {
    const int64_t dim = tensor.dim(), at = d < 0 ? d + dim : d;
    return at < 0 ? 0 : at < dim ? at : dim;
  }
  static constexpr int64_t kMost = 16;
  const char* op_;
  int64_t sizes_[kMost];
  int64_t dim_ = 0;
};

}  // namespace flexops
