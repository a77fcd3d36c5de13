// What the norms' launchers share.
#pragma once

#include "common/launch.h"
#include "norm/norm.cuh"
#include "norm/norm.h"

namespace flexops::norm {

/// Whether a tensor is too large for caches to hold it and its results until these are read.
inline bool is_large(int64_t elements, ElementType type) {
  return elements * element_size(type) >= int64_t{1} << 24;
}

/// The threads of a row: a power of two up to 32, or a multiple of 32.
inline int lanes_for(int64_t wanted, int most) {
  int lanes = 1;
  while (lanes < wanted && lanes < kNarrowWarp) lanes *= 2;
  if (wanted <= kNarrowWarp) return lanes;
  lanes = static_cast<int>(ceil_div(wanted, kNarrowWarp) * kNarrowWarp);
  return lanes < most ? lanes : most;
}

/// A grid whose blocks have `together` groups of threads.
struct Grid {
  int threads;
  int64_t together, blocks;

  /// A block for each long row, or for some short ones.
  Grid(int lanes, int64_t rows)
      : threads(lanes > kNarrowWarp ? lanes : kShortThreads), together(threads / lanes) {
    blocks = ceil_div(rows, together);
  }
};

}  // namespace flexops::norm
