// Which device type a library is for. Launchers, CPU kernels and bindings that are written by hand
// are compiled for one, and FLEXOPS_DEVICE_CPU or FLEXOPS_DEVICE_CUDA is defined to 1 by the
// command. Bindings that flexops writes for its own operators are compiled once for both, but by
// zig (FLEXOPS_DEVICE_ANY): FLEXOPS_DEVICE_CUDA is then what the linker says (`if`; an `#if` of it
// is an error), and of launchers, which are declared by
//
//   FLEXOPS_CUDA_DECLARE(const char* scale_cuda(const float* x, float* out, int64_t count, void*
//   stream))     and, in common/cpu.h, FLEXOPS_ISA_DECLARE(void scale_cpu(const float* x, float*
//   out, int64_t begin, int64_t end))
//
// each library has one device type's.
#pragma once

#if defined(FLEXOPS_DEVICE_ANY)

// The link's command makes flexops_on_cuda another name of flexops_yes or flexops_no, and defines
// one of the other two, which nothing but stand-ins for launchers use. A stand-in gives way to the
// launcher (weak), and the linker drops it; one that stays, because its launcher is not there, is
// an undefined reference in a library of that device type (build/plan/plan.py).
extern "C" {
[[gnu::visibility("hidden")]] extern const bool flexops_on_cuda, flexops_without_cuda,
    flexops_without_cpu;
[[gnu::visibility("hidden"), gnu::used]] inline const bool flexops_no = false, flexops_yes = true;
}

namespace flexops::detail {
[[noreturn]] void not_in_this_library(const bool& without);
}

#define FLEXOPS_DEVICE_CUDA ::flexops_on_cuda
#define FLEXOPS_DEVICE_CPU (!::flexops_on_cuda)
#define FLEXOPS_CUDA_DECLARE(...) \
  [[gnu::weak]] __VA_ARGS__ { ::flexops::detail::not_in_this_library(::flexops_without_cuda); }
#define FLEXOPS_CPU_DECLARE(...) \
  [[gnu::weak]] __VA_ARGS__ { ::flexops::detail::not_in_this_library(::flexops_without_cpu); }

#else

#if !defined(FLEXOPS_DEVICE_CPU)
#define FLEXOPS_DEVICE_CPU 0
#endif
#if !defined(FLEXOPS_DEVICE_CUDA)
#define FLEXOPS_DEVICE_CUDA 0
#endif
#define FLEXOPS_CUDA_DECLARE(...) __VA_ARGS__;
#define FLEXOPS_CPU_DECLARE(...) __VA_ARGS__;

#endif
