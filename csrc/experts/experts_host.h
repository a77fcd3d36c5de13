// From the order of experts' choices to its launchers, which need scratch memory.
#pragma once

#include "common/host.h"

#include "experts/experts.h"

namespace flexops {

inline void expert_order_host(Host& host, const TensorView& experts, int64_t count,
                              const TensorView& order, const TensorView& inverse,
                              const TensorView& offsets) {
  FLEXOPS_CHECK(1 <= count && count <= kMostExperts, host.op, ": count must be 1 to ", kMostExperts,
                ", got ", count);
  FLEXOPS_CHECK(experts.numel < int64_t{1} << 31, host.op,
                ": experts must have less than 2^31 elements, got shape ", shape_text(experts));
  int* workspace = host.workspace<int>(expert_order_workspace(experts.numel, count));
  host.check(expert_order_cuda(experts.data, experts.dtype == Dtype::i64, experts.numel, count,
                               workspace, order.as<int>(), inverse.as<int>(), offsets.as<int>(),
                               host.stream()));
}

}  // namespace flexops
