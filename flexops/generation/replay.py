"""A decode step of ``model.generate``, by a graph: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import step
from .cache import KVCache


def replay(
    model: Any,
    forward: Callable[..., Any],
    cache: KVCache,
    tokens: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
) -> Tensor | None:
    """The logits behind one more token, ``[batch, 1, words]``; None if no graph gives them.

    Args:
        mask: as of transformers, ``[batch, tokens so far]``.
        positions: ``[batch or 1, 1]``, padding left out; None: none is. Both are looked at in the
            first step after a prompt; then one grows by ones, the other is the next, as in
            ``generate``.
    """
    store, length = cache.store, cache.length
    if tokens.shape[0] != store.batch or store.lengths is None:
        return None
    with step.untracked():
        if store.known != length and not _look(cache, mask, positions):
            return None
        bucket = step.bucket_of(length + 1, cache.max_length)
        if "step" not in store.inputs:
            store.inputs["step"] = torch.zeros_like(tokens)
        last = store.inputs["step"]

        def compute() -> Tensor:
            with store.stepping(bucket):
                return step.logits_of(model, forward, cache, last)

        last.copy_(tokens)
        key = ("step", cache.state, bucket)
        graph = cache.decoder.captured(store, key, compute, (store.lengths,))
        if graph is None:
            cache.decoder = None
            return None
        logits: Tensor = graph.replay()
    cache.advance(1)
    store.known = length + 1
    return logits[:, None].clone()


def _look(cache: KVCache, mask: Tensor | None, positions: Tensor | None) -> bool:
    """Tell the device how many tokens there are, and which are padding; False if those are not at
    the left, or positions are not those of tokens behind them."""
    store, length = cache.store, cache.length
    expected: Any = length
    if mask is not None:
        seen = mask.bool()
        if seen.shape[1] != length + 1 or not bool((seen[:, 1:] >= seen[:, :-1]).all()):
            return False
        expected = seen.sum(-1, keepdim=True) - 1
    given = length if positions is None else positions
    if not bool(torch.as_tensor(expected == given).all()):
        return False
    store.place(length, mask)
    return True
