"""What layers do within one decode step of :mod:`flexops.generation`: products of few rows, with the
norm before and the residual's addition behind them.

A layer's code stays as it is: its norm hands on the tensor that it would normalize, and the linear
layers behind it, which know that tensor, normalize it themselves; they also add the residual that
the layer has left here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch import is_unheard
from ..ops import few_rows
from .linears import is_bare

_ACTIVATIONS = {"silu": "silu", "none": "gelu", "tanh": "gelu_tanh"}
_HALVES = (torch.bfloat16, torch.float16)


class Tables:
    """Cosines and sines of all positions, of each rotary embedding of a model; made in the first
    step, which no graph captures.

    Args:
        length: how many positions.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    def of(self, key: Any, like: Tensor, make: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
        """``[positions, rotary_dim]``, from what ``make`` gives for positions ``[1, length]``."""
        if key not in self._made:
            positions = torch.arange(self.length, device=like.device)[None]
            cos, sin = (one[0].contiguous() for one in make(positions))
            self._made[key] = cos, sin
        return self._made[key]


class Step(threading.local):
    """What one layer tells the next, in the thread that takes the step.

    Attributes:
        active: whether the thread is in a step.
        normed: a tensor and the norm that it still lacks, with its ``eps`` and ``offset``.
        residual: what the next product that ends a block adds.
        rotary: cosines and sines by which the next attention rotates query and key.
    """

    active = False
    tables: Tables | None = None
    normed: tuple[Tensor, Any, float, float] | None = None
    residual: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None


_step = Step()


@contextlib.contextmanager
def step(tables: Tables) -> Iterator[None]:
    """Inside, layers of this thread compute a decode step."""
    _step.active, _step.tables = True, tables
    try:
        yield
    finally:
        _step.active, _step.tables = False, None
        _step.normed = _step.residual = _step.rotary = None


def is_step() -> bool:
    return _step.active


def tables() -> Tables | None:
    """Of rotary embeddings, in a step."""
    return _step.tables


def rotate_later(cos: Tensor, sin: Tensor) -> None:
    """Have the next attention rotate, by such tables, ``[positions, rotary_dim / 2]``."""
    _step.rotary = cos, sin


def take_rotary() -> tuple[Tensor, Tensor] | None:
    """What attention rotates by."""
    found, _step.rotary = _step.rotary, None
    return found


def is_unfinished() -> bool:
    """Whether a layer has left something to another that did not come."""
    return _step.rotary is not None or _step.residual is not None


def takes(x: Tensor, *linears: Any) -> bool:
    """Whether ``product`` computes these layers of ``x``, in a step."""
    return (
        _step.active
        and x.numel() <= few_rows.MOST_ROWS * x.shape[-1]
        and all(
            is_bare(one) and one.weight.dtype == x.dtype and one.weight.is_contiguous()
            for one in linears
        )
        and len({one.bias is None for one in linears}) == 1
        and not torch.is_autocast_enabled(x.device.type)
    )


def without_norm(x: Tensor, norm: Any, wanted: bool) -> Tensor:
    """``norm(x)``; or, if wanted and it can be, x itself for products that normalize it."""
    ours = norm.__dict__.get("forward")
    known = isinstance(ours, functools.partial) and ours.func.__name__ == "rms_norm"
    # a product of float16 numbers and a norm's weights might overflow
    if not (wanted and known and x.dtype != torch.float16 and norm.weight.dtype == x.dtype):
        normed: Tensor = norm(x)
        return normed
    if not is_unheard(norm):
        normed = norm(x)
        return normed
    assert isinstance(ours, functools.partial)
    alias = x.view_as(x)
    _step.normed = (alias, norm.weight, ours.keywords["eps"], ours.keywords["offset"])
    return alias


@contextlib.contextmanager
def leaving(residual: Tensor, wanted: bool) -> Iterator[Callable[[Tensor], Tensor]]:
    """Have the product that ends the block within add this, if wanted; gives what adds it to the
    block's result otherwise."""
    _step.residual = residual if wanted else None

    def add(x: Tensor) -> Tensor:
        added = wanted and _step.residual is None
        return x if added else residual + x

    yield add
    _step.residual = None


def product(
    x: Tensor, linears: tuple[Any, ...], activation: str | None = None, ends: bool = False
) -> Tensor:
    """Linear layers of one input side by side, or the gated product of two.

    Args:
        activation: as patterns name it: ``silu``, ``none`` or ``tanh``.
        ends: it ends a block: what was left by :func:`leave` is added.
    """
    weights = [one.weight for one in linears]
    biases = [one.bias for one in linears if one.bias is not None]
    norm, eps, offset = None, 0.0, 0.0
    if _step.normed is not None and _step.normed[0] is x:
        _, norm, eps, offset = _step.normed
    residual = None
    if ends:
        residual, _step.residual = _step.residual, None
    kind = None if activation is None else _ACTIVATIONS[activation]
    compute = (
        few_rows.few_rows_linear
        if x.dtype in _HALVES and x.device.type == "cuda"
        else few_rows.composed
    )
    return compute(
        x, weights, biases, norm=norm, eps=eps, offset=offset, activation=kind,
        residual=residual, early=True,
    )  # fmt: skip
