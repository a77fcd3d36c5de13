#include "common/cpu_elements.h"

namespace softcap_lib::FLEXOPS_ISA {
using namespace flexops;
using namespace flexops::FLEXOPS_ISA;

void softcap_cpu(const TensorView& x, double cap, const TensorView& out, int64_t begin, int64_t end) {
  const float c = static_cast<float>(cap);
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i) store(out.as<T>(), i, c * __builtin_tanhf(load(x.as<T>(), i) / c));
  });
}

void softcap_backward_cpu(const TensorView& grad, const TensorView& y, double cap, const TensorView& out, int64_t begin, int64_t end) {
  with_floats(grad.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i) {
      const float ratio = load(y.as<T>(), i) / static_cast<float>(cap);
      store(out.as<T>(), i, load(grad.as<T>(), i) * (1.0f - ratio * ratio));
    }
  });
}

}  // namespace softcap_lib::FLEXOPS_ISA
