// What a family's <family>_host.h sees: functions that a written binding calls instead of a
// launcher, with views of tensors that it has checked and allocated (docs/builder.md). They call
// the launchers, which are declared by FLEXOPS_CUDA_DECLARE and FLEXOPS_ISA_DECLARE:
//
//   inline void scale_host(Host& host, const TensorView& x, double factor, const TensorView& out) {
//     if (FLEXOPS_DEVICE_CUDA) return host.check(my_launcher(x.data,
//     host.workspace<float>(x.rows()), out.data, host.stream())); parallel_for(0, x.rows(), 64,
//     [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(my_kernel)(x, out, begin, end); });
//   }
#pragma once

#include "common/binding.h"

#include "common/cpu.h"

namespace flexops {

/// Of a tensor that the binding has found to be one of floats.
inline ElementType element_type(const TensorView& tensor) {
  return static_cast<ElementType>(tensor.dtype);
}

/// Where a host function runs, beside its arguments.
class Host {
 public:
  Host(const char* name, const Tensor& where) : op(name), where_(where) {}
  [[gnu::noinline]] ~Host() {}
  Host(const Host&) = delete;

  const char* const
      op;  // what errors begin with: FLEXOPS_CHECK(condition, host.op, ": argument must be ...")

  /// Uninitialised memory on the tensors' device, until the operator returns (what it has queued by
  /// then may use it still).
  template <typename T>
  T* workspace(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    kept_.push_back(flexops::empty(&bytes, 1, Dtype::u8, where_));
    return kept_.back().template data<T>();
  }

  /// Uninitialised results on the tensors' device (Output.by_host).
  Tensor empty(const int64_t* sizes, int64_t dim, Dtype dtype) const {
    return flexops::empty(sizes, dim, dtype, where_);
  }
  Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                       Dtype dtype) const {
    return flexops::empty_strided(sizes, strides, dim, dtype, where_);
  }

  /// A contiguous copy of the first tensor, until the operator returns: for a function that decides
  /// itself which strides it takes.
  TensorView copied() {
    kept_.push_back(contiguous_copy(where_));
    return view_of(kept_.back());
  }

  /// torch's current one on the tensors' GPU.
  void* stream() const { return current_stream(where_); }
  /// Throws if a launcher for CUDA returned an error text.
  void check(const char* error) const { check_launch(op, error); }

 private:
  const Tensor& where_;
  std::vector<Tensor> kept_;
};

}  // namespace flexops
