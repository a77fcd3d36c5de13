"""bias_gelu, bias_silu, swiglu and geglu, and swiglu with the layer behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flexops.ops import activation as op
from flexops.ops import gated_linear

from .case import Case, Family, Setup, library

LIGER = "liger_kernel.transformers.functional"


def activation(setup: Setup) -> Iterator[Case]:
    rows, family = setup.rows(16384), Family("activation", setup)
    for width in (4096, 8192):
        yield from _biased(family, rows, width)
    yield from _gated(family, rows)
    row, shape = setup.randn, "4096 bf16"
    bias = row(4096)
    yield from family.small(
        "bias_gelu", bias_gelu_tanh, gelu_tanh, lambda n: (row(n, 4096), bias), shape
    )
    yield from family.small(
        "swiglu", op.swiglu, swiglu, lambda n: (row(n, 4096), row(n, 4096)), shape
    )


def _biased(family: Family, rows: int, width: int) -> Iterator[Case]:
    x, bias = family.setup.randn(rows, width, grad=True), family.setup.randn(width, grad=True)
    once, back = (2 * x.nbytes, "reads x, writes y"), (3 * x.nbytes, "reads dy and x, writes dx")
    for function, what, ours, torchs in (
        ("bias_gelu", "bias_gelu tanh,", bias_gelu_tanh, gelu_tanh),
        ("bias_gelu", "bias_gelu erf,", op.bias_gelu, gelu),
        ("bias_silu", "bias_silu", op.bias_silu, silu),
    ):
        if width == 8192 or torchs is gelu_tanh:
            name = f"{what} bf16 {rows}x{width}"
            yield from family.passes(function, name, (ours, torchs), (x, bias), once, back)


def _gated(family: Family, rows: int) -> Iterator[Case]:
    what, setup = f"bf16 {rows}x8192", family.setup
    gate, up = (setup.randn(rows, 8192, grad=True) for _ in range(2))
    size = gate.nbytes
    once, back = (
        (3 * size, "reads gate and up, writes y"),
        (5 * size, "reads dy, gate and up, writes two gradients"),
    )
    for name, of, ours, torchs in (
        ("swiglu", "", op.swiglu, swiglu),
        ("geglu", " tanh,", geglu_tanh, geglu),
    ):
        functions = (ours, torchs, library("Liger", LIGER, f"liger_{name}"))
        yield from family.passes(name, f"{name}{of} {what}", functions, (gate, up), once, back)
    count = (0, "three matrix products bound it, not memory")
    name, args = "swiglu_linear", (gate, up, setup.randn(2048, 8192, grad=True))
    both = (gated_linear.swiglu_linear, swiglu_and_linear)
    yield from family.passes(name, f"{name} {what} -> 2048", both, args, count, count)


def bias_gelu_tanh(x: Tensor, bias: Tensor) -> Any:
    return op.bias_gelu(x, bias, approximate="tanh")


def gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def silu(x: Tensor, bias: Tensor) -> Tensor:
    return F.silu(x + bias)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_and_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(op.swiglu(gate, up), weight)


def geglu_tanh(gate: Tensor, up: Tensor) -> Any:
    return op.geglu(gate, up, approximate="tanh")


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up
