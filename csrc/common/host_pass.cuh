// Device code as a plain C++ compiler reads it, for launchers: it checks the code and a launcher's
// calls, and emits none of it. What CUDA has beyond C++ is declared here and defined nowhere. By
// way of device.cuh.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
// clang judges the constraints of assembly that it only reads, and these are a GPU's: asm(...) and
// asm volatile(...) are read as nothing.
#define asm(...)
#define volatile(...) ("")

struct uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
float2 make_float2(float x, float y);
float4 make_float4(float x, float y, float z, float w);
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w);

namespace flexops::detail {
struct Index {
  unsigned x, y, z;
};
}  // namespace flexops::detail
extern const flexops::detail::Index threadIdx, blockIdx, blockDim, gridDim;

void __threadfence();
void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
size_t __cvta_generic_to_shared(const void* pointer);
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width);
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width);
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32);
template <typename T>
unsigned __match_any_sync(unsigned mask, T value);
template <typename T>
T __ldg(const T* pointer);
template <typename T>
T __ldcs(const T* pointer);
template <typename T>
void __stcs(T* pointer, T value);
template <typename T>
T atomicMax(T* pointer, T value);
template <typename T>
T atomicAdd(T* pointer, T value);
int __any_sync(unsigned mask, int predicate);
int min(int a, int b);
int max(int a, int b);
int __clz(int value);
int __popc(unsigned value);
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);
unsigned __umulhi(unsigned a, unsigned b);
float __fadd_rn(float a, float b);
float __fadd_rd(float a, float b);
float __fsub_rn(float a, float b);
float __fmul_rn(float a, float b);
float __fdiv_rn(float a, float b);
float __fdividef(float a, float b);
float __fmaf_rn(float a, float b, float c);
float __frcp_rn(float value);
float rsqrtf(float value);
float rintf(float value);
