"""``flexops.load`` of ordinary `.cu` sources without nvcc, on a GPU: people's kernels give what
torch's operators give, wherever they are called from."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import completed

import flexops
from flexops_tools.bench.build_runner import EDITED

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
ROWS = """
#pragma once
#include <limits>
#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif
struct Line {  // goes to a kernel by value
  float slope;
  double shift;
  HD float at(float x) const { return slope * x + float(shift); }
};
constexpr int kWarp = 32;
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffff, value, lanes);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, lanes));
  return value;
}
inline int blocks_of(int64_t n, int threads) { return int((n + threads - 1) / threads); }
"""
KERNELS = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_fp16.h>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>
#include "rows.cuh"

#define CHECK_INPUT(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
#define LAUNCH(kernel, n, ...) kernel<<<blocks_of(n, 256), 256, 0, at::cuda::getCurrentCUDAStream()>>>(__VA_ARGS__)

namespace {

template <typename T>
__global__ void scale_kernel(const T* __restrict__ x, T* __restrict__ out, float factor, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * factor);
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t sigmoid(scalar_t z) { return 1.0 / (1.0 + exp(-z)); }
template <typename scalar_t>
__device__ __forceinline__ scalar_t elu(scalar_t z, scalar_t alpha = 1.0) { return fmax(0.0, z) + fmin(0.0, alpha * (exp(z) - 1.0)); }

template <typename scalar_t>
__global__ void cell_kernel(const torch::PackedTensorAccessor32<scalar_t, 3, torch::RestrictPtrTraits> gates,
                            const torch::PackedTensorAccessor64<scalar_t, 2, torch::RestrictPtrTraits> old,
                            torch::PackedTensorAccessor32<scalar_t, 2> out) {
  const int n = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < gates.size(2)) out[n][c] = old[n][c] * sigmoid(gates[n][0][c]) + elu(gates[n][2][c]) * sigmoid(gates[n][1][c]);
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) softmax_kernel(const T* __restrict__ x, T* __restrict__ out, int columns) {
  __shared__ float part[kThreads / kWarp];
  x += int64_t(blockIdx.x) * columns, out += int64_t(blockIdx.x) * columns;
  const auto across = [&](float value, bool sum) {
    value = sum ? warp_sum(value) : warp_max(value);
    __syncthreads();
    if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
    __syncthreads();
    for (int i = 0; i < kThreads / kWarp; ++i) value = i == 0 ? part[0] : sum ? value + part[i] : fmaxf(value, part[i]);
    return value;
  };
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int i = threadIdx.x; i < columns; i += kThreads) most = fmaxf(most, static_cast<float>(x[i]));
  most = across(most, false);
  for (int i = threadIdx.x; i < columns; i += kThreads) sum += expf(static_cast<float>(x[i]) - most);
  sum = across(sum, true);
  for (int i = threadIdx.x; i < columns; i += kThreads) out[i] = static_cast<T>(expf(static_cast<float>(x[i]) - most) / sum);
}

constexpr int kTile = 128;
__global__ void transpose_kernel(const float* x, float* out, int rows, int columns) {
  extern __shared__ float tile[];  // kTile x (kTile + 1), more than 48 KiB
  const int left = blockIdx.x * kTile, top = blockIdx.y * kTile;
  for (int y = threadIdx.y; y < kTile; y += blockDim.y)
    for (int x_ = threadIdx.x; x_ < kTile; x_ += blockDim.x)
      if (top + y < rows && left + x_ < columns) tile[y * (kTile + 1) + x_] = x[int64_t(top + y) * columns + left + x_];
  __syncthreads();
  for (int y = threadIdx.y; y < kTile; y += blockDim.y)
    for (int x_ = threadIdx.x; x_ < kTile; x_ += blockDim.x)
      if (left + y < columns && top + x_ < rows) out[int64_t(left + y) * rows + top + x_] = tile[x_ * (kTile + 1) + y];
}

__global__ void count_kernel(const int64_t* x, int* bins, int n, int kinds) {
  extern __shared__ int mine[];
  for (int i = threadIdx.x; i < kinds; i += blockDim.x) mine[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) atomicAdd(&mine[x[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < kinds; i += blockDim.x) atomicAdd(&bins[i], mine[i]);
}

__device__ float partial[1024];
__device__ unsigned int finished = 0;
__global__ void parts_kernel(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = threadIdx.x + blockIdx.x * int64_t(kWarp); i < n; i += int64_t(kWarp) * gridDim.x) sum += x[i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum, atomicAdd(&finished, 1u);
}
__global__ void whole_kernel(float* out) {  // of a kernel before it, through the module's variables
  float sum = 0;
  for (unsigned int i = threadIdx.x; i < finished; i += kWarp) sum += partial[i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) out[0] = sum, finished = 0;
}

__global__ void pairs_kernel(const __half2* x, const __half2* y, __half2* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = __hfma2(x[i], y[i], __float2half2_rn(0.5f));
}

template <typename F>
__device__ void each(float* x, int64_t n, F function) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) x[i] = function(x[i]);
}
template <typename... More>
__global__ void line_kernel(float* x, int64_t n, Line line, More... more) {
  each(x, n, [=](float value) { return line.at(value) + (float(more) + ... + 0.f); });
}
template <bool up>
__global__ void step_kernel(float* x, int64_t n) { each(x, n, [](float value) { return up ? ceil(value) : floor(value); }); }

}  // namespace
"""
HOST = """
at::Tensor scale(at::Tensor x, double factor) {
  CHECK_INPUT(x);
  const at::cuda::OptionalCUDAGuard guard(device_of(x));
  auto out = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "scale", [&] {
    LAUNCH(scale_kernel<scalar_t>, x.numel(), x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), static_cast<float>(factor), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}
std::vector<torch::Tensor> cell(torch::Tensor gates, torch::Tensor old) {
  auto out = torch::empty({gates.size(0), gates.size(2)}, gates.options());
  const dim3 grid(blocks_of(gates.size(2), 128), gates.size(0));
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "cell", ([&] {
    cell_kernel<scalar_t><<<grid, 128, 0, at::cuda::getCurrentCUDAStream()>>>(
        gates.packed_accessor32<scalar_t, 3, torch::RestrictPtrTraits>(), old.packed_accessor64<scalar_t, 2, torch::RestrictPtrTraits>(),
        out.packed_accessor32<scalar_t, 2>());
  }));
  return {out};
}
at::Tensor softmax(at::Tensor x) {
  auto out = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softmax", [&] {
    softmax_kernel<scalar_t, 256><<<x.size(0), 256, 0, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.size(1));
  });
  return out;
}
at::Tensor transpose(at::Tensor x) {
  auto out = at::empty({x.size(1), x.size(0)}, x.options());
  const int bytes = kTile * (kTile + 1) * sizeof(float);
  C10_CUDA_CHECK(cudaFuncSetAttribute(transpose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(blocks_of(x.size(1), kTile), blocks_of(x.size(0), kTile));
  transpose_kernel<<<grid, dim3(32, 8), bytes, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.size(0), x.size(1));
  return out;
}
at::Tensor count(at::Tensor x, int64_t kinds) {
  auto bins = at::zeros({kinds}, x.options().dtype(at::kInt));
  count_kernel<<<32, 256, kinds * sizeof(int), at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<int64_t>(), bins.data_ptr<int>(), x.numel(), kinds);
  return bins;
}
at::Tensor sum(at::Tensor x) {
  auto out = at::empty({}, x.options());
  auto stream = at::cuda::getCurrentCUDAStream();
  parts_kernel<<<256, kWarp, 0, stream>>>(x.data_ptr<float>(), x.numel());
  whole_kernel<<<1, kWarp, 0, stream>>>(out.data_ptr<float>());
  return out;
}
at::Tensor pairs(at::Tensor x, at::Tensor y) {
  auto out = at::empty_like(x);
  const auto in = [](const at::Tensor& t) { return reinterpret_cast<__half2*>(t.data_ptr<at::Half>()); };
  LAUNCH(pairs_kernel, x.numel() / 2, in(x), in(y), in(out), int(x.numel() / 2));
  return out;
}
void lines(at::Tensor x, bool more) {
  const Line line{2.f, 0.25};
  if (more) LAUNCH((line_kernel<short, double>), x.numel(), x.data_ptr<float>(), x.numel(), line, short(3), 0.5);
  else LAUNCH(line_kernel<>, x.numel(), x.data_ptr<float>(), x.numel(), line);
}
void step(at::Tensor x, bool up) {
  auto kernel = up ? step_kernel<true> : step_kernel<false>;
  kernel<<<blocks_of(x.numel(), 256), 256, 0, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), x.numel());
}
void refused(at::Tensor x) { step_kernel<true><<<1, 2048>>>(x.data_ptr<float>(), x.numel()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scale", &scale), m.def("cell", &cell), m.def("softmax", &softmax), m.def("transpose", &transpose), m.def("count", &count);
  m.def("sum", &sum), m.def("pairs", &pairs), m.def("lines", &lines), m.def("step", &step), m.def("refused", &refused);
}
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "rows.cuh").write_text(ROWS)
    (folder / "people.cu").write_text(KERNELS + HOST)
    return folder


@pytest.fixture(scope="module")
def modules(sources: Path) -> Iterator[dict[str, Any]]:
    """A source of everything that people write; and the one that ``flexops bench build`` edits:
    built at the same time, by two threads."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FLEXOPS_PCH", "0")
    wanted = {
        "people": (sources / "people.cu", ()),
        "scale_edited": (EDITED["cu"], ("-DEDITED=1",)),
    }

    def load(name: str) -> Any:
        source, flags = wanted[name]
        return flexops.load(name, [source], extra_cuda_cflags=flags, device_compiler="nvrtc")

    with ThreadPoolExecutor() as pool:
        yield dict(zip(wanted, pool.map(load, wanted), strict=True))
    patch.undo()


@pytest.fixture
def people(modules: dict[str, Any]) -> Any:
    return modules["people"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_templates_dispatched_by_dtype_and_static_shared_memory(modules, dtype):
    people, x = modules["people"], torch.randn(37, 1001, device="cuda").to(dtype)
    assert torch.equal(people.scale(x, 1.5), (x.float() * 1.5).to(dtype))
    torch.testing.assert_close(
        modules["scale_edited"].scale(x, 1.5), (x.float() * 1.5 + 1).to(dtype)
    )
    torch.testing.assert_close(
        people.softmax(x).float(),
        x.softmax(1).float(),
        rtol=2e-2 if dtype.itemsize == 2 else 1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accessors_of_strided_tensors(people, dtype):
    gates = torch.randn(301, 3, 7, device="cuda", dtype=dtype).permute(2, 1, 0)
    old = torch.randn(7, 602, device="cuda", dtype=dtype)[:, ::2]
    expected = (
        old * gates[:, 0].sigmoid() + torch.nn.functional.elu(gates[:, 2]) * gates[:, 1].sigmoid()
    )
    torch.testing.assert_close(people.cell(gates, old)[0], expected)


def test_dynamic_shared_memory_atomics_and_cudas_own_halves(people):
    x = torch.randn(515, 1003, device="cuda")
    assert torch.equal(people.transpose(x), x.t())
    numbers = torch.randint(0, 300, (100_000,), device="cuda")
    assert torch.equal(people.count(numbers, 300), torch.bincount(numbers, minlength=300).int())
    a, b = (torch.randn(2000, device="cuda").half() for _ in range(2))
    torch.testing.assert_close(people.pairs(a, b), a * b + 0.5, rtol=2e-3, atol=2e-3)


def test_kernels_that_share_a_variable_are_one_module(people):
    for size in (1, 1000, 1_000_003):
        x = torch.randn(size, device="cuda")
        torch.testing.assert_close(people.sum(x), x.sum(), rtol=1e-4, atol=1e-2)


def test_structs_packs_lambdas_in_kernels_and_kernels_by_pointer(people):
    x = torch.randn(1000, device="cuda")
    for more, added in ((False, 0.25), (True, 3.75)):
        people.lines(y := x.clone(), more)
        torch.testing.assert_close(y, 2 * x + added)
    for up in (True, False):
        people.step(y := x.clone(), up)
        assert torch.equal(y, x.ceil() if up else x.floor())


def test_a_launch_that_the_gpu_rejects_is_an_exception_and_no_more(people):
    x = torch.randn(10, device="cuda")
    with pytest.raises(RuntimeError, match=r"could not be launched: invalid argument.*step_kernel"):
        people.refused(x)
    assert torch.equal(people.scale(x, 2.0), x * 2)


def test_in_a_graph_and_on_another_stream(people):
    x, graph, stream = (
        torch.zeros(33, 700, device="cuda"),
        torch.cuda.CUDAGraph(),
        torch.cuda.Stream(),
    )
    with torch.cuda.graph(graph):
        out = people.softmax(people.scale(x, 2.0))
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, (x * 2).softmax(1), rtol=1e-4, atol=1e-6)
    x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # waits for what is queued there, not for the default one's
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        out = people.scale(x, 2.0)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(x, 6.0))


def test_an_edit_of_a_kernel_is_new_code_and_the_module_before_keeps_its_own(people, tmp_path):
    (tmp_path / "rows.cuh").write_text(ROWS)
    x = torch.randn(1000, device="cuda")
    for factor in ("factor + 1", "factor + 2"):
        (tmp_path / "people.cu").write_text(
            (KERNELS + HOST).replace("float(x[i]) * factor", f"float(x[i]) * {factor}")
        )
        edited = flexops.load("edited", [tmp_path / "people.cu"], device_compiler="nvrtc")
        torch.testing.assert_close(edited.scale(x, 2.0), x * 2 + int(factor[-1]))
        torch.testing.assert_close(edited.sum(x), x.sum(), rtol=1e-4, atol=1e-2)
    assert torch.equal(people.scale(x, 2.0), x * 2)


# ---- first launches, in processes of their own ----

START = """
import sys, threading, torch, flexops
people = flexops.load("people", [sys.argv[1]], device_compiler="nvrtc")
x = torch.randn(33, 700, device="cuda")
wanted = (x * 2).softmax(1)
def call():
    return people.softmax(people.scale(x, 2.0))
"""


def child(program: str, sources: Path, **more: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "FLEXOPS_PCH": "0",
        **more,
    }
    command = [sys.executable, "-c", START + textwrap.dedent(program), str(sources / "people.cu")]
    completed(command, env=environment)


@pytest.mark.usefixtures("people")
def test_a_first_launch_in_capture(sources):
    child("""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, (x * 2).softmax(1), rtol=1e-4, atol=1e-6)
    """, sources)  # fmt: skip


@pytest.mark.usefixtures("people")
def test_first_launches_of_several_threads_where_nothing_may_be_compiled(sources):
    child("""
        found, start = [], threading.Barrier(8)
        def one():
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    out = call()
                torch.cuda.current_stream().synchronize()
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-6)
            found.append(1)
        torch.cuda.synchronize()
        threads = [threading.Thread(target=one) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 8
    """, sources, FLEXOPS_JIT="0")  # fmt: skip


# ---- beside nvcc ----


@pytest.mark.slow
@pytest.mark.usefixtures("nvcc_toolkit")
def test_results_are_nvccs_bit_for_bit(people, sources, monkeypatch):
    """Where NVRTC and nvcc are of one CUDA version; else they may order a sum otherwise."""
    monkeypatch.setenv("FLEXOPS_PCH", "0")
    theirs = flexops.load("people_by_nvcc", [sources / "people.cu"], device_compiler="nvcc")
    torch.manual_seed(0)
    x, calls = torch.randn(515, 1003, device="cuda"), dict[str, Callable[[Any], Any]]()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        calls[f"scale {dtype}"] = lambda module, dtype=dtype: module.scale(x.to(dtype), 1.37)
        calls[f"softmax {dtype}"] = lambda module, dtype=dtype: module.softmax(x.to(dtype))
    gates, old = (
        torch.randn(301, 3, 7, device="cuda").permute(2, 1, 0),
        torch.randn(7, 301, device="cuda"),
    )
    calls["cell"] = lambda module: module.cell(gates, old)[0]
    calls["transpose"] = lambda module: module.transpose(x)
    calls["sum"] = lambda module: module.sum(x)
    calls["pairs"] = lambda module: module.pairs(x[:2].half(), x[2:4].half())
    calls["lines"] = lambda module: (module.lines(y := x.clone(), True), y)[1]
    differ = [name for name, call in calls.items() if not torch.equal(call(people), call(theirs))]
    assert not differ
