"""Quantization to fp8 and int8 with scales for rows, groups or the tensor, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flexops
from flexops.ops import fp8 as op

from .case import (
    FLEXOPS,
    TORCH,
    Case,
    Function,
    Functions,
    Setup,
    contenders,
    forward_and_backward,
    small_calls,
)

FAMILY = "fp8"
E4M3 = torch.float8_e4m3fn


def fp8(setup: Setup) -> Iterator[Case]:
    rows = setup.rows(16384)
    x = setup.randn(rows, 8192)
    what = f"bf16 {rows}x8192"
    once = (3 * x.numel(), "reads x, writes a byte an element")
    yield from _forward(
        "quantize_fp8",
        f"quantize_fp8 row, {what}",
        contenders(setup, op.quantize_fp8, fp8_rows),
        (x,),
        once,
    )
    yield from _forward(
        "quantize_fp8",
        f"quantize_fp8 group 128, {what}",
        contenders(setup, fp8_groups, torch_fp8_groups),
        (x,),
        once,
    )
    twice = (5 * x.numel(), "reads x twice, writes a byte an element")
    yield from _forward(
        "quantize_fp8",
        f"quantize_fp8 tensor, {what}",
        contenders(setup, fp8_tensor, torch_fp8_tensor),
        (x,),
        twice,
    )
    yield from _forward(
        "quantize_int8",
        f"quantize_int8 {what}",
        contenders(setup, op.quantize_int8, int8_rows),
        (x,),
        once,
    )
    back = (3 * x.numel(), "reads a byte an element, writes x")
    for function, ours, quantized in (
        ("dequantize_fp8", op.dequantize_fp8, op.quantize_fp8(x)),
        ("dequantize_int8", op.dequantize_int8, op.quantize_int8(x)),
    ):
        functions = contenders(setup, _to_bfloat16(ours), torch_dequantize)
        yield from _forward(function, f"{function} row, {what}", functions, quantized, back)
    small: Functions = {FLEXOPS: op.quantize_fp8, TORCH: fp8_rows}
    yield from small_calls(
        setup, FAMILY, "quantize_fp8", small, lambda n: (setup.randn(n, 4096),), "4096 bf16"
    )


def fp8_linear(setup: Setup) -> Iterator[Case]:
    """Gate and up of a Llama of 1.24 B parameters."""
    rows = setup.rows(8192)
    x = setup.randn(rows, 2048, grad=True)
    weight = setup.randn(16384, 2048).mul_(0.02).requires_grad_()
    operations = 2 * rows * weight.numel()
    yield from forward_and_backward(
        "fp8_linear",
        "fp8_linear",
        f"fp8_linear bf16 {rows}x2048 -> 16384",
        {FLEXOPS: flexops.fp8_linear, f"{TORCH} bf16": torch.nn.functional.linear},
        (x, weight),
        (0, ""),
        (0, ""),
        (operations, 2 * operations),
    )


def _forward(
    function: str, name: str, functions: Functions, args: tuple[Any, ...], count: tuple[int, str]
) -> Iterator[Case]:
    yield from forward_and_backward(FAMILY, function, name, functions, args, count, None)


def _to_bfloat16(function: Function) -> Function:
    return lambda values, scales: function(values, scales, torch.bfloat16)


def fp8_groups(x: Tensor) -> Any:
    return op.quantize_fp8(x, scaling="group")


def fp8_tensor(x: Tensor) -> Any:
    return op.quantize_fp8(x, scaling="tensor")


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(E4M3), scale


def torch_fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = fp8_rows(x.unflatten(-1, (-1, 128)))
    return values.flatten(-2), scale.squeeze(-1)


def torch_fp8_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(E4M3), scale


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def torch_dequantize(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() * scales).bfloat16()
