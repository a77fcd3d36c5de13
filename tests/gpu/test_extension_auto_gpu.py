"""``flexops.load`` of a `.cu` as it stands, by what it takes for it: what both compilers could take
for different things has one result."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import flexops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvcc_toolkit")]

SOURCE = """
#include <Python.h>
#include <cuda.h>
#include <cassert>
#include <cmath>
#include <limits>
#ifdef __NVCC__
#define BY_NVCC 1
#define HD __host__ __device__
#else
#define BY_NVCC 0
#define HD
#endif
#ifndef STEPS
#define STEPS 3
#endif
template <typename T>
HD T mixed(T x, int n) {
  T sum = 0;
  for (int i = 0; i < STEPS; i++) sum += min(x, T(n)) * T(0.25) + max(n, i) / T(7);
  return sum + (isnan(x) == true ? T(100) : T(0)) + signbit(x) + isinf(x) * 3 + isfinite(x);
}
__device__ int calls = 5;
__launch_bounds__(128) __global__ void numbers(const float* x, double* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  assert(n > 0);
  double* mine = out + 8 * i;
#if CUDA_VERSION >= 11000 && defined(__CUDA_ARCH__)
  mine[0] = mixed(x[i], i);
#endif
  mine[1] = mixed(double(x[i]), i);
  mine[2] = pow(x[i], 2) + exp(x[i]) + sqrt(i) + round(x[i]) + fmod(x[i], 0.7);
  mine[3] = BY_NVCC + calls;
  mine[4] = std::pow(double(x[i]), 3) + std::abs(x[i]) + abs(-i) + std::min(x[i], 1.f);
  mine[5] = fminf(x[i], std::numeric_limits<float>::epsilon()) + ldexpf(x[i], 3) + lround(x[i]);
  mine[6] = __expf(x[i]) + rsqrtf(fabsf(x[i]) + 1) + tanhf(x[i]) + x[i] / 3.f;
#ifdef __CUDA_ARCH__
  mine[7] = __CUDA_ARCH__ + STEPS;
#endif
}
static PyObject* run(PyObject*, PyObject* args) {
  unsigned long long x, out;
  int n;
  if (!PyArg_ParseTuple(args, "KKi", &x, &out, &n)) return nullptr;
  const float width = 127.f + n * 1e-7f;
  numbers<<<dim3(max(1, int(ceil(n / 128.f)))), min(int(ceil(exp(log(width)))), 128)>>>(reinterpret_cast<const float*>(x), reinterpret_cast<double*>(out), n);
  return PyFloat_FromDouble(mixed(0.3f, n) + sin(width) + exp10(0.1f) + min(width, 3.0) + j0(width) + BY_NVCC
#if CUDA_VERSION >= 12000
                            + 1000
#endif
  );
}
static PyMethodDef methods[] = {{"run", run, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "numbers", nullptr, -1, methods};
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""


def _results(module: types.ModuleType, n: int) -> tuple[float, torch.Tensor]:
    x = torch.randn(n, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 3
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    out = torch.zeros(n, 8, dtype=torch.float64, device="cuda")
    value = module.run(x.data_ptr(), out.data_ptr(), n)
    torch.cuda.synchronize()
    return value, out


@pytest.mark.parametrize(
    "flags", [(), ("-use_fast_math", "-O3"), ("-DSTEPS=5", "-DNDEBUG", "-std=c++17")]
)
def test_either_compiler_gives_one_result(tmp_path, capfd, flags):
    source = tmp_path / "numbers.cu"
    source.write_text(SOURCE)
    found: dict[str, Any] = {}
    for number, compiler in enumerate(("auto", "nvcc")):
        name = f"numbers_{abs(hash(flags)) % 10**6}_{number}"
        module = flexops.load(
            name, [source], extra_cuda_cflags=list(flags), device_compiler=compiler
        )
        assert isinstance(module, types.ModuleType)
        found[compiler] = _results(module, 1000)
        said = capfd.readouterr().err
        assert ("NVRTC" in said) == (compiler == "auto"), said
        assert "nvcc compiles" not in said
    assert found["auto"][0] == found["nvcc"][0]
    assert torch.equal(found["auto"][1].view(torch.int64), found["nvcc"][1].view(torch.int64))


def test_what_is_nvccs_is_its_with_a_line_that_says_why(tmp_path, capfd):
    source = tmp_path / "table.cu"
    source.write_text(SOURCE.replace("__device__ int calls = 5;", "__constant__ int calls = 5;"))
    module = flexops.load("table_by_nvcc", [source])
    assert isinstance(module, types.ModuleType)
    assert _results(module, 300)[1][5, 3] == 6
    line = SOURCE[: SOURCE.index("__device__ int calls")].count("\n") + 1
    assert (
        f"table.cu, line {line}, needs nvcc: a variable in constant or managed memory"
        in capfd.readouterr().err
    )
