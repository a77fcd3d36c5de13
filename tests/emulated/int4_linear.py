"""Products with 4-bit weights for compute_80 (mma.sync, cp.async): pytest is told of this file, and
does not find it."""

from __future__ import annotations

import pytest
import torch

import flexops
from flexops.ops import few_rows
from flexops.ops import int4_linear as reference

FEW, MANY = (4 << 24 | 1 << 16 | 3 << 8 | 1), (2 << 16 | 4 << 8 | 1)


def weight_of(n: int, k: int, group_size: int, symmetric: bool) -> flexops.Int4Weight:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, k // group_size, generator=generator).bfloat16()
    zeros = None if symmetric else torch.rand(n, k // group_size, generator=generator) * 15
    return flexops.pack_int4(codes, scales, zeros, group_size=group_size)


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    eps = torch.finfo(out.dtype).eps
    atol = wanted.abs().max() * 2e-3
    torch.testing.assert_close(out.double(), wanted, rtol=2 * eps, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "symmetric", "plan"),
    [
        (1, 40, 1024, 64, False, FEW),
        (3, 33, 96, 32, False, FEW),
        (8, 70, 1152, 128, True, 8 << 24 | 2 << 16 | 2 << 8 | 1),
        (7, 100, 192, 64, False, FEW),
        (2, 300, 2656, 32, True, 8 << 24 | 1 << 16 | 2 << 8 | 1),
        (5, 40, 192, 64, False, 0),
        (4, 40, 640, 64, True, 0),
        (20, 100, 640, 64, False, MANY),
        (70, 70, 224, 32, False, MANY),
        (33, 130, 256, 128, True, 8 << 16 | 8 << 8 | 1),
        (20, 40, 192, 64, False, 0),
    ],
)
def test_a_product_is_the_references(m, n, k, group_size, symmetric, plan, dtype):
    weight = weight_of(n, k, group_size, symmetric)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    if m <= 8:
        lists = [[] if one is None else [one] for one in (*weight[:3], bias)]
        out = torch.ops.flexops.int4_few_rows_linear(
            x, *lists, None, 0.0, 0.0, None, 0, n, group_size, plan
        )
    else:
        out = torch.ops.flexops.int4_product(x, *weight[:3], bias, *weight[3:], plan)
    exact = reference.unpack_reference(weight, torch.float32).double()
    close(out, x.double() @ exact.t() + bias.double())


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_norms_gates_and_residuals(rows, activation):
    widths = (48, 32, 21) if activation is None else (48, 48)
    weights = [weight_of(n, 320, 64, False) for n in widths]
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    biases, norm = [random(n) for n in widths], random(320)
    width = sum(widths) if activation is None else 48
    x, residual = random(rows, 320), random(rows, width)
    packed, scales, zeros = ([one[i] for one in weights] for i in range(3))
    kind = few_rows.ACTIVATIONS[activation]
    out = torch.ops.flexops.int4_few_rows_linear(
        x, packed, scales, zeros, biases, norm, 1e-6, 1.0, residual, kind, width, 64, 0
    )
    wanted = few_rows.composed(
        x, weights, biases, norm=norm, offset=1.0, activation=activation, residual=residual
    )
    # rounded before and after the norm's factor
    assert (out.double() - wanted.double()).norm() < 8e-3 * wanted.double().norm()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_weight_is_unpacked_exactly(dtype):
    for n, k, group_size, symmetric in ((40, 96, 32, False), (17, 256, 128, True)):
        weight = weight_of(n, k, group_size, symmetric)
        wanted = reference.unpack_reference(weight, dtype)
        assert torch.equal(flexops.unpack_int4(weight, dtype), wanted)
