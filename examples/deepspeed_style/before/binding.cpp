#include <ATen/cuda/CUDAContext.h>
#include <torch/extension.h>

void launch_softcap(const void* x, void* out, float cap, int64_t count, int dtype, cudaStream_t stream);

torch::Tensor softcap(const torch::Tensor& x, double cap) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "softcap: x must be a contiguous CUDA tensor");
  torch::Tensor out = torch::empty_like(x);
  const int dtype = x.scalar_type() == torch::kFloat ? 0 : x.scalar_type() == torch::kHalf ? 1 : 2;
  launch_softcap(x.data_ptr(), out.data_ptr(), static_cast<float>(cap), x.numel(), dtype, at::cuda::getCurrentCUDAStream());
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("softcap", &softcap, "cap * tanh(x / cap)"); }
