"""The layers of a ``flexops.KVCache`` of 8 or 4 bits: codes, and the newest tokens in 16 bits
(:mod:`flexops.ops.kvcache_codes`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GenerationError
from ..ops import kvcache_codes as ops
from .layers import KVCacheLayer, Store


class Settings(NamedTuple):
    """How tokens are quantized: see ``flexops.KVCache``."""

    bits: int
    group_size: int
    residual_length: int


class CompressedStore(Store):
    """The memory of such a cache. ``keys`` and ``values`` are the rings.

    Attributes:
        codes: of each layer, rings included.
        prompt: inside of :meth:`filling`, how many tokens it has, int64 ``[1]``.
        slots: there, the token that each slot of a ring gets, the same in all layers.
    """

    prompt: Tensor | None = None
    slots: Tensor | None = None

    def __init__(self, layers: int, max_length: int, settings: Settings) -> None:
        super().__init__(layers, max_length)
        self.settings = settings
        self.codes: list[ops.CompressedKVCache | None] = [None] * layers

    def alike(self) -> CompressedStore:
        made = CompressedStore(len(self.keys), self.max_length, self.settings)
        made.keys, made.values, made.codes = self.keys, self.values, self.codes
        return made

    @torch.inference_mode(False)
    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        width = key.shape[-1]
        kernels = not key.is_cuda or width in (64, 128, 256)
        if value.shape[-1] != width or not kernels:
            raise GenerationError(
                f"a KV cache of {self.settings.bits} bits does not support these heads",
                found=f"{width} columns of keys and {value.shape[-1]} of values, on {key.device}",
                required="the same number of both: on a GPU 64, 128 or 256",
                fix="flexops.KVCache(config, max_length, bits=16)",
            )
        try:
            made = ops.make_compressed_cache(
                key.shape[0],
                self.max_length,
                key.shape[1],
                width,
                bits=self.settings.bits,
                group_size=self.settings.group_size,
                residual_length=self.settings.residual_length,
                dtype=key.dtype,
                device=key.device,
            )
        except ValueError as error:
            raise GenerationError(
                "a KV cache cannot be quantized so",
                found=str(error),
                required="head dimensions that are multiples of the group size, or less than it",
                fix="flexops.KVCache(config, max_length, bits=16)",
            ) from error
        self.put(layer, made)
        self._count(key.shape[0], key.device)

    @contextlib.contextmanager
    def filling(self, last: Tensor, order: Tensor | None = None) -> Iterator[None]:
        self.prompt, self.slots = last + 1, None
        try:
            with super().filling(last, order):
                yield
        finally:
            self.prompt = self.slots = None

    def put(self, layer: int, codes: ops.CompressedKVCache) -> None:
        self.codes[layer] = codes
        self.keys[layer], self.values[layer] = codes.recent_k, codes.recent_v


class CompressedLayer(KVCacheLayer):
    """One layer."""

    store: CompressedStore

    def codes(self) -> ops.CompressedKVCache:
        found = self.store.codes[self.index]
        assert found is not None
        return found

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """``[batch, kv_heads, length, head_dim]``, dequantized."""
        return ops.decompress(self.codes(), self.length)[0].transpose(1, 2) if self._there else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return ops.decompress(self.codes(), self.length)[1].transpose(1, 2) if self._there else None

    @property
    def _there(self) -> bool:
        return self.store.codes[self.index] is not None

    def _append(self, key: Tensor, value: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The prompt attends to what was computed; later tokens to what is kept of it."""
        store = self.store
        new = store.ordered(key).transpose(1, 2), store.ordered(value).transpose(1, 2)
        before = None
        if store.prompt is not None:
            if store.slots is None:
                store.slots = ops.slots_of(self.codes(), store.prompt)
            ops.fill_compressed_(self.codes(), *new, store.slots)
        else:
            before = ops.decompress(self.codes(), self.length) if self.length else None
            ops.append_compressed_(self.codes(), *new, self.length)
        self.length = end
        if before is None:
            return key, value
        keys, values = (torch.cat(pair, 1) for pair in zip(before, new, strict=True))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Any, sin: Any, **options: Any
    ) -> Tensor:
        assert self.store.lengths is not None
        return ops.attention_with_compressed_kvcache(
            query,
            self.codes(),
            key,
            value,
            self.store.lengths,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_leftpad=self.store.padding,
            **options,
        )[0]

    def cut(self, length: int) -> None:
        """Tokens that are in the ring again come back from their codes."""
        if self._there and length < self.length:
            codes = self.codes()
            first = codes.coded(length)
            if first < min(length, codes.coded(self.length)):
                slots = torch.arange(first, length, device=codes.recent_k.device)
                slots %= codes.recent_k.shape[1]
                kept = ops.decompress(codes, self.length)
                codes.recent_k[:, slots], codes.recent_v[:, slots] = (
                    x[:, first:length] for x in kept
                )
        self.length = length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._there:
            for kept in self.codes()[:6]:
                kept.copy_(kept.index_select(0, beam_idx.to(kept.device)))

    @torch.inference_mode(False)
    def _replace(self, change: Any) -> None:
        if self._there:
            codes = self.codes()
            self.store.put(self.index, ops.changed(codes, change))

    def clone(self) -> Any:
        if not self._there:
            return None
        codes = self.codes()
        return ops.changed(codes, torch.clone), self.length

    def restore(self, kept: Any) -> None:
        codes, self.length = kept
        self.store.put(self.index, codes)
        self.store._count(codes.recent_k.shape[0], codes.recent_k.device)
