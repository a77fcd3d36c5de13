// What the host's half of a user's `.cu` calls where NVRTC compiles the device's
// (flexops/build/describe/cuda_source.py): a kernel's body is launch<Stub>(arguments...), and
// `k<<<grid, block, bytes, stream>>>(x)` is `(Configured(grid, block, bytes, stream), k(x))`, as
// nvcc has it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>  // warpSize, in default arguments of device functions
#include <dlfcn.h>
#include <math.h>  // C++'s, which has exp(float) outside of std, too, as nvcc has
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <typeinfo>

// Nothing of this may be shared between two libraries of one process: each has its own kernels.
#pragma GCC visibility push(hidden)

#define FLEXOPS_CUDACC 1
#define FLEXOPS_CUDACC_VER_MAJOR (CUDART_VERSION / 1000)
#define FLEXOPS_CUDACC_VER_MINOR (CUDART_VERSION % 1000 / 10)
#define FLEXOPS_EXTENSION 1
#include "common/launch.h"

namespace flexops_extension {

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  bool set = false;
};
inline thread_local Configuration next;

/// A type that is local to a kernel: its name has the kernel's in it, mangled, and the number of
/// its source.
template <class Stub>
const char* name() {
  return typeid(Stub).name();
}
template <class Stub>
inline flexops::Kernel instance = {name<Stub>, {}, 0, 0};

[[noreturn, gnu::cold]] inline void fail(const char* kernel, const char* what) {
  throw std::runtime_error(std::string("a kernel could not be launched: ") + what + " (" + kernel +
                           ")");
}

/// Lives as long as the launch's expression does: what computes its arguments may launch kernels,
/// too.
class Configured {
 public:
  explicit Configured(dim3 grid, dim3 block, size_t shared_bytes = 0,
                      cudaStream_t stream = nullptr) {
    next = {grid, block, shared_bytes, stream, true};
  }
  Configured(const Configured&) = delete;
  ~Configured() noexcept(false) {
    const bool launched = !next.set;
    next = before;
    if (!launched && std::uncaught_exceptions() == exceptions)
      fail("<<<grid, block>>>",
           "what it calls is no kernel that flexops has read: it ran on the host");
  }

 private:
  const Configuration before = next;
  const int exceptions = std::uncaught_exceptions();
};

/// Has flexops give its kernels to a library that Python opened, from a wheel
/// (flexops/build/load/extension_installed.py).
[[gnu::noinline, gnu::cold]] inline void attach() {
  const auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  const auto release = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  const auto run =
      reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  Dl_info self;
  if (!ensure || !release || !run || !dladdr(&flexops::detail::provider, &self)) return;
  const std::string program =
      std::string(
          "__import__('flexops.build.load.extension_installed', fromlist=['attach'])"
          ".attach(r'''") +
      self.dli_fname + "''')\n";
  const int state = ensure();
  run(program.c_str());
  release(state);
}

template <class Stub, typename... A>
void launch(const A&... arguments) {
  if (!flexops::detail::provider) attach();
  if (!next.set) fail(name<Stub>(), "a kernel is called by <<<grid, block>>>");
  next.set = false;
  void* pointers[] = {
      const_cast<void*>(static_cast<const volatile void*>(std::addressof(arguments)))..., nullptr};
  const flexops::LaunchConfig config = {{next.grid.x, next.grid.y, next.grid.z},
                                        {next.block.x, next.block.y, next.block.z},
                                        next.stream,
                                        static_cast<int64_t>(next.shared_bytes)};
  flexops::detail::start(instance<Stub>, config, pointers);
  if (const char* error = flexops::last_error()) fail(name<Stub>(), error);
}

/// cudaFuncSetAttribute of a kernel. Each launch is given the shared memory that it asks for, if
/// the GPU has so much; how a multiprocessor's memory is divided is left to the driver.
template <typename F>
cudaError_t set_attribute(F*, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  int most = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                   flexops::current_gpu());
  return error != cudaSuccess ? error : value <= most ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flexops_extension

// What nvcc alone fills for host code.
namespace cooperative_groups {}

// <curand_kernel.h> names it in templates. Nothing defines it: a use on the host does not link.
template <typename T>
T __ldg(const T*);

// nvcc gives host code these, too, of these types; of two floating point numbers the one that is no
// NaN.
#define FLEXOPS_MIN_MAX(A, B, R)                                                          \
  inline R min(const A a, const B b) {                                                    \
    return static_cast<R>(b) < static_cast<R>(a) ? static_cast<R>(b) : static_cast<R>(a); \
  }                                                                                       \
  inline R max(const A a, const B b) {                                                    \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); \
  }
#define FLEXOPS_MIN_MAX_WHOLE(T)                      \
  FLEXOPS_MIN_MAX(T, T, T)                            \
  FLEXOPS_MIN_MAX(unsigned T, unsigned T, unsigned T) \
  FLEXOPS_MIN_MAX(T, unsigned T, unsigned T)          \
  FLEXOPS_MIN_MAX(unsigned T, T, unsigned T)
#define FLEXOPS_MIN_MAX_REAL(A, B, R, f)                            \
  inline R min(const A a, const B b) {                              \
    return __builtin_fmin##f(static_cast<R>(a), static_cast<R>(b)); \
  }                                                                 \
  inline R max(const A a, const B b) {                              \
    return __builtin_fmax##f(static_cast<R>(a), static_cast<R>(b)); \
  }
FLEXOPS_MIN_MAX_WHOLE(int)
FLEXOPS_MIN_MAX_WHOLE(long)
FLEXOPS_MIN_MAX_WHOLE(long long)
FLEXOPS_MIN_MAX_REAL(float, float, float, f)
FLEXOPS_MIN_MAX_REAL(double, double, double, )
FLEXOPS_MIN_MAX_REAL(float, double, double, )
FLEXOPS_MIN_MAX_REAL(double, float, double, )
// glibc's own are of double alone, nvcc's of float, too.
inline float exp10(float x) { return exp10f(x); }
inline float j0(float x) { return j0f(x); }
inline float j1(float x) { return j1f(x); }
inline float jn(int n, float x) { return jnf(n, x); }
inline float y0(float x) { return y0f(x); }
inline float y1(float x) { return y1f(x); }
inline float yn(int n, float x) { return ynf(n, x); }
#undef FLEXOPS_MIN_MAX
#undef FLEXOPS_MIN_MAX_WHOLE
#undef FLEXOPS_MIN_MAX_REAL

#pragma GCC visibility pop

#undef __global__
#define __global__ __attribute__((visibility("hidden")))
// What stands at kernels and says nothing to the host: CUDA's and torch's headers keep these for
// nvcc.
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __maxnreg__
#define __maxnreg__(...)
#endif
#define C10_LAUNCH_BOUNDS_0
#define C10_LAUNCH_BOUNDS_1(...)
#define C10_LAUNCH_BOUNDS_2(...)
