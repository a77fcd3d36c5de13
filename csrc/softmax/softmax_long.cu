// The forward kernel for rows that are too long to be held.

#include "softmax/softmax_launch.h"

namespace flexops {

const void* softmax_long_kernel(softmax::Type type) {
  return type == softmax::kF32   ? reinterpret_cast<const void*>(&softmax::softmax_long<softmax::kF32>)
         : type == softmax::kF16 ? reinterpret_cast<const void*>(&softmax::softmax_long<softmax::kF16>)
                                 : reinterpret_cast<const void*>(&softmax::softmax_long<softmax::kBf16>);
}

}  // namespace flexops
