"""bias_gelu, bias_silu, swiglu and geglu, and swiglu with the layer behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flexops.ops import activation as op
from flexops.ops import gated_linear

from .case import (
    FLEXOPS,
    TORCH,
    Case,
    Functions,
    Setup,
    contenders,
    forward_and_backward,
    library,
    small_calls,
)

FAMILY = "activation"
LIGER = "liger_kernel.transformers.functional"


def activation(setup: Setup) -> Iterator[Case]:
    rows = setup.rows(16384)
    for width in (4096, 8192):
        yield from _biased(setup, rows, width)
    yield from _gated(setup, rows)
    yield from _small(setup)


def _biased(setup: Setup, rows: int, width: int) -> Iterator[Case]:
    what = f"bf16 {rows}x{width}"
    x, bias = setup.randn(rows, width, grad=True), setup.randn(width, grad=True)
    size = x.nbytes
    once, back = (2 * size, "reads x, writes y"), (3 * size, "reads dy and x, writes dx")
    functions = contenders(setup, bias_gelu_tanh, gelu_tanh)
    yield from forward_and_backward(
        FAMILY, "bias_gelu", f"bias_gelu tanh, {what}", functions, (x, bias), once, back
    )
    if width == 8192:
        functions = contenders(setup, op.bias_gelu, gelu)
        yield from forward_and_backward(
            FAMILY, "bias_gelu", f"bias_gelu erf, {what}", functions, (x, bias), once, back
        )
        functions = contenders(setup, op.bias_silu, silu)
        yield from forward_and_backward(
            FAMILY, "bias_silu", f"bias_silu {what}", functions, (x, bias), once, back
        )


def _gated(setup: Setup, rows: int) -> Iterator[Case]:
    what = f"bf16 {rows}x8192"
    gate, up = (setup.randn(rows, 8192, grad=True) for _ in range(2))
    size = gate.nbytes
    once = (3 * size, "reads gate and up, writes y")
    back = (5 * size, "reads dy, gate and up, writes two gradients")
    functions = contenders(setup, op.swiglu, swiglu, library("Liger", LIGER, "liger_swiglu"))
    yield from forward_and_backward(
        FAMILY, "swiglu", f"swiglu {what}", functions, (gate, up), once, back
    )
    functions = contenders(setup, geglu_tanh, geglu, library("Liger", LIGER, "liger_geglu"))
    yield from forward_and_backward(
        FAMILY, "geglu", f"geglu tanh, {what}", functions, (gate, up), once, back
    )
    weight = setup.randn(2048, 8192, grad=True)
    functions = contenders(setup, gated_linear.swiglu_linear, swiglu_and_linear)
    count = (0, "three matrix products bound it, not memory")
    yield from forward_and_backward(
        FAMILY,
        "swiglu_linear",
        f"swiglu_linear {what} -> 2048",
        functions,
        (gate, up, weight),
        count,
        count,
    )


def _small(setup: Setup) -> Iterator[Case]:
    bias = setup.randn(4096)
    functions: Functions = {FLEXOPS: bias_gelu_tanh, TORCH: gelu_tanh}
    yield from small_calls(
        setup, FAMILY, "bias_gelu", functions, lambda n: (setup.randn(n, 4096), bias), "4096 bf16"
    )
    functions = {FLEXOPS: op.swiglu, TORCH: swiglu}
    yield from small_calls(
        setup,
        FAMILY,
        "swiglu",
        functions,
        lambda n: (setup.randn(n, 4096), setup.randn(n, 4096)),
        "4096 bf16",
    )


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
