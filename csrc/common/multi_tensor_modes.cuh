// What the kernels of an optimizer whose averages may be of 16 bits share: which types a launch
// has, and how averages in bf16 are rounded.
#pragma once

#include "common/multi_tensor.cuh"
#include "common/stochastic.h"

namespace flexops::multi {

/// The types of parameters, gradients and averages. All fp32, or all bf16, is what most people run;
/// gradients of bf16, or those and parameters, with the rest of fp32 are for those who keep it so,
/// as is a copy of fp32 parameters. All else is told array by array.
enum class Mode { f32, bf16, bf16_grad, bf16_average_f32, bf16_copy, mixed };

__host__ __device__ constexpr Data data_of(Mode mode) {
  return mode == Mode::mixed ? Data::mixed : mode == Mode::f32 ? Data::f32 : Data::bf16;
}

/// Whether averages may be of bf16.
__host__ __device__ constexpr bool is_random(Mode mode) {
  return mode == Mode::bf16 || mode == Mode::mixed;
}

/// The key of a step's random numbers.
FLEXOPS_DEVICE u32 key_of(const float* step) {
  return step ? scramble(static_cast<u32>(*step)) : 0;
}

/// Rounds array k, if it is of bf16, by 16 bits of `noise`: what is left to put() to round is exact
/// then; other types are not touched.
template <class Rule>
FLEXOPS_DEVICE void round_average(Element<Rule>& e, const Pointers<Rule>& p, int k, u32 noise) {
  if (p.is_bf16(k))
    e.at[k] = bit_cast<float>(round_to_bf16(bit_cast<u32>(e.at[k]), noise & 0xffffu));
}

}  // namespace flexops::multi
