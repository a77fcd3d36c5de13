// Choosing a CPU kernel's instruction set at run time.
//
// Every <op>_cpu.cpp is compiled once per level with FLEXOPS_ISA defined to baseline, avx2 or
// avx512 and the matching -m flags, and puts everything it defines into that namespace:
//
//   scale.h:        FLEXOPS_ISA_DECLARE(void scale_cpu(const float* x, float* out, int64_t begin,
//                                                      int64_t end))
//   scale_cpu.cpp:  namespace flexops::FLEXOPS_ISA { void scale_cpu(const float* x, ...) {...} }
//   binding:        FLEXOPS_ISA_CALL(scale_cpu)(x, out, begin, end)
//
// One-definition rule: an inline function that is compiled under different -m flags must live in
// the level's namespace (or be static), or the linker may keep the AVX-512 one for all levels. So
// *_cpu.cpp files include no C++ standard header with templates or inline functions that they use
// (cpu_math.h has what kernels need, per level); C headers such as <stdint.h> and <string.h> are
// fine. <math.h> takes longer to compile than most kernels: __builtin_expf and the like do without
// it.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/device_type.h"

namespace flexops {

enum class Isa { baseline, avx2, avx512 };

#if defined(__x86_64__)
#define FLEXOPS_HAS_ISA_LEVELS 1
#define FLEXOPS_ISA_DECLARE(...)   \
  namespace baseline {             \
  FLEXOPS_CPU_DECLARE(__VA_ARGS__) \
  }                                \
  namespace avx2 {                 \
  FLEXOPS_CPU_DECLARE(__VA_ARGS__) \
  }                                \
  namespace avx512 {               \
  FLEXOPS_CPU_DECLARE(__VA_ARGS__) \
  }
#define FLEXOPS_ISA_CALL(function)                                   \
  (::flexops::cpu_isa() == ::flexops::Isa::avx512 ? avx512::function \
   : ::flexops::cpu_isa() == ::flexops::Isa::avx2 ? avx2::function   \
                                                  : baseline::function)
#else  // elsewhere there is one level, the compiler's default
#define FLEXOPS_HAS_ISA_LEVELS 0
#define FLEXOPS_ISA_DECLARE(...)   \
  namespace baseline {             \
  FLEXOPS_CPU_DECLARE(__VA_ARGS__) \
  }
#define FLEXOPS_ISA_CALL(function) (baseline::function)
#endif

#if !defined(FLEXOPS_ISA) && !defined(__CUDACC__) && \
    !defined(__HIPCC__)  // the binding's part: neither kernels nor launchers ask

namespace detail {
/// The best level of this CPU that is not above the limit, if there is one.
inline Isa detect_isa([[maybe_unused]] const char* limit) {
#if FLEXOPS_HAS_ISA_LEVELS
  const bool no_avx512 = limit && (!strcmp(limit, "avx2") || !strcmp(limit, "baseline"));
  const bool no_avx2 = limit && !strcmp(limit, "baseline");
  __builtin_cpu_init();  // the checks below include the operating system's support for the
                         // registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && !no_avx512) return Isa::avx512;
  if (avx2 && !no_avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}
}  // namespace detail

/// The level that calls run, found once: the best of this CPU, FLEXOPS_CPU_ISA being an upper bound
/// (flexops/settings.py checks it).
inline Isa& cpu_isa() {
  static Isa isa = detail::detect_isa(getenv("FLEXOPS_CPU_ISA"));
  return isa;
}

/// The same for tests, which run every level in one process: a limit changes it.
extern "C" [[gnu::used, gnu::visibility("default")]] inline int flexops_cpu_isa(const char* limit) {
  if (limit) cpu_isa() = detail::detect_isa(limit);
  return static_cast<int>(cpu_isa());
}

#endif

}  // namespace flexops
