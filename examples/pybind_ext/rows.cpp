// An extension as people have them: torch's headers, pybind11. Nothing in it is of flexops.
#include <torch/extension.h>

/// The sum of each row, in float64.
torch::Tensor row_sums(const torch::Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "row_sums: x must have two dimensions");
  return x.to(torch::kFloat64).sum(1);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("row_sums", &row_sums, "The sum of each row"); }
