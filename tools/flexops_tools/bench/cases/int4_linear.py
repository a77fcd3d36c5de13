"""Products with 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flexops.ops import int4_linear as op

from .case import FLEXOPS, Case, Functions, Setup, forward_and_backward

FAMILY = "int4_linear"


def int4_linear(setup: Setup) -> Iterator[Case]:
    """Beside it torch's product with the same weight in 16 bits, which reads four times as much."""
    for n, k in ((4096, 4096), (setup.rows(28672), 4096), (4096, 14336)):
        dense = setup.randn(n, k)
        weight = op.quantize_int4(dense)
        for rows in (1, 16, 64, 256):
            x = setup.randn(rows, k)
            functions: Functions = {
                FLEXOPS: lambda x, packed, scales, zeros, _, weight=weight: op.int4_linear(
                    x, weight._replace(packed=packed, scales=scales, zeros=zeros)
                ),
                "torch bf16": _dense,
            }
            yield from forward_and_backward(
                FAMILY,
                "int4_linear",
                f"int4_linear group 64, {rows} rows, bf16 {n}x{k}",
                functions,
                (x, *weight[:3], dense),
                (weight.nbytes + 2 * rows * (n + k), "codes, scales, zero points, x and result"),
                None,
                (2 * rows * n * k, 0) if rows > 64 else (0, 0),
            )


def _dense(x: Tensor, *rest: Any) -> Tensor:
    return F.linear(x, rest[-1])
