"""``flexops.KVCache``: a cache of static shape for transformers' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from . import recurrent
from .compressed import CompressedLayer, CompressedStore, Settings
from .layers import Cache, KVCacheLayer, Store

KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers that keep keys and values of all tokens; what a layer sees of them is in its
mask, or its window."""


class MixedLayer(recurrent.WithStates, KVCacheLayer):
    """One that keeps states, too."""


class MixedCompressedLayer(recurrent.WithStates, CompressedLayer):
    """One that keeps states, too."""


class KVCache(Cache):
    """Keys and values of all tokens of a batch, in memory of a fixed shape.

    Args:
        config: the model's, as ``model.config``.
        max_length: how many tokens of each sequence there is room for.
        bits: 16: as the model computes them. 8 or 4: codes, keys quantized per channel in groups
            of tokens, values per token in groups of columns
            (:mod:`flexops.ops.kvcache_codes`); the prompt itself attends to what was computed.
        group_size: 32, 64 or 128, with 8 or 4 bits.
        residual_length: at least so many of the newest tokens stay in 16 bits; a multiple of 32.

    Raises:
        GenerationError: no such number, or the model has layers that do not keep keys and values
            of all tokens.

    It goes into ``model.generate(..., past_key_values=cache)`` (from transformers 5.24 on
    ``cache=cache``) and ``model(...)`` of any model with attention only. Memory is allocated by the
    first tokens: of each layer ``2 * batch * max_length * kv_heads * head_dim`` elements of the
    model's dtype, also of layers with a sliding window. Layers of linear attention and convolutions
    keep states, as in transformers' own caches. Copies and pickles hold copies of the tokens.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        max_length: int,
        *,
        bits: int = 16,
        group_size: int = 64,
        residual_length: int = 128,
    ) -> None:
        if bits not in (16, 8, 4):
            raise GenerationError(
                "flexops.KVCache keeps 16, 8 or 4 bits",
                found=f"bits={bits}",
                required="one of them",
            )
        whole = isinstance(residual_length, int) and residual_length >= 32
        if group_size not in (32, 64, 128) or not whole or residual_length % 32:
            raise GenerationError(
                "no such groups of a KV cache",
                found=f"group_size={group_size}, residual_length={residual_length}",
                required="groups of 32, 64 or 128, and a multiple of 32 tokens in 16 bits",
                fix="flexops.KVCache(config, max_length, bits=4)",
            )
        if not isinstance(max_length, int) or max_length < 1:
            raise GenerationError(
                "a KV cache has room for at least one token", found=f"max_length={max_length!r}"
            )
        settings = bits, group_size, residual_length
        self._make(layers_of(config), max_length, settings, mixed_of(config))
        self._keep({i: recurrent.StateLayer(number) for i, number in states_of(config).items()})

    def _make(
        self, layers: int, max_length: int, settings: tuple[int, int, int], mixed: frozenset[int]
    ) -> None:
        """``mixed``: the layers that keep states, too."""
        self.store, self.settings = Store(layers, max_length), settings
        kinds: tuple[type[KVCacheLayer], ...] = KVCacheLayer, MixedLayer
        if settings[0] != 16:
            self.store = CompressedStore(layers, max_length, Settings(*settings))
            kinds = CompressedLayer, MixedCompressedLayer
        self.decoder: Any = None  # what captures steps with it
        self.state: Any = None  # of the model, for which they are captured
        self.grows = False  # later calls may have more tokens than there is room for
        super().__init__(
            layers=[kinds[index in mixed](self.store, index) for index in range(layers)]
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> Any:
        if layer_idx >= len(self.layers):
            raise GenerationError(
                "this KV cache is not for this model",
                found=f"keys and values of layer {layer_idx}, for a cache of {len(self.layers)}",
                required="a cache of the model's own config",
                fix="flexops.KVCache(model.config, max_length=...)",
            )
        return super().update(key_states, value_states, layer_idx, *more, **named)

    def _keep(self, states: dict[int, recurrent.StateLayer]) -> None:
        """Have these layers keep states."""
        self.store.recurrent = states
        for index, layer in states.items():
            if not isinstance(self.layers[index], recurrent.WithStates):
                self.layers[index] = layer

    @property
    def attention(self) -> list[KVCacheLayer]:
        """The layers that keep tokens."""
        return [layer for layer in self.layers if isinstance(layer, KVCacheLayer)]

    @property
    def length(self) -> int:
        return int(self.attention[0].length)

    @property
    def max_length(self) -> int:
        return self.store.max_length

    def advance(self, tokens: int) -> None:
        """Count what steps have appended on the device."""
        for layer in self.attention:
            layer.length += tokens
        for states in self.store.recurrent.values():
            states.said(True)

    def restart(self) -> None:
        """Forget all tokens; the next ones write over what is there."""
        for states in self.store.recurrent.values():
            states.said(False)
        for layer in self.attention:
            layer.cut(0)

    def crop_to(self, length: int) -> None:
        """Forget the tokens behind the first ``length``; states can forget all or none."""
        for layer in self.store.recurrent.values():
            if length == 0:
                layer.reset()
            else:
                layer.crop(min(length - self.length, 0))
        for kept in self.attention:
            kept.cut(min(kept.length, length))

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.attention:
            layer.batch_repeat_interleave(repeats)
        self._replace(lambda kept: kept.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.attention:
            layer.batch_select_indices(indices)
        self._replace(lambda kept: kept[indices.to(kept.device)])

    @torch.inference_mode(False)
    def _replace(self, change: Any) -> None:
        """A store of its own, for tensors of another batch."""
        store = self.store.alike()
        counts = self.store.lengths, self.store.padding, self.store.behind
        store.lengths, store.padding, store.behind = (
            None if one is None else change(one) for one in counts
        )
        store.recurrent = {
            index: layer.changed(change) for index, layer in self.store.recurrent.items()
        }
        self.adopt(store)

    def adopt(self, store: Store) -> None:
        """Keep tokens in that memory from now on."""
        self.store = store
        for layer in self.attention:
            layer.store = store
        self._keep(store.recurrent)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        made = self.__reduce__()
        copied: KVCache = made[0](*made[1])
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        kept = [layer.clone() if isinstance(layer, KVCacheLayer) else None for layer in self.layers]
        mixed = (layer.index for layer in self.attention if isinstance(layer, recurrent.WithStates))
        states = {
            index: layer.changed(torch.clone) for index, layer in self.store.recurrent.items()
        }
        padding = None if self.store.padding is None else self.store.padding.clone()
        return _restore, (self.max_length, self.settings, frozenset(mixed), kept, states, padding)


def _restore(
    max_length: int,
    settings: tuple[int, int, int],
    mixed: frozenset[int],
    kept: list[Any],
    states: dict[int, recurrent.StateLayer],
    padding: Tensor | None,
) -> KVCache:
    cache = KVCache.__new__(KVCache)
    cache._make(len(kept), max_length, settings, mixed)
    cache._keep(states)
    for layer, tensors in zip(cache.layers, kept, strict=True):
        if tensors is not None:
            layer.restore(tensors)
    if padding is not None and cache.store.padding is not None:
        cache.store.padding.copy_(padding)
    return cache


def layers_of(config: Any) -> int:
    """How many layers keep keys and values.

    Raises:
        GenerationError: one of them keeps something else.
    """
    if not hasattr(config, "get_text_config"):
        raise GenerationError(
            "flexops.KVCache is made for a model's config",
            found=type(config).__name__,
            required="a config of transformers",
            fix="flexops.KVCache(model.config, max_length=...)",
        )
    config = config.get_text_config(decoder=True)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"])
    attends = {*KINDS, recurrent.MIXED}.intersection(kinds)
    known = {*KINDS, *recurrent.KINDS} if attends else ()
    other = next((kind for kind in kinds if kind not in known), None)
    if other is not None:
        raise GenerationError(
            f"flexops.KVCache does not support the layers of {type(config).__name__}",
            found=other,
            required=", ".join((*KINDS, *recurrent.KINDS)),
            fix="model.generate(..., cache_implementation='dynamic')",
        )
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return int(config.num_hidden_layers) - shared


def _kinds_of(config: Any) -> list[str]:
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def states_of(config: Any) -> dict[int, int]:
    """Which layers keep states, and how many of each kind."""
    text = config.get_text_config(decoder=True)
    number = int(getattr(text, "number_of_conv_states", 1))
    kinds = enumerate(_kinds_of(config))
    return {index: number for index, kind in kinds if kind in recurrent.KINDS}


def mixed_of(config: Any) -> frozenset[int]:
    """Which of these keep keys and values, too."""
    kinds = enumerate(_kinds_of(config))
    return frozenset(index for index, kind in kinds if kind == recurrent.MIXED)
