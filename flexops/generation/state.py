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
        last: of a prompt that is filled up at its end, or of several tokens behind one, the place
            of each row's last token, int64 ``[batch or 1]`` on the device: layers keep states of
            these tokens only.
        made: what all layers make of ``last`` alike, by its name and size.
    """

    active = False
    tables: Tables | None = None
    normed: tuple[Tensor, Any, float, float] | None = None
    residual: Tensor | None = None
    projected: tuple[Tensor, dict[int, Tensor]] | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    queue: Any = None
    last: Tensor | None = None
    made: dict[tuple[str, int], Tensor] | None = None


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
    """Inside, layers of this thread compute a prompt, or what follows one, with tokens behind
    it."""
    state.last, state.made = last, {}
    try:
        yield
    finally:
        state.last = state.made = None


def _of_last(name: str, size: int, make: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What ``make`` gives for numbers from 0 to ``size``, ``[size]``, and places of last tokens,
    ``[batch or 1, 1]``; once for all layers."""
    assert state.last is not None
    assert state.made is not None
    if (name, size) not in state.made:
        numbers = torch.arange(size, device=state.last.device)
        state.made[name, size] = make(numbers, state.last[:, None])
    return state.made[name, size]


def behind_the_prompt(length: int) -> Tensor | None:
    """Which of so many tokens are, bool ``[batch or 1, length]``; None outside of a prompt that is
    filled up."""
    if state.last is None:
        return None
    return _of_last("behind", length, lambda places, last: places > last)


def ends_of_the_prompt(size: int) -> tuple[Tensor, Tensor]:
    """Of a prompt that is filled up, the places of its last ``size`` tokens, int64 ``[batch or 1,
    size]``, and which of these are before its first one."""
    places = _of_last("ends", size, lambda numbers, last: numbers + last + 1 - size)
    return places, _of_last("before", size, lambda numbers, last: numbers + last + 1 < size)


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
