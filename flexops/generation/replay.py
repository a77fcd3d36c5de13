"""A step of ``model.generate``, by a graph: tokens behind those of the cache in, logits out. There
are several tokens where candidates are tried, and where a conversation goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import prompt, state, step
from .cache import KVCache
from .layers import Store

MOST_TOKENS = 256
"""Of a batch; more are computed as the model's code does."""
_CANDIDATES = 32
"""Up to so many tokens are captured at once: candidates come again and again."""


def width_of(tokens: int) -> int:
    """How many tokens a step of so many is filled up to."""
    if tokens > _CANDIDATES:
        return prompt.filled_length(tokens)
    return 1 << (tokens - 1).bit_length()


def replay(
    model: Any,
    forward: Callable[..., Any],
    cache: KVCache,
    tokens: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    keep: int,
) -> Tensor | None:
    """The logits behind more tokens, ``[batch, new, words]``; None if no graph gives them.

    Args:
        tokens: ``[batch, new]``.
        mask: as of transformers, ``[batch, tokens so far]``.
        positions: ``[batch or 1, new]``, or several such for sections of a head, before three of
            which is one for masks, growing by ones; None: those of all tokens. Both are looked
            at where there are several tokens, and in the first step after a prompt; then one grows
            by ones, the other is the next, as in ``generate``.
        keep: behind how many of the new tokens; 0: all.
    """
    store, length, new = cache.store, cache.length, tokens.shape[1]
    width = width_of(new)
    if tokens.shape[0] != store.batch or store.lengths is None:
        return None
    if width == 1:
        fits = length < cache.max_length
    else:
        few = tokens.numel() <= MOST_TOKENS and type(store) is Store
        fits = few and length + width <= prompt.room_of(model, cache)
    if not fits:
        return None
    with step.untracked():
        if width > 1 and not prompt.can_fill(model, forward, cache):
            return None
        if (width > 1 or store.known != length) and not _look(cache, mask, positions, new):
            return None
        bucket = step.bucket_of(length + width, cache.max_length)
        given = prompt.filled_up(tokens, width) if width > 1 else (tokens,)
        name = f"step of {width}"
        if name not in store.inputs:
            store.inputs[name] = tuple(map(torch.clone, given))
        kept = store.inputs[name]
        named = {"logits_to_keep": kept[1]} if width > 1 and keep == 1 else {}

        def compute() -> Tensor:
            filled = state.filled(kept[1]) if width > 1 else contextlib.nullcontext()
            with store.stepping(bucket), filled:
                return step.logits_of(model, forward, cache, kept[0], **named)

        for to, one in zip(kept, given, strict=True):
            to.copy_(one)
        kind = "step" if width == 1 else "chunk"
        key = (kind, cache.state, width, len(named), bucket, store.shifted)
        if width > _CANDIDATES and key not in store.seen:
            store.seen.add(key)
            logits = compute()
        else:
            graph = cache.decoder.captured(store, key, compute, (store.lengths,))
            if graph is None:
                _give_up(cache, width)
                return None
            logits = graph.replay().clone()
    cache.advance(new)
    store.known = length + new if new == width else -1
    return logits if named else logits[:, new - min(keep or new, new) : new]


def _give_up(cache: KVCache, width: int) -> None:
    """Capture has failed."""
    if width == 1:
        cache.decoder = None
    else:
        cache.decoder.fills[cache.state] = False
        cache.store.known = -1


def _look(cache: KVCache, mask: Tensor | None, positions: Tensor | None, new: int) -> bool:
    """Tell the device how many tokens there are, which are padding, and their positions; False if
    padding is not at the left, or positions do not grow by ones."""
    store, length = cache.store, cache.length
    expected: Any = length
    if mask is not None:
        seen = mask.bool()
        if seen.shape[1] != length + new or not bool((seen[:, 1:] >= seen[:, :-1]).all()):
            return False
        expected = seen.sum(-1, keepdim=True) - new
    assert store.lengths is not None
    following = torch.arange(new, device=store.lengths.device)
    given = (length + following)[None] if positions is None else positions
    sections = given[1:] if given.dim() == 3 and given.shape[0] == 4 else given
    if given.shape[-1] != new:
        return False
    given = sections[0] if sections.dim() == 3 else sections
    begins = given[:, :1]
    grows, usual = torch.stack(
        ((sections == begins + following).all(), (begins == expected).all())
    ).tolist()
    if not grows:
        return False
    store.place(length, mask, None if usual else length - begins.flatten())
    return True
