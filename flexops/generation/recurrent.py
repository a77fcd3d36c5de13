"""Layers of ``flexops.KVCache`` that keep a state in the place of all tokens: linear attention and
convolutions, as transformers has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from .state import state

try:
    from transformers import cache_utils as _caches
except ImportError:  # said by .layers
    _caches = None  # type: ignore[assignment]

Base: Any = getattr(_caches, "LinearAttentionLayer", object)
KINDS = () if Base is object else ("linear_attention", "conv", "moe", "mlp")
"""What transformers' configs call them, and layers that keep nothing; none in a release that has no
such layers."""


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
        """transformers' method; of a prompt that is filled up, the steps before its end are
        kept."""
        named = {"state_idx": state_idx, "conv_kernel_size": conv_kernel_size}
        if state.last is None or self.has_previous_state[state_idx]:
            seen: Tensor = super().update_conv_state(conv_states, **named)
            return seen
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(conv_states=conv_states, **named)
        kept = self.conv_states[state_idx]
        size = kept.shape[-1]
        places = torch.arange(1 - size, 1, device=kept.device) + state.last[:, None]
        index = places.clamp(min=0)[:, None].expand_as(kept)
        kept.copy_(conv_states.gather(2, index).masked_fill((places < 0)[:, None], 0))
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
