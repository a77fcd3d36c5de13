"""rotary_embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexops.ops import rope as op

from .case import Case, Family, Function, Setup, library

HEADS, KEY_HEADS, SIZE = 32, 8, 128


def rope(setup: Setup) -> Iterator[Case]:
    length, family = setup.rows(4096), Family("rope", setup)
    query, key = (setup.randn(4, heads, length, SIZE, grad=True) for heads in (HEADS, KEY_HEADS))
    liger = library("Liger", "liger_kernel.transformers.functional", "liger_rope", _liger)
    name, count = (
        "rotary_embedding",
        (
            2 * (query.nbytes + key.nbytes),
            "reads and writes query and key",
        ),
    )
    what = f"{name} q bf16 4x{HEADS}x{length}x{SIZE}, k {KEY_HEADS} heads"
    functions, args = (op.rotary_embedding, rotate, liger), (query, key, *tables(setup, length))
    yield from family.passes(name, what, functions, args, count, count)
    cos, sin = tables(setup, 64)

    def few(rows: int) -> tuple[Tensor, ...]:
        queries, keys = (setup.randn(1, heads, rows, SIZE) for heads in (HEADS, KEY_HEADS))
        return queries, keys, cos[:rows], sin[:rows]

    shape = f"{HEADS} and {KEY_HEADS} heads of {SIZE} bf16"
    yield from family.small(name, op.rotary_embedding, rotate, few, shape)


def tables(setup: Setup, length: int) -> tuple[Tensor, Tensor]:
    frequencies = 1e4 ** (-torch.arange(0, SIZE, 2, device=setup.device) / SIZE)
    angles = torch.outer(torch.arange(length, device=setup.device), frequencies)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As Hugging Face's models have it."""
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return query * cos + _half_turn(query) * sin, key * cos + _half_turn(key) * sin


def _half_turn(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


def _liger(function: Function) -> Function:
    def call(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return function(
            query, key, torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
        )

    return call
