"""What the layers of a model tell each other within one decode step, in the thread that takes it.

A layer's code stays as it is: its norm hands on the tensor that it would normalize, and the linear
layers behind it, which know that tensor, normalize it themselves; they also add the residual that
the layer has left here, and attention rotates what it appends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CACHE_LAYER = "_flexops_cache_layer"
"""The attribute by which the keys of a decode step name the layer of their cache."""


def nothing_hidden(like: Tensor) -> Tensor:
    """A mask without elements, of four dimensions: transformers hands it on as it is, and our
    attention takes it for "the model's own pattern, no padding". So nothing has to be looked at to
    know that, which would wait for the GPU, and under ``torch.compile`` make the whole mask."""
    return like.new_empty((0, 0, 0, 0), dtype=torch.bool)


class Tables:
    """Cosines and sines of all positions, of each rotary embedding of a model; made in the first
    step, which no graph captures.

    Args:
        length: how many positions.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._made: dict[Any, Tensor] = {}

    def of(self, key: Any, like: Tensor, make: Callable[[Tensor], Any]) -> Tensor:
        """``[positions, 2 rotary_dim]``, cosines and then sines, from what ``make`` gives for
        positions ``[1, length]``."""
        if key not in self._made:
            positions = torch.arange(self.length, device=like.device)[None]
            self._made[key] = torch.cat(make(positions), -1)[0]
        return self._made[key]


class State(threading.local):
    """What one layer tells the next, in the thread that takes the step.

    Attributes:
        active: whether the thread is in a step.
        normed: a tensor and the norm that it still lacks, with its ``eps`` and ``offset``.
        residual: what the next product that ends a block adds.
        projected: what the projections of an attention made of a tensor, by their ids.
        rotary: cosines and sines by which the next attention rotates query and key.
        queue: what products are recorded in (:mod:`.chain`); None: they compute.
        last: of a prompt that is filled up at its end, the place of each row's last token, int64
            ``[batch or 1]`` on the device: layers keep states of these tokens only.
    """

    active = False
    tables: Tables | None = None
    normed: tuple[Tensor, Any, float, float] | None = None
    residual: Tensor | None = None
    projected: tuple[Tensor, dict[int, Tensor]] | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    queue: Any = None
    last: Tensor | None = None


state = State()


@contextlib.contextmanager
def step(tables: Tables | None) -> Iterator[None]:
    """Inside, layers of this thread compute a decode step; without tables, they rotate before
    attention."""
    state.active, state.tables = True, tables
    try:
        yield
    finally:
        state.active, state.tables = False, None
        state.normed = state.residual = state.projected = state.rotary = state.queue = None


@contextlib.contextmanager
def filled(last: Tensor) -> Iterator[None]:
    """Inside, layers of this thread compute a prompt with tokens behind it."""
    state.last = last
    try:
        yield
    finally:
        state.last = None


def behind_the_prompt(length: int) -> Tensor | None:
    """Which of so many tokens are, bool ``[batch or 1, length]``; None outside of a prompt that is
    filled up."""
    if state.last is None:
        return None
    return torch.arange(length, device=state.last.device) > state.last[:, None]


def tables() -> Tables | None:
    """Of rotary embeddings, in a step."""
    return state.tables


def rotate_later(cos: Tensor, sin: Tensor) -> None:
    """Have the next attention rotate, by such tables, ``[positions, rotary_dim / 2]``."""
    state.rotary = cos, sin


def take_rotary() -> tuple[Tensor, Tensor] | None:
    """What attention rotates by."""
    found, state.rotary = state.rotary, None
    return found


def is_unfinished() -> bool:
    """Whether a layer has left something to another that did not come."""
    return state.rotary is not None or state.residual is not None
