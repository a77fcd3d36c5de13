// In the place of CUDA's own, which comes with its compiler (nvidia-cuda-crt) and not with its
// runtime's headers: what the words of CUDA mean to a plain C++ compiler. Found last, so only where
// there is none.
#pragma once

#define __no_return__ __attribute__((noreturn))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __maxnreg__(n)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __block_size__(...)
#define __thread__ __thread
#define __import__
#define __export__
#define __cdecl
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __specialization_static
#define __grid_constant__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __nv_pure__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
