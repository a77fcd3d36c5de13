"""flexops.int4_linear on a GPU: each kernel and configuration against float64, the choice between
kernels and torch's product, reproducibility, capture."""

from __future__ import annotations

import pytest
import torch

import flexops
from flexops.ops import few_rows
from flexops.ops import int4_linear as module

pytestmark = pytest.mark.gpu
FAMILIES = ("int4_linear", "int4_few_rows")
HALVES = [torch.bfloat16, torch.float16]


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
    wanted = x.double() @ module.unpack_reference(weight, torch.float32).double().t()
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
def test_products_are_float64s(dtype, group_size, symmetric, rows):
    for n, k in ((1000, 4096), (40, 224 if group_size == 32 else 256), (333, 1024), (17001, 256)):
        weight = weight_of(n, k, group_size, symmetric)
        x = random_x(rows, k, dtype)
        assert distance(flexops.int4_linear(x, weight), x, weight) < BOUNDS[dtype]


FEW_PLANS = [
    (1, 1, 2, 1),
    (1, 2, 2, 1),
    (2, 1, 4, 8),
    (3, 2, 2, 2),
    (8, 1, 3, 4),
]
"""Rows of x, then a plan's numbers: csrc/int4_few_rows/int4_few_rows_cuda.cpp."""
SIXTEEN_PLANS = [
    (3, 2, 4, 4, 1),
    (16, 2, 4, 4, 2),
    (9, 2, 4, 6, 8),
    (8, 2, 2, 4, 1),
    (16, 2, 2, 8, 2),
    (8, 1, 4, 4, 1),
    (16, 1, 4, 2, 2),
    (11, 1, 4, 3, 1),
    (5, 1, 7, 3, 4),
    (16, 1, 7, 2, 1),
]
"""The same of csrc/int4_few_rows/int4_sixteen_rows_launch.h."""
PLANS = [
    (3, 2, 4, 1),
    (20, 2, 8, 8),
    (20, 8, 8, 1),
    (64, 8, 8, 2),
    (100, 2, 8, 2),
    (16, 16, 1, 8),
    (5, 16, 4, 3),
    (20, 32, 2, 1),
    (50, 64, 1, 7),
    (64, 64, 7, 2),
    (100, 64, 7, 2),
    (300, 64, 2, 2),
    (200, 128, 1, 4),
    (200, 128, 7, 2),
    (200, 256, 1, 1),
    (300, 256, 1, 3),
    (200, 256, 7, 2),
    (300, 256, 7, 2),
]
"""The same of csrc/int4_linear/int4_linear_cuda.cpp."""


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("few", "plan"),
    [*((True, one) for one in (*FEW_PLANS, *SIXTEEN_PLANS)), *((False, one) for one in PLANS)],
    ids=str,
)
def test_every_configuration_gives_float64s_result(few, plan, dtype):
    rows, *numbers = plan
    capability = torch.cuda.get_device_capability()
    sixteen = len(numbers) == 4
    if (sixteen or (not few and numbers[0] > 8)) and capability != (9, 0):
        return  # Hopper's
    number = number_of(numbers, few)
    for group_size in (32, 64, 128):
        weight = weight_of(1000, 2048, group_size, False, dtype)
        x = random_x(rows, 2048, dtype)

        def call(weight: flexops.Int4Weight = weight, x: torch.Tensor = x) -> torch.Tensor:
            if not few:
                return torch.ops.flexops.int4_product(x, *weight[:3], None, *weight[3:], number)
            lists = [[one] for one in weight[:3]]
            return torch.ops.flexops.int4_few_rows_linear(
                x, *lists, [], None, 0.0, 0.0, None, 0, weight.n, weight.group_size, number
            )

        out = call()
        assert distance(out, x, weight) < BOUNDS[dtype]
        assert torch.equal(out, call())


def number_of(numbers: list[int], few: bool = True) -> int:
    """A plan as one number."""
    capability = torch.cuda.get_device_capability()
    *first, second, cluster = numbers
    cluster = cluster if capability[0] >= 9 else 1
    if len(first) == 2:
        leading = 16 << 24 | first[0] << 20 | first[1] << 16
    else:
        chunk = 8 if (9, 0) <= capability < (12, 0) else 4
        leading = (chunk << 24 if few else 0) | first[0] << 16
    return leading | second << 8 | cluster


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("widths", "activation"), [((80, 48, 21), None), ((328, 328), "gelu")])
@pytest.mark.parametrize("plan", SIXTEEN_PLANS, ids=str)
def test_several_weights_of_up_to_sixteen_rows(plan, widths, activation, symmetric, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        return  # Hopper's
    rows, teams, tiles, stages, sharing = plan
    cluster = min(sharing * (2 if activation else 1), 8)
    number = number_of([teams, tiles, stages, cluster])
    weights = [weight_of(n, 2080, 32, symmetric, dtype) for n in widths]
    packed, scales, zeros = ([one[i] for one in weights] for i in range(3))
    width = widths[0] if activation else sum(widths)
    x, biases = random_x(rows, 2080, dtype), [random_x(1, n, dtype)[0] for n in widths]
    x, residual = x / 64, random_x(rows, width, dtype)
    kind, zeros = few_rows.ACTIVATIONS[activation], [] if symmetric else zeros
    rest = biases, None, 0.0, 0.0, residual, kind, width, 32, number
    out = torch.ops.flexops.int4_few_rows_linear(x, packed, scales, zeros, *rest).double()
    options = {"biases": biases, "activation": activation, "residual": residual}
    wanted = few_rows.composed(x, weights, **options).double()  # type: ignore[arg-type]
    assert (out - wanted).norm() < 2 * BOUNDS[dtype] * wanted.norm()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(
    ("widths", "activation"),
    [((48, 32, 21), None), ((4096, 1024, 1024), None), ((14336, 14336), "silu"), ((40,), None)],
)
def test_norms_gates_and_residuals(rows, widths, activation):
    k = 4096
    weights = [weight_of(n, k, 64, False) for n in widths]
    width = widths[0] if activation else sum(widths)
    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    options = {
        "biases": [random(n) for n in widths],
        "norm": random(k),
        "offset": 1.0,
        "activation": activation,
        "residual": 10 * random(rows, width),
    }
    x = random(rows, k)
    out = flexops.few_rows_linear(x, weights, **options).double()  # type: ignore[arg-type]
    wanted = few_rows.composed(x, weights, **options).double()  # type: ignore[arg-type]
    assert (out - wanted).norm() < 8e-3 * wanted.norm()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_scales_of_any_dtype(dtype):
    for scales in (torch.float32, *HALVES):
        weight = weight_of(64, 256, 64, False, scales)
        for rows in (2, 100):
            x = random_x(rows, 256, dtype)
            bound = 1e-2 if dtype == torch.bfloat16 else 2e-3
            assert distance(flexops.int4_linear(x, weight), x, weight) < bound


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_calls_are_captured(rows):
    weight = weight_of(1000, 1024, 64, False)
    x = random_x(rows, 1024, torch.bfloat16)
    flexops.int4_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexops.int4_linear(x * 2, weight) + 1
    x.normal_()
    graph.replay()
    assert torch.equal(out, flexops.int4_linear(x * 2, weight) + 1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize(("n", "k"), [(4032, 4096), (2048, 8192), (8192, 2048), (4096, 14336)])
def test_products_that_overlap_wait_for_each_other(n, k, group_size, dtype):
    there, back = weight_of(n, k, group_size, False, dtype), weight_of(k, n, group_size, True)
    # so that results stay as large as x
    there, back = (one._replace(scales=one.scales / (4 * one.k**0.5)) for one in (there, back))
    for rows in (1, 4, 8, 9, 16):
        x = random_x(rows, k, dtype)
        assert distance(flexops.int4_linear(x, there), x, there) < BOUNDS[dtype]
        overlapping = apart = x
        for weight in 8 * (there, back):
            overlapping = flexops.int4_linear(overlapping, weight)
        for weight in 8 * (there, back):
            apart = flexops.int4_linear(apart, weight)
            torch.cuda.synchronize()
        assert apart.isfinite().all()
        assert torch.equal(overlapping, apart)


def test_the_gradient_is_the_dense_products():
    weight = weight_of(1000, 1024, 64, False)
    for rows in (5, 200):
        x = random_x(rows, 1024, torch.bfloat16).requires_grad_()
        out = flexops.int4_linear(x, weight)
        grad = torch.randn_like(out)
        out.backward(grad)
        dense = flexops.unpack_int4(weight, torch.bfloat16)
        assert torch.equal(x.grad, grad @ dense)  # type: ignore[arg-type]
