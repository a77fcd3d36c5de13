// The small op that `flexops doctor` builds and loads to see that the toolchain works. Not in the catalogue, and of no other use.
#pragma once

#include <stdint.h>

namespace flexops {

/// out[i] = x[i] * x[i], queued on `stream`. Returns nullptr, or CUDA's error text.
const char* square_cuda(const float* x, float* out, int64_t count, void* stream);

namespace baseline {
void square_cpu(const float* x, float* out, int64_t count);
}

}  // namespace flexops
