// What flexops bench build edits: kernel, launch and binding in one file with torch's header, as many are.
#include <torch/extension.h>

template <typename T>
__global__ void scale_kernel(const T* x, T* out, float factor, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * factor + EDITED);
}

torch::Tensor scale(torch::Tensor x, double factor) {
  auto out = torch::empty_like(x);
  const int64_t n = x.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "scale", [&] {
    scale_kernel<scalar_t><<<(n + 255) / 256, 256>>>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), static_cast<float>(factor), n);
  });
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scale", &scale); }
