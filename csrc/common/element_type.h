// The types of elements, as bindings, launchers, CPU kernels and device code tell them: the one
// enumeration of them. Includes nothing, because NVRTC has nothing at hand.
#pragma once

namespace flexops {

/// The dtypes that ops tell apart; everything else is `other`, and no tensor at all `none`.
enum class Dtype : unsigned char {
  f32,
  f16,
  bf16,
  f64,
  u8,
  i8,
  i16,
  i32,
  i64,
  boolean,
  e4m3,
  e5m2,
  other,
  none
};

/// The first three of them, which kernels compute with.
enum class ElementType : unsigned char { f32, f16, bf16 };

#if !defined(__CUDACC_RTC__)
/// Bytes of one element.
[[gnu::always_inline]] inline constexpr int element_size(ElementType type) {
  return type == ElementType::f32 ? 4 : 2;
}
#endif

}  // namespace flexops
