// One step of Adam or AdamW on lists of tensors, written as CUDA extensions usually are: kernel, launcher and torch/extension.h in one file.
// What flexops is measured against; flexops itself does not use it. It includes no header of torch's CUDA side (ATen/cuda/...), which most
// extensions do, so that it also compiles where torch is a CPU build; that makes it lighter than what it stands for.
#include <cuda_runtime.h>
#include <torch/extension.h>

#include <vector>

namespace {

constexpr int kThreads = 512;
constexpr int kElements = 4;
constexpr int kChunk = 65536;
constexpr int kTensors = 30;

struct Batch {
  void* param[kTensors];
  void* grad[kTensors];
  float* exp_avg[kTensors];
  float* exp_avg_sq[kTensors];
  float* max_exp_avg_sq[kTensors];
  at::BFloat16* copy[kTensors];
  const float* step[kTensors];
  int64_t numel[kTensors];
  int first_block[kTensors + 1];
  int count;
};

struct Options {
  float lr, beta1, beta2, eps, weight_decay;
  bool maximize, decoupled;
  const float* grad_scale;
  const float* found_inf;
};

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) adam_kernel(Batch batch, Options options) {
  if (options.found_inf && *options.found_inf != 0.0f) return;
  int tensor = 0;
  while (batch.first_block[tensor + 1] <= static_cast<int>(blockIdx.x)) ++tensor;
  const int64_t begin = static_cast<int64_t>(blockIdx.x - batch.first_block[tensor]) * kChunk;
  const int64_t end = min(begin + kChunk, batch.numel[tensor]);
  scalar_t* param = static_cast<scalar_t*>(batch.param[tensor]);
  scalar_t* grad = static_cast<scalar_t*>(batch.grad[tensor]);
  float* max_exp_avg_sq = batch.max_exp_avg_sq[tensor];
  const float step = *batch.step[tensor] + 1.0f;
  const float step_size = options.lr / (1.0f - powf(options.beta1, step));
  const float bias2 = sqrtf(1.0f - powf(options.beta2, step));
  for (int64_t base = begin + threadIdx.x; base < end; base += kThreads * kElements) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t at = base + i * kThreads;
      if (at >= end) continue;
      float p = static_cast<float>(param[at]);
      float g = static_cast<float>(grad[at]);
      if (options.grad_scale) {
        g /= *options.grad_scale;
        grad[at] = static_cast<scalar_t>(g);
      }
      if (options.maximize) g = -g;
      if (options.weight_decay != 0.0f) {
        if (options.decoupled) {
          p -= options.lr * options.weight_decay * p;
        } else {
          g += options.weight_decay * p;
        }
      }
      const float m = batch.exp_avg[tensor][at] = options.beta1 * batch.exp_avg[tensor][at] + (1.0f - options.beta1) * g;
      float v = batch.exp_avg_sq[tensor][at] = options.beta2 * batch.exp_avg_sq[tensor][at] + (1.0f - options.beta2) * g * g;
      if (max_exp_avg_sq) v = max_exp_avg_sq[at] = fmaxf(max_exp_avg_sq[at], v);
      p -= step_size * m / (sqrtf(v) / bias2 + options.eps);
      param[at] = static_cast<scalar_t>(p);
      if (batch.copy[tensor]) batch.copy[tensor][at] = static_cast<at::BFloat16>(p);
    }
  }
}

template <typename scalar_t>
void launch(Batch& batch, const Options& options) {
  if (batch.count > 0) adam_kernel<scalar_t><<<batch.first_block[batch.count], kThreads>>>(batch, options);
  batch.count = 0;
}

}  // namespace

void adam_step_cuda(std::vector<torch::Tensor> params, std::vector<torch::Tensor> grads, std::vector<torch::Tensor> exp_avgs,
                    std::vector<torch::Tensor> exp_avg_sqs, std::vector<torch::Tensor> max_exp_avg_sqs, std::vector<torch::Tensor> copies,
                    std::vector<torch::Tensor> steps, double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad,
                    bool maximize, bool decoupled, c10::optional<torch::Tensor> grad_scale, c10::optional<torch::Tensor> found_inf) {
  if (params.empty()) return;
  const Options options{static_cast<float>(lr),
                        static_cast<float>(beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(eps),
                        static_cast<float>(weight_decay),
                        maximize,
                        decoupled,
                        grad_scale ? grad_scale->data_ptr<float>() : nullptr,
                        found_inf ? found_inf->data_ptr<float>() : nullptr};
  const auto type = params[0].scalar_type();
  AT_DISPATCH_SWITCH(
      type, "adam_step",
      AT_DISPATCH_CASE_FLOATING_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, [&] {
        Batch batch{};
        for (size_t i = 0; i < params.size(); ++i) {
          TORCH_CHECK(params[i].scalar_type() == type && grads[i].scalar_type() == type, "all params and grads must have one dtype");
          const int at = batch.count++;
          batch.param[at] = params[i].data_ptr<scalar_t>();
          batch.grad[at] = grads[i].data_ptr<scalar_t>();
          batch.exp_avg[at] = exp_avgs[i].data_ptr<float>();
          batch.exp_avg_sq[at] = exp_avg_sqs[i].data_ptr<float>();
          batch.max_exp_avg_sq[at] = amsgrad ? max_exp_avg_sqs[i].data_ptr<float>() : nullptr;
          batch.copy[at] = copies.empty() ? nullptr : copies[i].data_ptr<at::BFloat16>();
          batch.step[at] = steps[i].data_ptr<float>();
          batch.numel[at] = params[i].numel();
          batch.first_block[at + 1] = batch.first_block[at] + static_cast<int>((params[i].numel() + kChunk - 1) / kChunk);
          if (batch.count == kTensors) launch<scalar_t>(batch, options);
        }
        launch<scalar_t>(batch, options);
      }));
  for (auto& step : steps) step += found_inf ? 1 - *found_inf : torch::ones_like(step);
  const cudaError_t error = cudaGetLastError();
  TORCH_CHECK(error == cudaSuccess, "adam_step: ", cudaGetErrorString(error));
}
