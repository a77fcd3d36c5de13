"""Grouped products with weights of 4 bits on a GPU: each kernel, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops.few_experts import unpack_mxfp4
from flexops.ops.int4_grouped import int4_grouped_linear

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
KINDS = ["64", "32", "128 symmetric", "mxfp4"]
BY_MMA, BY_WGMMA = (-32, -64), (16, 32, 64, 128)
"""Plans: rows of x of a tile."""
SHAPES = [
    ([3, 0, 1, 70], 0, 96, 128),
    ([0, 17, 0], 5, 272, 384),
    ([1, 1, 1, 1, 1, 1, 1, 1, 260], 2, 16, 256),
    ([40, 300], 0, 528, 640),
]
"""Rows of each group, rows of none, N and K."""


@pytest.fixture(scope="module", autouse=True)
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("int4_grouped", "cuda")


def given(shape: tuple[list[int], int, int, int], kind: str, dtype: torch.dtype):
    """x, the packed weight, whether its codes are MXFP4's, offsets and the exact result."""
    torch.manual_seed(0)
    counts, more, n, k = shape
    mxfp4, size = kind == "mxfp4", 32 if kind == "mxfp4" else int(kind.split()[0])
    symmetric = kind.endswith("symmetric") or mxfp4
    if size == 32:
        k += 32
    dense = torch.randn(len(counts) * n, k, device=CUDA) * k**-0.5
    weight = flexops.quantize_int4(dense.bfloat16(), size, symmetric)
    x = torch.randn(sum(counts) + more, k, device=CUDA).to(dtype)
    offsets = torch.tensor(counts, device=CUDA).cumsum(0).int()
    unpack = unpack_mxfp4 if mxfp4 else flexops.unpack_int4
    matrices = unpack(weight, torch.float32).double().view(len(counts), n, k)
    parts = [
        part @ one.t()
        for part, one in zip(x.double().split([*counts, more]), matrices, strict=False)
    ]
    exact = torch.cat([*parts, x.new_zeros(more, n).double()])
    return x, weight, mxfp4, offsets, exact


def product(x: Tensor, weight: flexops.Int4Weight, mxfp4: bool, offsets: Tensor, plan: int):
    sizes = weight.n // offsets.numel(), weight.k, weight.group_size
    return torch.ops.flexops.int4_grouped_rows(x, *weight[:3], offsets, *sizes, mxfp4, plan)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[2]}-{shape[3]}")
@pytest.mark.parametrize("plan", [*BY_MMA, *BY_WGMMA])
def test_results_are_float64s(plan, shape, kind, dtype):
    """Some groups have no rows; rows of no group are zeros."""
    if plan > 0 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs a GPU of 9.0")
    x, weight, mxfp4, offsets, exact = given(shape, kind, dtype)
    found = [product(x, weight, mxfp4, offsets, plan) for _ in range(3)]
    assert (found[0].double() - exact).norm() <= BOUNDS[dtype] * exact.norm()
    assert all(torch.equal(found[0], one) for one in found)
    rows = int(offsets[-1])
    assert not found[0][rows:].any()
    x[0, 0] = torch.nan
    spoilt = product(x, weight, mxfp4, offsets, plan)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1:], found[0][1:])


@torch.no_grad()
def test_offsets_that_do_not_match_are_clamped():
    x, weight, mxfp4, _, _ = given(SHAPES[0], "64", torch.bfloat16)
    for ends in ([-5, 3, 1, 99], [1000, 7, 7, 7], [0, 0, 0, 0]):
        offsets = torch.tensor(ends, device=CUDA, dtype=torch.int32)
        assert product(x, weight, mxfp4, offsets, 0).isfinite().all()


def test_the_public_call_has_gradients_and_can_be_captured():
    x, weight, _, offsets, exact = given(SHAPES[1], "64", torch.bfloat16)
    x.requires_grad_()
    out = int4_grouped_linear(x, weight, offsets)
    assert (out.double() - exact).norm() <= 6e-3 * exact.norm()
    dense = flexops.unpack_int4(weight, x.dtype).view(offsets.numel(), -1, weight.k)
    grads = [
        torch.autograd.grad(of.float().square().sum(), x)[0]
        for of in (out, flexops.grouped_linear(x, dense, offsets))
    ]
    assert (grads[0] - grads[1]).norm() <= 1e-2 * grads[1].norm()
    rows = x.detach()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = int4_grouped_linear(rows, weight, offsets)
    offsets.copy_(torch.tensor([9, 9, 22]))
    graph.replay()
    assert torch.equal(captured, int4_grouped_linear(rows, weight, offsets))
