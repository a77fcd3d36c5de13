"""Layers of ``flexops.KVCache`` that keep a state in the place of all tokens: linear attention and
convolutions, as transformers has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from .state import ends_of_the_prompt, state

try:
    from transformers import cache_utils as _caches
except ImportError:  # said by .layers
    _caches = None  # type: ignore[assignment]

Base: Any = getattr(_caches, "LinearAttentionLayer", object)
MIXED = "hybrid"
"""What transformers' configs call layers that keep a state and all tokens."""
KINDS = () if Base is object else ("linear_attention", "conv", "moe", "mlp", MIXED)
"""What they call layers that keep a state, or nothing; none in a release that has no such
layers."""


class StateLayer(Base):
    """One such layer. Its states stay where they are, for the graphs that read and write them; they
    cannot forget tokens."""

    is_croppable = False

    @torch.inference_mode(False)
    def lazy_initialization(self, *args: Any, **named: Any) -> None:
        """Make the memory, which steps may write outside of inference mode, too."""
        super().lazy_initialization(*args, **named)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """transformers' method; of tokens that are filled up, the steps before their end are
        kept."""
        named = {"state_idx": state_idx, "conv_kernel_size": conv_kernel_size}
        if state.last is None:
            seen: Tensor = super().update_conv_state(conv_states, **named)
            return seen
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(conv_states=conv_states, **named)
        kept = self.conv_states[state_idx]
        places, before = ends_of_the_prompt(kept.shape[-1])
        if self.has_previous_state[state_idx]:
            conv_states = torch.cat([kept, conv_states], -1)
            places = places + kept.shape[-1]
        index = places.clamp(min=0)[:, None].expand_as(kept)
        torch.gather(conv_states, 2, index, out=kept)
        if not self.has_previous_state[state_idx]:
            kept.masked_fill_(before[:, None], 0)
        self.has_previous_state[state_idx] = True
        return conv_states

    def said(self, there: bool) -> None:
        """Whether there are tokens before the next ones."""
        before: dict[int, bool] = self.has_previous_state
        before.update(dict.fromkeys(before, there))

    def states(self) -> list[Tensor]:
        """Of convolutions and of recurrences, ``[batch, ...]``."""
        kept = *self.conv_states.values(), *self.recurrent_states.values()
        return [one for one in kept if one is not None]

    def remember(self) -> Callable[[], None]:
        """Gives what puts the states back, and where they were."""
        kept = {name: dict(vars(self)[name]) for name in ("conv_states", "recurrent_states")}
        values = [one.clone() for one in self.states()]

        def put_back() -> None:
            self.__dict__.update(kept)
            for to, value in zip(self.states(), values, strict=True):
                to.copy_(value)

        return put_back

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise GenerationError(
                "a KV cache of a model with states cannot forget tokens",
                found=f"crop({tokens_to_remove})",
                required="all tokens, or none after cache.reset()",
                fix="a new flexops.KVCache, or cache_implementation='dynamic'",
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for one in self.states():
            one.copy_(one.index_select(0, beam_idx.to(one.device)))

    def changed(self, change: Callable[[Tensor], Tensor]) -> StateLayer:
        """Another one, with other tensors."""
        made = copy.copy(self)
        for name, kept in vars(self).items():
            if isinstance(kept, dict):
                changed = {
                    key: change(one) if isinstance(one, Tensor) else one
                    for key, one in kept.items()
                }
                setattr(made, name, changed)
        return made


class WithStates:
    """What makes a layer that keeps keys and values one that keeps states, too: it hands on what
    transformers asks of the latter."""

    is_croppable = False
    store: Any
    index: int

    def __getattr__(self, name: str) -> Any:
        if name in ("store", "index") or name.startswith("__"):  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self.store.recurrent[self.index], name)

    def reset(self) -> None:
        self.store.recurrent[self.index].reset()
        super().reset()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        self.store.recurrent[self.index].crop(tokens_to_remove)
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.store.recurrent[self.index].reorder_cache(beam_idx)
        super().reorder_cache(beam_idx)  # type: ignore[misc]


if Base is not object:
    _caches.LinearAttentionCacheLayerMixin.register(WithStates)
