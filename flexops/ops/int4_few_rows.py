"""Products of a few rows with weights of 4 bits: :func:`flexops.few_rows_linear` of
:class:`flexops.Int4Weight`. Formulas: :mod:`.few_rows` and :mod:`.int4_linear`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._self_check import Make, checking
from .few_rows import check_rows, compute
from .int4_linear import (
    MOST_STREAMED_ROWS,
    TILE_N,
    Int4Weight,
    check_packed,
    product_reference,
    quantize_int4,
)


def _int4_weights(
    x: Tensor, packed: list[Tensor], scales: list[Tensor], zeros: list[Tensor], activation: int,
    width: int, group_size: int,
) -> list[Int4Weight]:  # fmt: skip
    made: list[Int4Weight] = []
    for one, scale, zero in itertools.zip_longest(packed, scales, zeros):
        rest = width if activation else width - sum(weight.n for weight in made)
        last = activation or len(made) == len(packed) - 1
        n = rest if last else TILE_N * one.shape[0]
        made.append(Int4Weight(one, scale, zero, n, x.shape[-1], group_size))
    return made


def reference(
    x: Tensor, packed: list[Tensor], scales: list[Tensor], zeros: list[Tensor],
    biases: list[Tensor], norm: Tensor | None, eps: float, offset: float, residual: Tensor | None,
    activation: int, width: int, group_size: int, plan: int,
) -> Tensor:  # fmt: skip
    del plan
    weights = _int4_weights(x, packed, scales, zeros, activation, width, group_size)
    products = [
        functools.partial(product_reference, weight=weight, bias=bias)
        for weight, bias in itertools.zip_longest(weights, biases)
    ]
    return compute(x, products, norm, eps, offset, residual, activation)


def check(
    x: Tensor, packed: list[Tensor], scales: list[Tensor], zeros: list[Tensor],
    biases: list[Tensor], norm: Tensor | None, eps: float, offset: float, residual: Tensor | None,
    activation: int, width: int, group_size: int, plan: int,
) -> None:  # fmt: skip
    del norm, eps, offset, residual, plan
    where = "flexops.few_rows_linear"
    if x.numel() > MOST_STREAMED_ROWS * x.shape[-1]:
        raise ValueError(f"{where}: x must have at most {MOST_STREAMED_ROWS} rows")
    check_rows(x, len(packed), len(biases), activation)
    if len(scales) != len(packed) or len(zeros) not in (0, len(packed)):
        raise ValueError(f"{where}: scales and zeros must be as many as weights")
    weights = _int4_weights(x, packed, scales, zeros, activation, width, group_size)
    for i, weight in enumerate(weights):
        check_packed(where, weight)
        if biases and biases[i].shape != (weight.n,):
            raise ValueError(
                f"{where}: biases[{i}] must have shape {[weight.n]}, got {list(biases[i].shape)}"
            )


define(
    "int4_few_rows_linear",
    reference,
    check=check,
    function="few_rows_linear",
)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """A norm, two products with biases, an activation and an addition."""
    half: Any = functools.partial(make, dtype=torch.bfloat16)
    x, norm, residual, biases = half(3, 320), half(320), half(3, 48), [half(48), half(48)]
    weights = [quantize_int4(half(48, 320) / 16) for _ in biases]
    packed, scales, zeros = ([one[i] for one in weights] for i in range(3))
    rest = biases, norm, 1e-6, 0.0, residual, 1, 48, 64, 0
    return torch.ops.flexops.int4_few_rows_linear(x, packed, scales, zeros, *rest)
