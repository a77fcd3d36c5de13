"""A prompt: filled up at its end to one of few lengths, and from the second of a length on computed
by a CUDA graph. The host takes longer to launch the kernels of a short prompt than a GPU takes to
compute them.

Tokens behind a prompt must not change its logits, nor the states that layers keep, which is
measured once for a model. Prompts with padding at their left are computed without it, and their
keys and values put where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import state, step
from .cache import KVCache
from .names import cache_name
from .state import nothing_hidden

MOST_TOKENS, MOST_WITH_STATES = 2048, 4096
"""Of a batch; with more, a GPU computes for as long as the host takes. Layers that keep states have
more kernels."""
_MOST_PADDED = 16
"""Prompts with padding: logits are computed behind the end of each in all of them."""
_MEASURED = 32
_ROUNDING = 0.25


def filled_length(tokens: int) -> int:
    """How many tokens a prompt of so many is filled up to."""
    granule = 32 if tokens <= 256 else 64 if tokens <= 512 else 128
    return -(-tokens // granule) * granule


def logits_of(
    model: Any,
    forward: Callable[..., Any],
    cache: KVCache,
    tokens: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    keep: int,
) -> Tensor | None:
    """The logits behind a prompt, ``[batch, 1, words]``, whose keys and values the empty cache then
    has; None, and an empty cache, if the prompt cannot be filled up.

    Args:
        tokens: ``[batch, length]``.
        mask: as of transformers, ``[batch, length]``.
        positions: ``[batch or 1, length]``, padding left out; None: none is padding.
        keep: behind how many tokens logits are asked for: 1, or None is given.
    """
    store, decoder = cache.store, cache.decoder
    batch, length = tokens.shape
    filled = filled_length(length)
    most = MOST_WITH_STATES if store.recurrent else MOST_TOKENS
    if keep != 1 or batch * filled > most or filled > room_of(model, cache):
        return None
    if store.batch not in (-1, batch):
        return None
    if decoder.refused or step.is_capturing(tokens):
        return None

    def compute(ids: Tensor, last: Tensor, starts: Tensor | None = None) -> Tensor:
        cache.restart()
        named = {cache_name(): cache, "use_cache": True}
        with state.filled(last):
            if starts is None:
                with store.filling(last):
                    return _logits(model, forward, ids, last, named)
            order = (torch.arange(filled, device=ids.device) - starts[:, None]).clamp(min=0)
            with store.filling((last + starts)[:1], order):
                return _logits(model, forward, ids, last, named).diagonal().T[:, None]

    with step.untracked():
        starts = _starts(tokens, mask, positions)
        if starts is None or not can_fill(model, forward, cache):
            return None
        padded = any(starts)
        if padded and batch > _MOST_PADDED:
            return None
        given = _moved(tokens, starts, filled) if padded else filled_up(tokens, filled)
        key = ("prompt", cache.state, filled, padded)
        if key not in store.seen:
            store.seen.add(key)
            logits = compute(*given)
        else:
            kept = store.inputs.setdefault(f"prompt of {filled}, padded: {padded}", given)
            for to, new in zip(kept, given, strict=True):
                to.copy_(new)
            assert store.lengths is not None
            graph = decoder.captured(store, key, lambda: compute(*kept), (store.lengths,))
            cache.restart()
            if graph is None:
                decoder.fills[cache.state] = False
                return None
            logits = graph.replay().clone()
    cache.restart()
    cache.advance(length)
    return logits


def room_of(model: Any, cache: KVCache) -> int:
    """How many tokens there may be: learned positions have an end, too."""
    text = model.config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    return min(most, cache.max_length) if isinstance(most, int) else cache.max_length


def filled_up(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens with copies of the last one behind them, ``[batch, length]``, and where that is."""
    new = tokens.shape[1]
    padded = torch.cat((tokens, tokens[:, -1:].expand(-1, length - new)), 1)
    return padded, torch.full((1,), new - 1, device=tokens.device)


def _moved(tokens: Tensor, starts: list[int], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of tokens that begin at ``starts``, moved to the left, with where each one's last
    token then is, and with ``starts``."""
    first, end = torch.tensor(starts, device=tokens.device), tokens.shape[1] - 1
    order = torch.arange(length, device=tokens.device) + first[:, None]
    return tokens.gather(1, order.clamp(max=end)), end - first, first


def _logits(
    model: Any, forward: Callable[..., Any], tokens: Tensor, last: Tensor, named: dict[str, Any]
) -> Tensor:
    hides = {"attention_mask": nothing_hidden(tokens), "return_dict": True}
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    places = {"position_ids": positions} if step.reads_pictures(model) else {}
    output = forward(input_ids=tokens, logits_to_keep=last, **hides, **places, **named)
    found: Tensor = output.logits
    return found


def _starts(tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int] | None:
    """How many tokens at the left of each prompt are padding; None if others are, too, or positions
    are not those of the prompts' own tokens."""
    batch, length = tokens.shape
    if mask is None and positions is None:
        return [0] * batch
    places = torch.arange(length, device=tokens.device)
    seen = torch.ones_like(tokens) if mask is None else mask
    given = places[None] if positions is None else positions
    if seen.shape != tokens.shape or given.shape[-2:] not in ((1, length), tokens.shape):
        return None
    starts = length - seen.bool().sum(-1)
    own = places - starts[:, None]
    usual = (seen.bool() == (own >= 0)) & (own[:, -1:] >= 0) & ((given == own) | (own < 0))
    found: list[int] = starts.where(usual.all(), -1).tolist()
    return None if -1 in found else found


def can_fill(model: Any, forward: Callable[..., Any], cache: KVCache) -> bool:
    """Whether a model's tokens can be filled up: others behind them change neither their logits nor
    what layers keep of them."""
    fills, known = cache.decoder.fills, cache.state
    if known not in fills:
        usual = not step.depends_on_length(model) and model._supports_logits_to_keep()
        length = min(_MEASURED, room_of(model, cache))
        fills[known] = usual and _hides_the_rest(model, forward, cache, length)
    return bool(fills[known])


def _hides_the_rest(model: Any, forward: Callable[..., Any], cache: KVCache, length: int) -> bool:
    """Whether so many tokens do not change the logits before them, nor states."""
    words = model.config.get_text_config(decoder=True).vocab_size
    one = torch.arange(length, device=model.device)[None] % words
    other = one.clone()
    half = length // 2
    other[:, half:] = (one[:, half:] + 1) % words
    last = torch.full((1,), half - 1, device=model.device)
    found = [_logits(model, forward, tokens, last, {"use_cache": False}) for tokens in (one, other)]
    if not torch.equal(*found) or not cache.store.recurrent:
        return torch.equal(*found)
    for before in (None, one[:, :half]):  # at the beginning, and behind other tokens
        with state.filled(last):
            pairs = [_states(model, forward, tokens, last, before) for tokens in (one, other)]
        alone = _states(model, forward, one[:, :half], last, before)
        if not all(map(torch.equal, *pairs)) or not all(map(_is_near, pairs[0], alone)):
            return False
    return True


def _states(
    model: Any, forward: Callable[..., Any], tokens: Tensor, last: Tensor, before: Tensor | None
) -> list[Tensor]:
    """What layers keep of tokens, behind those ``before`` them, which are as many as ``last``
    says."""
    cache = KVCache(model.config, 2 * tokens.shape[1])
    named = {cache_name(): cache, "use_cache": True}
    for part in (before, tokens):
        if part is not None:
            _logits(model, forward, part, last, named)
    return cache.store.states()


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether the same was computed, of which products of other sizes are rounded otherwise."""
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= _ROUNDING * other.norm())
