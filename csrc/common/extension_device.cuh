// What device code of a user's `.cu` finds without its host headers, where NVRTC compiles it
// (flexops/build/describe/cuda_source.py): the types, traits and limits of the standard library
// that kernels use, defined as the standard defines them, and what torch's own small headers (Half,
// BFloat16) include. It stands in for <cmath>, <limits>, <type_traits> and their like, which NVRTC
// has not.
#pragma once

#include "common/integers.cuh"

typedef unsigned int uint;
#ifndef INT16_C
#define INT16_C(value) value
#endif
#ifndef INT32_C
#define INT32_C(value) value
#endif
#ifndef UINT8_C
#define UINT8_C(value) value
#endif
#ifndef UINT16_C
#define UINT16_C(value) value
#endif
#ifndef UINT32_C
#define UINT32_C(value) value##U
#endif
#ifndef UINT64_C
#define UINT64_C(value) value##UL
#endif
#ifndef INT64_C
#define INT64_C(value) value##L
#endif

#define __builtin_clz(value) __clz(value)

#ifndef INT8_MAX
#define INT8_MAX 127
#endif
#ifndef INT16_MAX
#define INT16_MAX 32767
#endif
#ifndef INT_MAX
#define INT_MAX 2147483647
#endif
#ifndef INT_MIN
#define INT_MIN (-INT_MAX - 1)
#endif
#ifndef UINT_MAX
#define UINT_MAX 4294967295U
#endif
#ifndef LONG_MAX
#define LONG_MAX 9223372036854775807L
#endif
#ifndef LONG_MIN
#define LONG_MIN (-LONG_MAX - 1L)
#endif
#ifndef LLONG_MAX
#define LLONG_MAX 9223372036854775807LL
#endif
#ifndef INT32_MAX
#define INT32_MAX INT_MAX
#endif
#ifndef INT32_MIN
#define INT32_MIN INT_MIN
#endif
#ifndef UINT32_MAX
#define UINT32_MAX UINT_MAX
#endif
#ifndef INT64_MAX
#define INT64_MAX LONG_MAX
#endif
#ifndef INT64_MIN
#define INT64_MIN LONG_MIN
#endif
#ifndef FLT_MAX
#define FLT_MAX 3.40282346638528859811704183484516925e+38F
#endif
#ifndef FLT_MIN
#define FLT_MIN 1.17549435082228750796873653722224568e-38F
#endif
#ifndef FLT_EPSILON
#define FLT_EPSILON 1.19209289550781250000000000000000000e-7F
#endif
#ifndef DBL_MAX
#define DBL_MAX 1.79769313486231570814527423731704357e+308
#endif
#ifndef DBL_MIN
#define DBL_MIN 2.22507385850720138309023271733240406e-308
#endif
#ifndef DBL_EPSILON
#define DBL_EPSILON 2.22044604925031308084726333618164062e-16
#endif
#ifndef INFINITY
#define INFINITY (__int_as_float(0x7f800000))
#endif
#ifndef NAN
#define NAN (__int_as_float(0x7fc00000))
#endif
#ifndef M_E
#define M_E 2.7182818284590452354
#endif
#ifndef M_LOG2E
#define M_LOG2E 1.4426950408889634074
#endif
#ifndef M_LOG10E
#define M_LOG10E 0.43429448190325182765
#endif
#ifndef M_LN2
#define M_LN2 0.69314718055994530942
#endif
#ifndef M_LN10
#define M_LN10 2.30258509299404568402
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif
#ifndef M_PI_2
#define M_PI_2 1.57079632679489661923
#endif
#ifndef M_PI_4
#define M_PI_4 0.78539816339744830962
#endif
#ifndef M_1_PI
#define M_1_PI 0.31830988618379067154
#endif
#ifndef M_2_PI
#define M_2_PI 0.63661977236758134308
#endif
#ifndef M_2_SQRTPI
#define M_2_SQRTPI 1.12837916709551257390
#endif
#ifndef M_SQRT2
#define M_SQRT2 1.41421356237309504880
#endif
#ifndef M_SQRT1_2
#define M_SQRT1_2 0.70710678118654752440
#endif

// C++'s names of what every source under torch sees.
namespace c10 {}
namespace at {
namespace cuda {  // of ATen/cuda/ApplyGridUtils.cuh
template <typename T>
__host__ __device__ __forceinline__ T ATenCeilDiv(T a, T b) {
  return (a + b - 1) / b;
}
}  // namespace cuda
using namespace c10;
}  // namespace at
namespace torch {
using namespace at;
}

namespace std {
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using size_t = decltype(sizeof(0));
using ::memcpy;
class ostream;
__host__ __device__ ostream& operator<<(ostream&, float);

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  __host__ __device__ constexpr operator T() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};
template <class T, class U>
inline constexpr bool is_same_v = is_same<T, U>::value;
template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool, class T, class U>
struct conditional {
  using type = T;
};
template <class T, class U>
struct conditional<false, T, U> {
  using type = U;
};
template <bool b, class T, class U>
using conditional_t = typename conditional<b, T, U>::type;

template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};
template <class T>
struct remove_volatile {
  using type = T;
};
template <class T>
struct remove_volatile<volatile T> {
  using type = T;
};
template <class T>
struct remove_cv {
  using type = typename remove_const<typename remove_volatile<T>::type>::type;
};
template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
struct remove_reference<T&&> {
  using type = T;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

namespace flexops_detail {
template <class T>
struct is_integral : false_type {};
template <class T>
struct is_floating_point : false_type {};
#define FLEXOPS_IS(trait, type) \
  template <>                   \
  struct trait<type> : true_type {}
FLEXOPS_IS(is_integral, bool);
FLEXOPS_IS(is_integral, char);
FLEXOPS_IS(is_integral, signed char);
FLEXOPS_IS(is_integral, unsigned char);
FLEXOPS_IS(is_integral, short);
FLEXOPS_IS(is_integral, unsigned short);
FLEXOPS_IS(is_integral, int);
FLEXOPS_IS(is_integral, unsigned int);
FLEXOPS_IS(is_integral, long);
FLEXOPS_IS(is_integral, unsigned long);
FLEXOPS_IS(is_integral, long long);
FLEXOPS_IS(is_integral, unsigned long long);
FLEXOPS_IS(is_floating_point, float);
FLEXOPS_IS(is_floating_point, double);
#undef FLEXOPS_IS
template <class T, class U>
struct is_mixed
    : integral_constant<bool, (is_integral<T>::value || is_floating_point<T>::value) &&
                                  (is_integral<U>::value || is_floating_point<U>::value) &&
                                  !(is_same<T, U>::value && is_floating_point<T>::value)> {};
}  // namespace flexops_detail
template <class T>
struct is_integral : flexops_detail::is_integral<remove_cv_t<T>> {};
template <class T>
struct is_floating_point : flexops_detail::is_floating_point<remove_cv_t<T>> {};
template <class T>
inline constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct is_trivially_copyable : integral_constant<bool, __is_trivially_copyable(T)> {};
template <class T>
inline constexpr bool is_trivially_copyable_v = is_trivially_copyable<T>::value;
template <class T, class... A>
struct is_trivially_constructible : integral_constant<bool, __is_trivially_constructible(T, A...)> {
};
template <class T, class... A>
inline constexpr bool is_trivially_constructible_v = is_trivially_constructible<T, A...>::value;
template <class T>
struct is_trivially_default_constructible
    : integral_constant<bool, __is_trivially_constructible(T)> {};
template <class T>
inline constexpr bool is_trivially_default_constructible_v =
    is_trivially_default_constructible<T>::value;

template <class T>
__host__ __device__ constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <class T>
__host__ __device__ constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}

enum float_denorm_style { denorm_indeterminate = -1, denorm_absent = 0, denorm_present = 1 };
enum float_round_style {
  round_indeterminate = -1,
  round_toward_zero = 0,
  round_to_nearest = 1,
  round_toward_infinity = 2,
  round_toward_neg_infinity = 3
};
template <class T>
struct numeric_limits {
  static constexpr bool is_specialized = false;
};
template <class T>
struct numeric_limits<const T> : numeric_limits<T> {};
#define FLEXOPS_LIMITS(T, least, lowest_, most, epsilon_, digits_, digits10_, is_signed_,          \
                       is_integer_, infinity_, nan_)                                               \
  template <>                                                                                      \
  struct numeric_limits<T> {                                                                       \
    static constexpr bool is_specialized = true, is_signed = is_signed_, is_integer = is_integer_, \
                          is_exact = is_integer_;                                                  \
    static constexpr bool has_infinity = !is_integer_, has_quiet_NaN = !is_integer_;               \
    static constexpr bool has_signaling_NaN = !is_integer_, has_denorm_loss = false,               \
                          is_iec559 = !is_integer_;                                                \
    static constexpr bool is_bounded = true, is_modulo = is_integer_ && !is_signed_,               \
                          tinyness_before = false;                                                 \
    static constexpr bool traps = is_integer_;                                                     \
    static constexpr float_denorm_style has_denorm = is_integer_ ? denorm_absent : denorm_present; \
    static constexpr float_round_style round_style =                                               \
        is_integer_ ? round_toward_zero : round_to_nearest;                                        \
    static constexpr int max_digits10 = is_integer_ ? 0 : digits_ == 24 ? 9 : 17;                  \
    static constexpr int digits = digits_, digits10 = digits10_, radix = 2;                        \
    __host__ __device__ static constexpr T min() { return least; }                                 \
    __host__ __device__ static constexpr T lowest() { return lowest_; }                            \
    __host__ __device__ static constexpr T max() { return most; }                                  \
    __host__ __device__ static constexpr T epsilon() { return epsilon_; }                          \
    __host__ __device__ static constexpr T infinity() { return infinity_; }                        \
    __host__ __device__ static constexpr T quiet_NaN() { return nan_; }                            \
  }
FLEXOPS_LIMITS(bool, false, false, true, false, 1, 0, false, true, false, false);
FLEXOPS_LIMITS(char, -128, -128, 127, 0, 7, 2, true, true, 0, 0);
FLEXOPS_LIMITS(signed char, -128, -128, 127, 0, 7, 2, true, true, 0, 0);
FLEXOPS_LIMITS(unsigned char, 0, 0, 255, 0, 8, 2, false, true, 0, 0);
FLEXOPS_LIMITS(short, -32768, -32768, 32767, 0, 15, 4, true, true, 0, 0);
FLEXOPS_LIMITS(unsigned short, 0, 0, 65535, 0, 16, 4, false, true, 0, 0);
FLEXOPS_LIMITS(int, INT_MIN, INT_MIN, INT_MAX, 0, 31, 9, true, true, 0, 0);
FLEXOPS_LIMITS(unsigned int, 0, 0, UINT_MAX, 0, 32, 9, false, true, 0, 0);
FLEXOPS_LIMITS(long, LONG_MIN, LONG_MIN, LONG_MAX, 0, 63, 18, true, true, 0, 0);
FLEXOPS_LIMITS(unsigned long, 0, 0, ~0UL, 0, 64, 19, false, true, 0, 0);
FLEXOPS_LIMITS(long long, -LLONG_MAX - 1, -LLONG_MAX - 1, LLONG_MAX, 0, 63, 18, true, true, 0, 0);
FLEXOPS_LIMITS(unsigned long long, 0, 0, ~0ULL, 0, 64, 19, false, true, 0, 0);
FLEXOPS_LIMITS(float, FLT_MIN, -FLT_MAX, FLT_MAX, FLT_EPSILON, 24, 6, true, false,
               __builtin_bit_cast(float, 0x7f800000), __builtin_bit_cast(float, 0x7fc00000));
FLEXOPS_LIMITS(double, DBL_MIN, -DBL_MAX, DBL_MAX, DBL_EPSILON, 53, 15, true, false,
               __builtin_bit_cast(double, 0x7ff0000000000000),
               __builtin_bit_cast(double, 0x7ff8000000000000));
#undef FLEXOPS_LIMITS
}  // namespace std

// What <cmath> says of whole numbers and of two types at once: they are computed as double. NVRTC
// has the functions of two floats and of two doubles alone; and its pow(x, int), which is another
// function than C++'s, and less exact in float.
#define FLEXOPS_UNARY(f)                                                                      \
  template <class T>                                                                          \
  __host__ __device__ std::enable_if_t<std::flexops_detail::is_integral<T>::value, double> f( \
      T x) {                                                                                  \
    return f(static_cast<double>(x));                                                         \
  }                                                                                           \
  namespace std {                                                                             \
  using ::f;                                                                                  \
  }
#define FLEXOPS_BINARY(f)                                                                     \
  template <class T, class U>                                                                 \
  __host__ __device__ std::enable_if_t<std::flexops_detail::is_mixed<T, U>::value, double> f( \
      T x, U y) {                                                                             \
    return f(static_cast<double>(x), static_cast<double>(y));                                 \
  }                                                                                           \
  namespace std {                                                                             \
  using ::f;                                                                                  \
  }
#if !defined(FLEXOPS_NO_MATHEMATICS)
// In C++ these are bool; NVRTC's are int.
#define FLEXOPS_PREDICATE(f)                                                             \
  __host__ __device__ __forceinline__ bool flexops_##f(float x) { return f(x) != 0; }    \
  __host__ __device__ __forceinline__ bool flexops_##f(double x) { return f(x) != 0; }   \
  template <class T>                                                                     \
  __host__ __device__ std::enable_if_t<std::flexops_detail::is_integral<T>::value, bool> \
  flexops_##f(T x) {                                                                     \
    return f(static_cast<double>(x)) != 0;                                               \
  }                                                                                      \
  namespace std {                                                                        \
  using ::flexops_##f;                                                                   \
  }
FLEXOPS_PREDICATE(isnan)
FLEXOPS_PREDICATE(isinf)
FLEXOPS_PREDICATE(isfinite)
FLEXOPS_PREDICATE(signbit)
#undef FLEXOPS_PREDICATE
#define isnan flexops_isnan
#define isinf flexops_isinf
#define isfinite flexops_isfinite
#define signbit flexops_signbit
__host__ __device__ __forceinline__ float flexops_pow(float x, float y) { return powf(x, y); }
__host__ __device__ __forceinline__ double flexops_pow(double x, double y) { return pow(x, y); }
#define pow flexops_pow
#endif
// clang-format off
FLEXOPS_UNARY(acos) FLEXOPS_UNARY(acosh) FLEXOPS_UNARY(asin) FLEXOPS_UNARY(asinh) FLEXOPS_UNARY(atan) FLEXOPS_UNARY(atanh)
FLEXOPS_UNARY(cbrt) FLEXOPS_UNARY(ceil) FLEXOPS_UNARY(cos) FLEXOPS_UNARY(cosh) FLEXOPS_UNARY(erf) FLEXOPS_UNARY(erfc) FLEXOPS_UNARY(exp)
FLEXOPS_UNARY(exp2) FLEXOPS_UNARY(expm1) FLEXOPS_UNARY(fabs) FLEXOPS_UNARY(floor) FLEXOPS_UNARY(lgamma) FLEXOPS_UNARY(log)
FLEXOPS_UNARY(log10) FLEXOPS_UNARY(log1p) FLEXOPS_UNARY(log2) FLEXOPS_UNARY(logb) FLEXOPS_UNARY(nearbyint) FLEXOPS_UNARY(rint)
FLEXOPS_UNARY(round) FLEXOPS_UNARY(sin) FLEXOPS_UNARY(sinh) FLEXOPS_UNARY(sqrt) FLEXOPS_UNARY(tan) FLEXOPS_UNARY(tanh)
FLEXOPS_UNARY(tgamma) FLEXOPS_UNARY(trunc) FLEXOPS_BINARY(atan2) FLEXOPS_BINARY(copysign) FLEXOPS_BINARY(fdim) FLEXOPS_BINARY(fmax)
FLEXOPS_BINARY(fmin) FLEXOPS_BINARY(fmod) FLEXOPS_BINARY(hypot) FLEXOPS_BINARY(nextafter) FLEXOPS_BINARY(remainder)
#if !defined(FLEXOPS_NO_MATHEMATICS)
FLEXOPS_BINARY(flexops_pow)
#endif
#undef FLEXOPS_UNARY
#undef FLEXOPS_BINARY

namespace std {
using ::abs;
using ::fma;
using ::ilogb;
using ::ldexp;
using ::llrint;
using ::llround;
using ::lrint;
using ::lround;
using ::scalbn;
}  // namespace std
// clang-format on
