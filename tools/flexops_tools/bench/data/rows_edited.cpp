// What flexops bench build edits: an ordinary pybind11 binding.
#include <torch/extension.h>

#include <vector>

// Rows of x, each divided by its largest magnitude; edit EDITED.
std::vector<torch::Tensor> normalize(torch::Tensor x, double eps) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.dim(), " dimensions");
  const auto largest = x.abs().amax(1, /*keepdim=*/true).clamp_min(eps + EDITED * 1e-9);
  return {x / largest, largest};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("normalize", &normalize, "rows by their largest magnitude", py::arg("x"), py::arg("eps") = 1e-6); }
