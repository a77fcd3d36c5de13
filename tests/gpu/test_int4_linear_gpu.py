"""flexops.int4_linear on a GPU: each kernel and configuration against float64, the choice between
kernels and torch's product, reproducibility, capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexops
from flexops.ops import int4_linear as module

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("int4_linear", "cuda")


def weight_of(
    n: int, k: int, group_size: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16
) -> flexops.Int4Weight:
    generator = torch.Generator("cuda").manual_seed(n + k)
    at = {"generator": generator, "device": "cuda"}
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, **at)
    scales = (torch.rand(n, k // group_size, **at) + 0.1).to(dtype)
    zeros = None if symmetric else torch.rand(n, k // group_size, **at) * 15
    return flexops.pack_int4(codes, scales, zeros, group_size=group_size)


def distance(out: torch.Tensor, x: torch.Tensor, weight: flexops.Int4Weight) -> float:
    """From float64's result, relative to its norm."""
    wanted = x.double() @ module._unpack_reference(weight, torch.float32).double().t()
    return float((out.double() - wanted).norm() / wanted.norm())


def random_x(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randn(rows, k, generator=generator, device="cuda").to(dtype) + 0.2


BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 4e-4}
"""A little more than the rounding of a result."""


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 17, 64, 100, 256, 1000])
def test_products_are_float64s(
    dtype: torch.dtype, group_size: int, symmetric: bool, rows: int
) -> None:
    for n, k in ((1000, 4096), (40, 224 if group_size == 32 else 256), (333, 1024)):
        weight = weight_of(n, k, group_size, symmetric)
        x = random_x(rows, k, dtype)
        assert distance(flexops.int4_linear(x, weight), x, weight) < BOUNDS[dtype]


PLANS = [
    (1, 2, 0, 4, 1),
    (5, 2, 0, 16, 8),
    (8, 2, 0, 8, 2),
    (8, 2, 0, 16, 1),
    (16, 2, 0, 8, 8),
    (9, 2, 0, 8, 1),
    (3, 2, 2, 4, 1),
    (20, 2, 2, 8, 8),
    (20, 2, 8, 8, 1),
    (64, 2, 8, 8, 2),
    (100, 2, 2, 8, 2),
]
"""Rows of x, then a plan's numbers: csrc/int4_linear/int4_linear_cuda.cpp."""


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_configuration_gives_float64s_result(
    dtype: torch.dtype, plan: tuple[int, int, int, int, int]
) -> None:
    rows, tiles, beside, warps, cluster = plan
    if torch.cuda.get_device_capability()[0] < 9:
        cluster = 1
    number = tiles << 24 | beside << 16 | warps << 8 | cluster
    for group_size in (32, 64):
        weight = weight_of(1000, 2048, group_size, False)
        x = random_x(rows, 2048, dtype)
        out = torch.ops.flexops.int4_product(x, *weight[:3], None, *weight[3:], number)
        assert distance(out, x, weight) < BOUNDS[dtype]
        again = torch.ops.flexops.int4_product(x, *weight[:3], None, *weight[3:], number)
        assert torch.equal(out, again)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_scales_of_any_dtype(dtype: torch.dtype) -> None:
    for scales in (torch.float32, *HALVES):
        weight = weight_of(64, 256, 64, False, scales)
        for rows in (2, 100):
            x = random_x(rows, 256, dtype)
            bound = 1e-2 if dtype == torch.bfloat16 else 2e-3
            assert distance(flexops.int4_linear(x, weight), x, weight) < bound


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_calls_are_captured(rows: int) -> None:
    weight = weight_of(1000, 1024, 64, False)
    x = random_x(rows, 1024, torch.bfloat16)
    flexops.int4_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexops.int4_linear(x * 2, weight) + 1
    x.normal_()
    graph.replay()
    assert torch.equal(out, flexops.int4_linear(x * 2, weight) + 1)


def test_the_gradient_is_the_dense_products() -> None:
    weight = weight_of(1000, 1024, 64, False)
    for rows in (5, 200):
        x = random_x(rows, 1024, torch.bfloat16).requires_grad_()
        out = flexops.int4_linear(x, weight)
        grad = torch.randn_like(out)
        out.backward(grad)
        dense = flexops.unpack_int4(weight, torch.bfloat16)
        assert torch.equal(x.grad, grad @ dense)  # type: ignore[arg-type]
