// What the launchers of activations share.
#pragma once

#include "activation/activation.cuh"
#include "activation/activation.h"
#include "common/launch.h"

namespace flexops::activation {

template <typename T>
void advance(T*& pointer, int64_t bytes) {
  if (pointer)
    pointer = static_cast<T*>(
        static_cast<char*>(const_cast<void*>(static_cast<const void*>(pointer))) + bytes);
}

inline Function function_of(Activation which) {
  if (which == Activation::silu) return {1.0f, 0.0f, false};
  if (which == Activation::gelu_quick) return {1.702f, 0.0f, false};
  if (which == Activation::relu2) return {0.0f, 0.0f, false, true};
  return {1.595769122f, 0.07135481627f,
          which == Activation::gelu_erf};  // 2 sqrt(2 / pi), and 0.044715 of it
}
/// By the number that operators have for it.
inline Function function_of(int64_t number) {
  return function_of(number == 0   ? Activation::silu
                     : number == 1 ? Activation::gelu_erf
                                   : Activation::gelu_tanh);
}

/// Launches a kernel of `activation::Walk` for all rows, in pieces that 32 bits can count.
/// move(part, rows) moves its pointers that far down.
template <typename P, typename Move>
void launch_rows(const KernelOf<P>& kernel, P p, int64_t rows, int64_t vectors, int most,
                 const Move& move, void* stream) {
  constexpr int64_t kMost = int64_t{1} << 30, kFew = 1 << 17;  // threads
  const int64_t across = p.flat ? 1 : vectors, piece = kMost / across;
  p.vectors = make_divisor(across);
  p.take = static_cast<u32>(
      rows * across / most < kFew ? 1 : most);  // fewer would leave much of the GPU idle
  for (; rows > 0; rows -= piece, move(p, piece)) {
    p.rows = static_cast<u32>(rows < piece ? rows : piece);
    launch(kernel,
           {blocks(ceil_div(ceil_div(p.rows, p.take) * across, kThreads)), {kThreads}, stream}, p);
  }
}

constexpr int64_t kLongestRow = int64_t{1} << 30;
constexpr const char* kTooLong =
    "rows of more than 2^30 elements must follow each other without gaps";

/// A kernel that takes vectors of elements, and one that takes single ones, for each type.
template <typename P>
struct Kernels {
  KernelOf<P> vectors[3], elements[3];

  const KernelOf<P>& of(bool by_vectors, ElementType type) const {
    return (by_vectors ? vectors : elements)[static_cast<int>(type)];
  }
};

}  // namespace flexops::activation
