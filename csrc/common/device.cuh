// The one place that tells compilers apart: NVRTC and nvcc for CUDA's device code, hipcc, and a
// plain C++ compiler for launchers (the host pass). Device headers include no host or toolkit
// header: NVRTC has none at hand.
#pragma once

#if defined(__HIPCC__) || defined(__HIP_PLATFORM_AMD__)
#define FLEXOPS_HIP 1
#include <hip/hip_runtime.h>
#else
#define FLEXOPS_HIP 0
#if !defined(__CUDACC__)
#include "common/host_pass.cuh"
#endif
#endif

#define FLEXOPS_DEVICE __device__ __forceinline__

/// Marks a kernel's only parameter, a struct passed by value: read in place from constant memory,
/// never copied to local memory. GPUs before 7.0 have no such marker: there what is indexed or has
/// its address taken may be copied.
#if !FLEXOPS_HIP && defined(__CUDACC__) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700)
#define FLEXOPS_GRID_CONSTANT __grid_constant__
#else
#define FLEXOPS_GRID_CONSTANT
#endif

/// The most bytes of parameters that a kernel may take. CUDA allows 32764 (from 12.1 and sm_70 on),
/// but ptxas 13.0 wraps the offset of an indexed read that lies 32 KiB or more into the constant
/// bank, of which the parameters have what follows the first 0x210 (sm_90) or 0x380 (sm_100) bytes.
#if !FLEXOPS_HIP
#define FLEXOPS_KERNEL_PARAMETER_BYTES (32768 - 1024)
#else
#define FLEXOPS_KERNEL_PARAMETER_BYTES 4096
#endif

namespace flexops {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8,
              "the widths that device code counts on");

/// Lanes of a warp (wavefront): 32 on NVIDIA; 64 on AMD's gfx9, 32 on its others.
#if FLEXOPS_HIP && defined(__AMDGCN_WAVEFRONT_SIZE__)
inline constexpr int kWarpSize = __AMDGCN_WAVEFRONT_SIZE__;
#elif FLEXOPS_HIP && !defined(__GFX10__) && !defined(__GFX11__) && !defined(__GFX12__)
inline constexpr int kWarpSize = 64;
#else
inline constexpr int kWarpSize = 32;
#endif

/// Bit patterns, without <cstring>.
template <typename To, typename From>
FLEXOPS_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  union {
    From from_;
    To to_;
  } u = {from};
  return u.to_;
}

/// The value of the lane `lane ^ mask`, for all lanes of the warp at once.
template <typename T>
FLEXOPS_DEVICE T shuffle_xor(T value, int mask, int width = kWarpSize) {
#if FLEXOPS_HIP
  return __shfl_xor(value, mask, width);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask, width);
#endif
}

/// The value of lane `lane` (within its group of `width` lanes), for all lanes of the warp at once.
template <typename T>
FLEXOPS_DEVICE T shuffle(T value, int lane, int width = kWarpSize) {
#if FLEXOPS_HIP
  return __shfl(value, lane, width);
#else
  return __shfl_sync(0xffffffffu, value, lane, width);
#endif
}

/// Keeps the compiler from knowing what a word holds.
FLEXOPS_DEVICE void obscure(u32& word) {
#if FLEXOPS_HIP
  asm volatile("" : "+v"(word));  // "r" would be a register that all lanes share
#else
  asm volatile("" : "+r"(word));
#endif
}

/// A barrier among `threads` threads of the block (whole warps of 32) that call it with the same
/// `id`, from 1 to 15. HIP has none: there it is one for the whole block, so all of the block's
/// threads must call it equally often.
FLEXOPS_DEVICE void barrier(int id, int threads) {
#if FLEXOPS_HIP
  (void)id, (void)threads;
  __syncthreads();
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

}  // namespace flexops
