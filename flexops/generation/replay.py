"""A decode step of ``model.generate``, by a graph: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import step
from .cache import KVCache


class Inputs:
    """What a step is given, where the graph reads it."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.tokens = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.positions = torch.zeros((batch, 1), dtype=torch.int64, device=device)


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
        mask: as of transformers, ``[batch, tokens so far]``. It is looked at in the first step
            after a prompt; then it grows by ones, as ``generate`` has it.
        positions: ``[batch or 1, 1]``; None: those of tokens in the cache.
    """
    store, length = cache.store, cache.length
    if tokens.shape[0] != store.batch or store.position is None:
        return None
    with step.untracked():
        if store.known != length and not _look(cache, mask):
            return None
        bucket = step.bucket_of(length + 1, cache.max_length)
        inputs = store.inputs.setdefault("step", Inputs(store.batch, tokens.device))

        def compute() -> Tensor:
            with store.stepping(bucket):
                return step.logits_of(model, forward, cache, inputs.tokens, inputs.positions)

        inputs.tokens.copy_(tokens)
        if positions is None:
            inputs.positions.fill_(length)
        else:
            inputs.positions.copy_(positions)
        key = ("step", cache.state, bucket)
        graph = cache.decoder.captured(store, key, compute, (store.position,))
        if graph is None:
            cache.decoder = None
            return None
        logits: Tensor = graph.replay()
    cache.advance(1)
    store.known = length + 1
    return logits[:, None].clone()


def _look(cache: KVCache, mask: Tensor | None) -> bool:
    """Tell the device how many tokens there are, and which are padding; False if those are not at
    the left."""
    store = cache.store
    store.place(cache.length, mask)
    if mask is None:
        return True
    seen = mask.bool()
    return bool((seen[:, 1:] >= seen[:, :-1]).all()) and seen.shape[1] == cache.length + 1


