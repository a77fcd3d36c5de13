// The launchers of experts' order that experts_host.h calls.
#pragma once

#include <stdint.h>

#include "common/arithmetic.h"
#include "common/device_type.h"

namespace flexops {

/// Numbers of experts that the order is computed of.
constexpr int64_t kMostExperts = 1024;

/// Choices that one block of threads sorts.
constexpr int64_t kSortedChoices = 1024;
/// int32 numbers of scratch memory.
inline int64_t expert_order_workspace(int64_t choices, int64_t experts) {
  return (experts + 1) * (ceil_div(choices, kSortedChoices) + 1);
}
FLEXOPS_CUDA_DECLARE(const char* expert_order_cuda(const void* ids, bool wide, int64_t choices,
                                                   int64_t experts, int* workspace, int* order,
                                                   int* inverse, int* offsets, void* stream))

}  // namespace flexops
