// The intrinsics that CPU kernels use; for cpu_math.h.
#pragma once

// GCC 12 spends half a second and more with <immintrin.h>, mostly on AVX-512's extensions and
// whatever the level. So it gets the parts that are used, which want to be told that it is that
// header that includes them.
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
#define _IMMINTRIN_H_INCLUDED
// clang-format off: each needs those before it
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>
// clang-format on
#if defined(__AVX512F__)
#include <avx512fintrin.h>
#endif
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif
