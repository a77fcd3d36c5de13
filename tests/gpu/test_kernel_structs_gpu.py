"""Structs by value, maps for the copy engine, cooperative and cluster launches, CUDA's libraries,
candidates, several kernels and factories in ``flexops.kernel`` on a GPU."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import flexops
from flexops import settings
from flexops.build.store.cache import BuildCache

PAGE = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
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


def test_the_copy_engine_brings_tiles():
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


def test_a_struct_arrives_as_it_was_given():
    window = flexops.kernel(
        WINDOW,
        "window(Tensor x, int first, float scale) -> Tensor",
        args={"window": lambda x, first, scale: ((x.shape[1], 1), first, x.shape[1] - 1, scale)},
    )
    x = torch.randn(64, 100, device="cuda")
    expected = torch.arange(64.0, device="cuda")[:, None].repeat(1, 100)
    expected[:, 3:99] = x[:, 3:99] * 0.5
    assert torch.equal(window(x, 3, 0.5), expected)


def test_a_cooperative_grid_waits_for_all_blocks():
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


def test_blocks_of_a_cluster_share_memory():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters are of 9.0 and newer")
    rotate = flexops.kernel(
        """
        #include <cooperative_groups.h>
        namespace cg = cooperative_groups;
        __global__ void rotate(const int* x, int* out) {
          __shared__ int own;
          auto cluster = cg::this_cluster();
          if (threadIdx.x == 0) own = x[blockIdx.x];
          cluster.sync();
          const unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
          if (threadIdx.x == 0) out[blockIdx.x] = *cluster.map_shared_rank(&own, next);
          cluster.sync();
        }""",
        "rotate(Tensor x) -> Tensor",
        grid=lambda x: x.shape[0],
        block=32,
        cluster=4,
    )
    x = torch.arange(64, dtype=torch.int32, device="cuda")
    assert torch.equal(rotate(x), x.view(-1, 4).roll(-1, 1).flatten())


def documented(name: str, before: str = "") -> flexops.Kernel:
    """The kernel of that name on the page."""
    code = next(one for one in PAGE.split("```python\n") if one.startswith(f"{name} = "))
    names: dict[str, Any] = {"flexops": flexops, "torch": torch, "__name__": "a_page"}
    exec(code.partition("```")[0].replace("#include", f"{before}#include", 1), names)
    kernel: flexops.Kernel = names[name]
    return kernel


def test_two_passes_with_cub_give_the_same_bits_each_time():
    total = documented("total")
    for size in (0, 1, 1000, (1 << 22) + 3):
        x = torch.randn(size, device="cuda")
        torch.testing.assert_close(total(x), x.double().sum().float(), rtol=1e-4, atol=1e-2)
        assert torch.equal(total(x), total(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = total(x)
    x.fill_(1.0)
    graph.replay()
    assert out.item() == x.numel()
    compiled = torch.compile(lambda x: total(x.relu()) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), x.sum() + 1)


def test_an_autotuned_softmax_is_measured_once_and_stored():
    softmax = documented("softmax", f"// {uuid.uuid4()}\n")  # what no cache has
    graph, x = torch.cuda.CUDAGraph(), torch.randn(64, 1024, device="cuda")
    with torch.cuda.graph(graph):  # nothing is measured
        out = softmax(x)
    graph.replay()
    torch.testing.assert_close(out, x.softmax(-1))
    for shape in ((64, 1024), (3, 17), (4096, 8192), (16, 100000)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, device="cuda").to(dtype)
            for one in (softmax, *softmax.candidates, torch.compile(softmax, fullgraph=True)):
                torch.testing.assert_close(one(x), x.float().softmax(-1).to(dtype))
    name = torch.cuda.get_device_name()
    facts = [
        json.loads(one.library.read_text())
        for one in BuildCache(settings.current().cache_dir).entries(("softmax-choice-",))
    ]
    assert len([one for one in facts if one["gpu"] == name]) >= 8
    times = softmax.tune(torch.randn(8192, 4096, device="cuda"))
    assert len(times) == len(softmax.candidates)
    assert all(0 < one < 1 for one in times)


def test_what_a_candidate_cannot_launch_and_what_it_writes():
    add = flexops.kernel(
        """
        extern __shared__ float room[];
        __global__ void add(float* y, int64_t n) {
          const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
          if (i < n) y[i] += 1;
        }""",
        "add(Tensor(a!) y) -> ()",
        candidates=[{"shared": 10**9}, {"block": 64}, {"block": 128}],
    )
    y = torch.zeros(1000, device="cuda")
    add(y)
    assert torch.equal(y, torch.ones_like(y))


def test_a_factory_and_constant_arrays():
    ramp = documented("ramp")
    for dtype in (torch.float32, torch.bfloat16):
        made = ramp(1000, 0.5, dtype=dtype, device="cuda")
        assert torch.equal(made.cpu(), ramp(1000, 0.5, dtype=dtype, device="cpu"))
    compiled = torch.compile(lambda x: ramp(x.shape[0], 1.0, dtype=x.dtype, device=x.device) + x)
    x = torch.zeros(8, device="cuda")
    assert torch.equal(compiled(x), ramp(8, 1.0, dtype=x.dtype, device=x.device))
