// What cross entropy's launchers share. Included by cross_entropy*.cu.
#pragma once

#include "cross_entropy/cross_entropy_row.cuh"

#include "cross_entropy/cross_entropy.h"

namespace flexops::cross_entropy_launch {

using cross_entropy::Params;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Launches the kernel that streams float32 rows of at most `vectors` vectors through shared memory, if the GPU and its code can, and rows
/// fit.
bool launch_ring(Params& p, int64_t vectors, cudaStream_t stream);

}  // namespace flexops::cross_entropy_launch
