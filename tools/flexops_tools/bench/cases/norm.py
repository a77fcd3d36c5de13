"""layer_norm, rms_norm, both with a residual added, and rms_norm with a quantized result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.ops import norm as op
from flexops.ops import norm_quantized

from .case import Case, Family, Functions, Setup, library

WIDTH = 8192


def norm(setup: Setup) -> Iterator[Case]:
    rows, family = setup.rows(16384), Family("norm", setup)
    for width in (WIDTH, 4096):
        yield from _norms(family, f"bf16 {rows}x{width}", rows, width, torch.bfloat16)
    yield from _norms(family, f"fp32 {rows}x4096", rows, 4096, torch.float32)
    x, weight = setup.randn(rows, WIDTH), setup.randn(WIDTH)
    yield from family.passes(
        "rms_norm_quantized",
        f"rms_norm_quantized int8, bf16 {rows}x{WIDTH}",
        (norm_quantized.rms_norm_quantized, rms_norm_quantized),
        (x, weight),
        (x.numel() * 3, "reads x, writes a byte an element"),
    )
    yield from _small(family)


def _norms(family: Family, what: str, rows: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    setup = family.setup
    x, residual = (setup.randn(rows, width, dtype=dtype, grad=True) for _ in range(2))
    weight, bias = (setup.randn(width, dtype=dtype, grad=True) for _ in range(2))
    size = x.nbytes
    once, twice = (
        (2 * size, "reads x, writes y"),
        (4 * size, "reads x and residual, writes y and their sum"),
    )
    back, back_sum = (
        (3 * size, "reads dy and x, writes dx"),
        (4 * size, "reads dy, the sum's gradient and the sum, writes one gradient for both inputs"),
    )
    widest, wide_type = width == WIDTH, dtype == torch.float32
    parts: tuple[tuple[bool, str, Any, tuple[Tensor, ...]], ...] = (
        (widest or wide_type, "layer_norm", layer_norm, (x, weight, bias)),
        (widest or wide_type, "rms_norm", rms_norm, (x, weight)),
        (not wide_type, "add_rms_norm", add_rms_norm, (x, residual, weight)),
        (widest, "add_layer_norm", add_layer_norm, (x, residual, weight, bias)),
    )
    for taken, name, torchs, args in parts:
        if taken:
            functions = (getattr(op, name), torchs, _liger(name))
            count = (twice, back_sum) if name.startswith("add") else (once, back)
            yield from family.passes(name, f"{name} {what}", functions, args, *count)


def _small(family: Family) -> Iterator[Case]:
    row, shape = family.setup.randn, "4096 bf16"
    weight, bias = row(4096), row(4096)
    for name, torchs, more, parameters in (
        ("layer_norm", layer_norm, 0, (weight, bias)),
        ("rms_norm", rms_norm, 0, (weight,)),
        ("add_rms_norm", add_rms_norm, 1, (weight,)),
    ):

        def args(n: int, more: int = more, parameters: tuple[Tensor, ...] = parameters) -> Any:
            return (row(n, 4096), *(row(n, 4096) for _ in range(more)), *parameters)

        yield from family.small(name, getattr(op, name), torchs, args, shape)


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
    liger = {"add_rms_norm": "fused_add_rms_norm"}.get(name, name)
    if name == "add_layer_norm":
        return {}
    eps = 1e-5 if name == "layer_norm" else 1e-6
    return library(
        "Liger",
        "liger_kernel.transformers.functional",
        f"liger_{liger}",
        lambda function: lambda *args: function(*args, eps),
    )
