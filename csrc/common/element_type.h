// The types of elements that operators take, as launchers, bindings, CPU kernels and device code tell them: the one enumeration of them.
// Includes nothing, because NVRTC has nothing at hand.
#pragma once

namespace flexops {

/// The first three of Dtype (common/tensor_view.h), with the same values.
enum class ElementType : unsigned char { f32, f16, bf16 };

#if !defined(__CUDACC_RTC__)
/// Bytes of one element.
[[gnu::always_inline]] inline constexpr int element_size(ElementType type) { return type == ElementType::f32 ? 4 : 2; }
#endif

}  // namespace flexops
