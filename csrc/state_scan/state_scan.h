// The launchers of recurrences whose state is a matrix: raw pointers and numbers, no torch. What
// they compute: flexops/ops/state_scan.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "state_scan/state_scan_kinds.h"

namespace flexops {

/// Queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* state_scan_cuda(const StateScan& scan, void* stream))

/// Columns that are computed together: states [begin, end) are those of a head, one after another.
constexpr int64_t kScanColumns = 64;
FLEXOPS_ISA_DECLARE(void state_scan_cpu(const StateScan& scan, int64_t begin, int64_t end))

}  // namespace flexops
