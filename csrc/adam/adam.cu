// Adam's launcher: packs tensors into as few launches as the kernel's parameters hold.

#include "adam/adam.cuh"

#include <math.h>

#include "adam/adam.h"

namespace flexops {
namespace {

using adam::Launch;
using adam::Steps;

constexpr uint32_t kMostBlocks = 1u << 30;

bool is_wide(AdamType type) { return type == AdamType::f32; }

adam::Shared make_shared(const AdamOptions& o) {
  adam::Shared s;
  s.lr_tensor = o.lr_tensor;
  s.grad_scale = o.grad_scale;
  s.found_inf = o.found_inf;
  s.lr = static_cast<float>(o.lr);
  s.log_beta1 = static_cast<float>(log(o.beta1));
  s.log_beta2 = static_cast<float>(log(o.beta2));
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.decoupled = o.decoupled;
  s.maximize = o.maximize;
  return s;
}

/// 16-bit data is read 8 bytes at a time, fp32 16 bytes; null is aligned.
bool is_aligned(const void* pointer, AdamType type) { return (reinterpret_cast<uintptr_t>(pointer) & (is_wide(type) ? 15 : 7)) == 0; }

uint8_t make_flags(const AdamTensor& t) {
  const bool aligned = is_aligned(t.param, t.param_type) && is_aligned(t.grad, t.grad_type) && is_aligned(t.exp_avg, AdamType::f32) &&
                       is_aligned(t.exp_avg_sq, AdamType::f32) && is_aligned(t.max_exp_avg_sq, AdamType::f32) &&
                       is_aligned(t.copy, t.copy_type);
  const auto flag = [](AdamType type, uint8_t wide, uint8_t bf16) -> int {
    return is_wide(type) ? wide : type == AdamType::bf16 ? bf16 : 0;
  };
  return static_cast<uint8_t>(flag(t.param_type, adam::kParamFloat, adam::kParamBf16) |
                              flag(t.grad_type, adam::kGradFloat, adam::kGradBf16) | flag(t.copy_type, adam::kCopyFloat, adam::kCopyBf16) |
                              (aligned ? adam::kAligned : 0));
}

bool is_general(const AdamTensor& t) { return !is_wide(t.param_type) || !is_wide(t.grad_type) || t.max_exp_avg_sq || t.copy; }

void increment_steps(const AdamTensor* tensors, int64_t count, const AdamOptions& options, cudaStream_t stream) {
  Steps steps;
  steps.found_inf = options.found_inf;
  for (int64_t done = 0; done < count; done += steps.count) {
    steps.count = static_cast<int>(count - done < Steps::kCapacity ? count - done : Steps::kCapacity);
    for (int i = 0; i < steps.count; ++i) steps.step[i] = tensors[done + i].step;
    adam::step_kernel<<<(steps.count + 127) / 128, 128, 0, stream>>>(steps);
  }
}

template <bool kGeneral>
void launch(Launch<kGeneral>& batch, cudaStream_t stream) {
  if (batch.count == 0) return;
  adam::adam_kernel<kGeneral><<<batch.first_chunk[batch.count], adam::kThreads, 0, stream>>>(batch);
  batch.count = 0;
}

/// The tensors that need the general kernel, or those that do not.
template <bool kGeneral>
void step_tensors(const AdamTensor* tensors, int64_t count, const AdamOptions& options, cudaStream_t stream) {
  Launch<kGeneral> batch;
  batch.shared = make_shared(options);
  batch.count = 0;
  batch.first_chunk[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const AdamTensor& t = tensors[i];
    if (t.numel == 0 || is_general(t) != kGeneral) continue;
    const auto chunks = static_cast<uint32_t>((t.numel + adam::kChunk - 1) / adam::kChunk);
    if (batch.count == Launch<kGeneral>::kCapacity || batch.first_chunk[batch.count] + chunks > kMostBlocks) launch(batch, stream);
    const int at = batch.count++;
    batch.first_chunk[at + 1] = batch.first_chunk[at] + chunks;
    batch.numel[at] = t.numel;
    batch.param[at] = t.param;
    batch.grad[at] = t.grad;
    batch.exp_avg[at] = t.exp_avg;
    batch.exp_avg_sq[at] = t.exp_avg_sq;
    batch.step[at] = t.step;
    batch.flags[at] = make_flags(t);
    if constexpr (kGeneral) {
      batch.max_exp_avg_sq[at] = t.max_exp_avg_sq;
      batch.copy[at] = t.copy;
    }
  }
  launch(batch, stream);
}

}  // namespace

const char* adam_cuda(const AdamTensor* tensors, int64_t count, const AdamOptions& options, void* stream) {
  if (count == 0) return nullptr;
  const auto on = static_cast<cudaStream_t>(stream);
  increment_steps(tensors, count, options, on);
  step_tensors<false>(tensors, count, options, on);
  step_tensors<true>(tensors, count, options, on);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flexops
