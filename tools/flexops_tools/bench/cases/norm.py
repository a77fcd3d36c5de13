"""layer_norm, rms_norm, both with a residual added, and rms_norm with a quantized result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.ops import norm as op
from flexops.ops import norm_quantized

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

FAMILY = "norm"
WIDTH = 8192


def norm(setup: Setup) -> Iterator[Case]:
    rows = setup.rows(16384)
    for width, count in ((WIDTH, rows), (4096, rows)):
        yield from _norms(setup, f"bf16 {count}x{width}", count, width, torch.bfloat16)
    yield from _norms(setup, f"fp32 {rows}x4096", rows, 4096, torch.float32)
    yield from _quantized(setup, rows)
    yield from _small(setup)


def _norms(setup: Setup, what: str, rows: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    x, residual = (setup.randn(rows, width, dtype=dtype, grad=True) for _ in range(2))
    weight, bias = (setup.randn(width, dtype=dtype, grad=True) for _ in range(2))
    size = x.nbytes
    once = (2 * size, "reads x, writes y")
    twice = (4 * size, "reads x and residual, writes y and their sum")
    back = (3 * size, "reads dy and x, writes dx")
    back_sum = (
        4 * size,
        "reads dy, the sum's gradient and the sum, writes one gradient for both inputs",
    )
    if width == WIDTH or dtype == torch.float32:
        functions = contenders(setup, op.layer_norm, layer_norm, _liger("liger_layer_norm"))
        yield from forward_and_backward(
            FAMILY, "layer_norm", f"layer_norm {what}", functions, (x, weight, bias), once, back
        )
        functions = contenders(setup, op.rms_norm, rms_norm, _liger("liger_rms_norm"))
        yield from forward_and_backward(
            FAMILY, "rms_norm", f"rms_norm {what}", functions, (x, weight), once, back
        )
    if dtype != torch.float32:
        functions = contenders(
            setup, op.add_rms_norm, add_rms_norm, _liger("liger_fused_add_rms_norm")
        )
        yield from forward_and_backward(
            FAMILY,
            "add_rms_norm",
            f"add_rms_norm {what}",
            functions,
            (x, residual, weight),
            twice,
            back_sum,
        )
    if width == WIDTH:
        functions = contenders(setup, op.add_layer_norm, add_layer_norm)
        yield from forward_and_backward(
            FAMILY,
            "add_layer_norm",
            f"add_layer_norm {what}",
            functions,
            (x, residual, weight, bias),
            twice,
            back_sum,
        )


def _quantized(setup: Setup, rows: int) -> Iterator[Case]:
    x, weight = setup.randn(rows, WIDTH), setup.randn(WIDTH)
    functions = contenders(setup, norm_quantized.rms_norm_quantized, rms_norm_quantized)
    size = (x.numel() * 3, "reads x, writes a byte an element")
    yield from forward_and_backward(
        FAMILY,
        "rms_norm_quantized",
        f"rms_norm_quantized int8, bf16 {rows}x{WIDTH}",
        functions,
        (x, weight),
        size,
        None,
    )


def _small(setup: Setup) -> Iterator[Case]:
    weight, bias = setup.randn(4096), setup.randn(4096)
    shape = "4096 bf16"
    yield from small_calls(
        setup,
        FAMILY,
        "layer_norm",
        {FLEXOPS: op.layer_norm, TORCH: layer_norm},
        lambda n: (setup.randn(n, 4096), weight, bias),
        shape,
    )
    yield from small_calls(
        setup,
        FAMILY,
        "rms_norm",
        {FLEXOPS: op.rms_norm, TORCH: rms_norm},
        lambda n: (setup.randn(n, 4096), weight),
        shape,
    )
    functions: Functions = {FLEXOPS: op.add_rms_norm, TORCH: add_rms_norm}
    yield from small_calls(
        setup,
        FAMILY,
        "add_rms_norm",
        functions,
        lambda n: (setup.randn(n, 4096), setup.randn(n, 4096), weight),
        shape,
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias), total


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def rms_norm_quantized(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = rms_norm(x, weight).float()
    scale = y.abs().amax(-1, keepdim=True) / 127
    return (y / scale).round().to(torch.int8), scale


def _liger(name: str) -> Functions:
    def adapt(function: Any) -> Any:
        if name == "liger_layer_norm":
            return lambda x, weight, bias: function(x, weight, bias, 1e-5)
        if name == "liger_rms_norm":
            return lambda x, weight: function(x, weight, 1e-6)
        return lambda x, residual, weight: function(x, residual, weight, 1e-6)

    return library("Liger", "liger_kernel.transformers.functional", name, adapt)
