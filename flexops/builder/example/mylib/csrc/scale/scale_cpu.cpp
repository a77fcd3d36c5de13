#include "common/cpu_elements.h"

namespace mylib::FLEXOPS_ISA {
using namespace flexops;
using namespace flexops::FLEXOPS_ISA;

void scale_cpu(const TensorView& x, double factor, const TensorView& out, int64_t begin,
               int64_t end) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i)
      store(out.as<T>(), i, load(x.as<T>(), i) * static_cast<float>(factor));
  });
}

}  // namespace mylib::FLEXOPS_ISA
