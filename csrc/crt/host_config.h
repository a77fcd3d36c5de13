// In the place of CUDA's own, which comes with its compiler (nvidia-cuda-crt) and not with its
// runtime's headers: what nvcc asks of a host compiler. Found last, so only where there is none.
#pragma once
