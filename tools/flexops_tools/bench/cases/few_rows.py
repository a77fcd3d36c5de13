"""few_rows_linear."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

import flexops

from .case import Case, Functions, Setup, contenders, forward_and_backward

FAMILY = "few_rows"
WIDTH, INNER = 4096, 14336


def few_rows(setup: Setup) -> Iterator[Case]:
    width, inner = setup.rows(WIDTH), setup.rows(INNER)
    functions: Functions = contenders(setup, _ours, _torchs)
    for rows in (1, 8, 16):
        x, gate, up = (setup.randn(count, width).div_(width**0.5) for count in (rows, inner, inner))
        yield from forward_and_backward(
            FAMILY,
            "few_rows_linear",
            f"few_rows_linear silu, bf16 {rows}x{width}, 2x{inner} columns",
            functions,
            (x, gate, up),
            (gate.nbytes + up.nbytes + x.nbytes + 2 * rows * inner, "reads x and the weights"),
            None,
        )


def _ours(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return flexops.few_rows_linear(x, [gate, up], activation="silu")


def _torchs(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)
