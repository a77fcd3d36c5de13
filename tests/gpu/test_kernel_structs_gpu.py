"""Structs by value, maps for the copy engine, cooperative launches and CUDA's libraries in
``flexops.kernel`` on a GPU."""

from __future__ import annotations

import pytest
import torch

import flexops

pytestmark = pytest.mark.gpu

TRANSPOSE = r"""
#include "common/hopper.cuh"
using namespace flexops;
// one tile of 32 by 32 floats: the copy engine brings it, the threads write it transposed
__global__ void transpose(const __grid_constant__ CUtensorMap map, float* out, int x_size0) {
  __shared__ alignas(128) float tile[32][32];
  __shared__ alignas(8) u64 arrived;
  const u32 barrier = hopper::shared_address(&arrived);
  if (threadIdx.x == 0) {
    hopper::init(barrier, 1);
    hopper::fence_init();
    hopper::expect(barrier, sizeof(tile));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(hopper::shared_address(tile)), "l"(&map),
        "r"(blockIdx.x * 32), "r"(blockIdx.y * 32), "r"(barrier) : "memory");
  }
  __syncthreads();
  hopper::wait(barrier, 0);
  for (int row = 0; row < 32; ++row)
    out[(blockIdx.x * 32 + row) * int64_t(x_size0) + blockIdx.y * 32 + threadIdx.x] =
        tile[threadIdx.x][row];
}"""
WINDOW = """
struct Window { int64_t strides[2]; int first, last; float scale; };
__global__ void window(const float* x, float* out, Window window, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  const int64_t row = i / window.strides[0], column = i % window.strides[0];
  out[i] = column >= window.first && column < window.last ? x[i] * window.scale : row;
}"""
NORMALIZE = """
#include <cooperative_groups.h>
__global__ void normalize(const float* x, float* out, float* total, int64_t n) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  const int64_t first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  float sum = 0;
  for (int64_t i = first; i < n; i += step) sum += x[i];
  atomicAdd(total, sum);
  cooperative_groups::this_grid().sync();
  for (int64_t i = first; i < n; i += step) out[i] = x[i] / *total;
}"""


def test_the_copy_engine_brings_tiles() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        with pytest.raises(flexops.errors.FlexopsError, match=r"9\.0 or newer"):
            flexops.tensor_map(torch.zeros(64, 64, device="cuda"), (32, 32))
        return
    transpose = flexops.kernel(
        TRANSPOSE,
        "transpose(Tensor x) -> Tensor",
        args={"map": lambda x: flexops.tensor_map(x, (32, 32))},
        grid=lambda x: (x.shape[1] // 32, x.shape[0] // 32),
        block=32,
        out=lambda x: x.new_empty(x.shape[1], x.shape[0]),
    )
    for shape in ((32, 32), (256, 96), (1024, 2048)):
        x = torch.randn(shape, device="cuda")
        assert torch.equal(transpose(x), x.t())


def test_a_struct_arrives_as_it_was_given() -> None:
    window = flexops.kernel(
        WINDOW,
        "window(Tensor x, int first, float scale) -> Tensor",
        args={"window": lambda x, first, scale: ((x.shape[1], 1), first, x.shape[1] - 1, scale)},
    )
    x = torch.randn(64, 100, device="cuda")
    expected = torch.arange(64.0, device="cuda")[:, None].repeat(1, 100)
    expected[:, 3:99] = x[:, 3:99] * 0.5
    assert torch.equal(window(x, 3, 0.5), expected)


def test_a_cooperative_grid_waits_for_all_blocks() -> None:
    normalize = flexops.kernel(
        NORMALIZE,
        "normalize(Tensor x, Tensor(a!) total, Tensor(b!) out) -> ()",
        grid=torch.cuda.get_device_properties(0).multi_processor_count,
        args={"n": lambda x: x.numel()},
        cooperative=True,
    )
    x = torch.rand(1_000_000, device="cuda")
    total, out = torch.zeros((), device="cuda"), torch.empty_like(x)
    normalize(x, total, out)
    torch.testing.assert_close(out, x / x.sum(), rtol=1e-4, atol=0)


def test_cub_and_cpps_headers_compute() -> None:
    total = flexops.kernel(
        """
        #include <cub/block/block_reduce.cuh>
        #include <cmath>
        __global__ void total(const float* x, float* out, int64_t x_numel) {
          using Reduce = cub::BlockReduce<float, 256>;
          __shared__ typename Reduce::TempStorage storage;
          float sum = 0;
          for (int64_t i = blockIdx.x * 256l + threadIdx.x; i < x_numel; i += gridDim.x * 256l)
            sum += std::abs(x[i]);
          sum = Reduce(storage).Sum(sum);
          if (threadIdx.x == 0) atomicAdd(out, sum);
        }""",
        "total(Tensor x) -> Tensor",
        grid=132,
        out=lambda x: x.new_zeros(()),
    )
    x = torch.randn(1 << 20, device="cuda")
    torch.testing.assert_close(total(x), x.abs().sum(), rtol=1e-4, atol=1)
