"""A ring of stages between a producer's warp and a consumer's, by
``csrc/common/hopper.cuh``, as attention, the norms and cross entropy have one.

Also a program, for compute-sanitizer: what its racecheck makes of a ring that is right, and of one
with a fault, is told in ``docs/benchmarks/README.md``, "Attention on a GPU"::

    compute-sanitizer --tool racecheck python tests/gpu/test_hopper_ring_gpu.py COPY MEET FAULT
"""

from __future__ import annotations

import functools
import sys

import pytest
import torch

import flexops

pytestmark = pytest.mark.gpu

RING = r"""
#include "common/hopper.cuh"
using namespace flexops;
constexpr int kStages = 3, kRow = 64;
/// copy: 0 bulk copies, 1 the producer's own stores. meet: both warps meet at a named barrier, too.
/// fault: 1 the consumer reads before it waits for `full`, 2 it says `empty` before it reads.
template <int copy, bool meet, int fault>
__global__ void __launch_bounds__(64) ring(const float* x, float* out, int x_size0) {
  __shared__ __align__(128) float stages[kStages][kRow];
  using Ring = hopper::Ring<kStages>;
  __shared__ unsigned long long barriers[Ring::kBarriers];
  const Ring ring = {hopper::shared_address(barriers)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) ring.init(1, copy == 1 ? 32 : 1), hopper::fence_init();
  __syncthreads();
  Ring::State at;
#pragma unroll 1
  for (int row = 0; row < x_size0; ++row, at.next()) {
    volatile float* stage = stages[at.stage];
    if (warp == 0) {
      if (copy == 1) {
        ring.acquire(at);
        stage[lane] = x[row * kRow + lane], stage[lane + 32] = x[row * kRow + lane + 32];
        hopper::arrive(ring.full(at.stage));
      } else if (lane == 0) {
        const u32 full = ring.fill(at, kRow * 4);
        hopper::load_bytes(hopper::shared_address(stages[at.stage]), x + row * kRow, kRow * 4, full);
      }
      __syncwarp();
    }
    if (meet) barrier(1, 64);
    if (warp == 1) {
      if (fault != 1) ring.wait(at);
      __syncwarp();
      if (fault == 2) ring.release(at);
      const float a = stage[lane], b = stage[lane + 32];
      if (fault == 1) ring.wait(at);
      out[row * kRow + lane] = a, out[row * kRow + lane + 32] = b;
      if (fault != 2) ring.release(at);
    }
  }
}
"""


@functools.cache
def kernel(copy: int, meet: bool, fault: int) -> flexops.Kernel:
    template = {"copy": copy, "meet": meet, "fault": fault}
    return flexops.kernel(
        RING,
        f"gpu_tests::ring_{copy}_{meet:d}_{fault}(Tensor x) -> Tensor",
        name="ring",
        template=template,
        grid=1,
        block=64,
    )


def ring(copy: int, meet: bool, fault: int = 0) -> bool:
    """Whether 200 rows come out as they went in."""
    x = torch.randn(200, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    return bool(torch.equal(kernel(copy, meet, fault)(x), x))


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("copy", [0, 1], ids=["bulk copies", "stores"])
def test_rows_go_through_a_ring(copy, meet, require):
    require(
        torch.cuda.get_device_capability() >= (9, 0),
        "a GPU of capability 9.0 or newer",
        "bash scripts/run_tests.sh -m gpu, on an H100 or H200",
    )
    for _ in range(20):
        assert ring(copy, meet)


if __name__ == "__main__":
    copied, met, wrong = (int(argument) for argument in sys.argv[1:])
    print("right" if ring(copied, bool(met), wrong) else "wrong")
