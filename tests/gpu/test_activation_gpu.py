"""Activations on a GPU: every way through the kernels gives what the reference gives, and sums over
rows have the same bits every time."""

from __future__ import annotations

import pytest
import test_activation as on_cpu
import torch
from contract import ROUNDING
from torch import Tensor

from flexops.ops import _register

pytestmark = pytest.mark.gpu
FAMILIES = ("activation",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def misaligned(*shape: int) -> Tensor:
    return torch.randn(plain(*shape).numel() + 1, device="cuda")[1:].view(shape)


def every_second(*shape: int) -> Tensor:
    return torch.randn(*shape, 2, device="cuda")[..., 0]


def long_rows(*shape: int) -> Tensor:
    return torch.randn(*shape[:-1], shape[-1] + 16, device="cuda")[..., : shape[-1]]


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """With x's strides and alignment."""
    base = torch.empty(x.untyped_storage().nbytes() // 4, dtype=dtype, device="cuda")
    return base.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


def near(
    actual: tuple[Tensor, ...] | Tensor, expected: tuple[Tensor, ...] | Tensor, dtype: torch.dtype
) -> None:
    """As near as x's dtype asks for, in which kernels may be; also where a bias and its gradient
    have more digits."""
    for one, other in zip(
        *((x,) if isinstance(x, Tensor) else x for x in (actual, expected)), strict=True
    ):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        size = float(other.double().square().mean().sqrt()) if other.numel() else 0.0
        unit = (
            ROUNDING[other.dtype]
            if other.dtype != torch.float32
            else 2.0**-19
            if dtype == torch.float32
            else 2.0**-14
        )
        # + 1, because sums may cancel
        torch.testing.assert_close(one, other, rtol=2 * unit, atol=2 * unit * (size + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [plain, misaligned, every_second, long_rows])
@pytest.mark.parametrize("shape",
    [(3, 8), (5, 100), (7, 513), (300, 4096), (2, 3, 96), (1000, 8), (1, 16384), (4096, 24), (9, 1),
     (131, 3080)])  # fmt: skip
def test_every_way_through_the_kernels(dtype, layout, shape):
    _register.supply_all()
    ops, torch_ops = _register.references, torch.ops.flexops
    x, up, grad = (as_dtype(layout(*shape), dtype) for _ in range(3))
    packed = as_dtype(layout(*shape[:-1], 2 * shape[-1]), dtype)
    for activation in ((), (False,), (True,)):
        biased, gated = ("bias_gelu", "geglu") if activation else ("bias_silu", "swiglu")
        forward, backward = (
            getattr(torch_ops, biased).default,
            getattr(torch_ops, f"{biased}_backward").default,
        )
        for bias in (
            None,
            torch.randn(shape[-1], device="cuda"),
            torch.randn(shape[-1] + 1, device="cuda").to(dtype)[1:],
        ):
            near(forward(x, bias, *activation), ops[forward.name()](x, bias, *activation), dtype)
            for wanted in (False,) if bias is None else (False, True):
                arguments = (grad, x, bias, *activation, wanted)
                actual = backward(*arguments)
                near(actual, ops[backward.name()](*arguments), dtype)
                assert torch.equal(actual[1], backward(*arguments)[1])
        forward, backward = (
            getattr(torch_ops, gated).default,
            getattr(torch_ops, f"{gated}_backward").default,
        )
        for inputs in (
            (x, up, *activation, False),
            (packed, None, *activation, False),
            (packed, None, *activation, True),
        ):
            near(forward(*inputs), ops[forward.name()](*inputs), dtype)
            near(backward(grad, *inputs), ops[backward.name()](grad, *inputs), dtype)


@pytest.mark.parametrize("which", on_cpu.ACTIVATIONS)
def test_every_number(which):
    """As on the CPU: all 16-bit numbers, and many of 32 bits, with their derivatives."""
    torch.set_default_device("cuda")
    try:
        on_cpu.test_every_float32_keeps_its_digits(which)
        for dtype in DTYPES[1:]:
            on_cpu.test_every_16_bit_number_is_rounded_right(which, dtype)
        for dtype in DTYPES:
            on_cpu.test_special_values_are_as_documented(which, dtype)
    finally:
        torch.set_default_device("cpu")


SIZES = [
    (rows, columns)
    for columns in (1, 24, 264, 1023, 8200)
    for rows in (1, 2, 63, 64, 65, 1000, 50_000)
    if rows * columns <= 10**8
]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_the_bias_gradient_adds_up_all_rows(rows, columns):
    x, bias, grad = (
        torch.randn(rows, columns, device="cuda"),
        torch.randn(columns, device="cuda"),
        torch.randn(rows, columns, device="cuda"),
    )
    for dtype in DTYPES:
        arguments = (grad.to(dtype), x.to(dtype), bias)
        exact = on_cpu.activation_module._biased_backward(
            *(value.double() for value in arguments), "silu", True
        )[1]
        torch.testing.assert_close(
            torch.ops.flexops.bias_silu_backward(*arguments, True)[1].double(),
            exact,
            atol=4e-6 * rows**0.5,
            rtol=1e-5,
        )
