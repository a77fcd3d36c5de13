"""The layers of ``flexops.KVCache``, and their memory: 16 bits, of static shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from ..ops.kvcache_attention import attention_with_kvcache
from .recurrent import StateLayer
from .state import CACHE_LAYER, Tables, state

try:
    from transformers.cache_utils import Cache as Cache
    from transformers.cache_utils import CacheLayerMixin
except ImportError as error:
    raise GenerationError(
        "flexops.KVCache is a cache of transformers, which cannot be imported",
        found=str(error),
        required="transformers 5",
        fix="pip install 'transformers>=5'",
    ) from error


class Store:
    """The memory of a cache, which outlives it where CUDA graphs point into it.

    Attributes:
        keys, values: of each layer ``[batch, max_length, kv_heads, head_dim]``.
        recurrent: by their index, layers that keep states in their place.
        lengths: int32 ``[batch]``, on the device: where a decode step appends.
        padding: int32 ``[batch]``, on the device: how many tokens at the left take no part.
        behind: int32 ``[batch]``, on the device: how far positions are behind the tokens' places.
        shifted: whether that is not the padding, as where pictures take fewer positions.
        bucket: how many tokens a decode step looks at; 0 outside of a step.
        busy: whether a prompt or a step is computed.
        known: how many tokens the device counts; -1: it was not told.
        graphs: captured prompts and steps.
        seen: prompts that may be captured when they come again.
        inputs: what they read, by the kind of step.
        order: inside of :meth:`filling`, int64 ``[batch, tokens]``: the token that is kept at each
            place; None: they are kept as they come.
        tables: of rotary embeddings.
        workspace: of the kernel for several products (:mod:`.chain`).
    """

    def __init__(self, layers: int, max_length: int) -> None:
        self.max_length = max_length
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.recurrent: dict[int, StateLayer] = {}
        self.lengths: Tensor | None = None
        self.padding: Tensor | None = None
        self.behind: Tensor | None = None
        self.shifted = False
        self.bucket, self.known, self.busy = 0, -1, False
        self.graphs: dict[Any, Any] = {}
        self.seen: set[Any] = set()
        self.inputs: dict[str, Any] = {}
        self.order: Tensor | None = None
        self.tables = Tables(max_length)
        self.workspace: Tensor | None = None
        self._pool: Any = None

    @torch.inference_mode(False)
    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Make a layer's memory for such keys and values, ``[batch, kv_heads, length, head_dim]``.
        It has no garbage: a NaN would pass through a mask."""
        self.keys[layer], self.values[layer] = (
            torch.zeros(
                (x.shape[0], self.max_length, x.shape[1], x.shape[3]),
                dtype=x.dtype,
                device=x.device,
            )
            for x in (key, value)
        )
        self._count(key.shape[0], key.device)

    def _count(self, batch: int, device: torch.device) -> None:
        if self.lengths is None:
            made = torch.zeros((3, batch), dtype=torch.int32, device=device)
            self.lengths, self.padding, self.behind = made

    def alike(self) -> Store:
        """Another one, for tensors of another batch; the layers' memory is this one's until they
        have replaced it."""
        made = Store(len(self.keys), self.max_length)
        made.keys, made.values = self.keys, self.values
        return made

    def states(self) -> list[Tensor]:
        """Of layers that keep some."""
        return [one for layer in self.recurrent.values() for one in layer.states()]

    @property
    def batch(self) -> int:
        """-1 before the first tokens."""
        return -1 if self.padding is None else self.padding.shape[0]

    def place(self, length: int, mask: Tensor | None, behind: Tensor | None = None) -> None:
        """Tell the device how many tokens there are, how many zeros each row of a mask has, and how
        far positions are behind places; None: by those zeros."""
        assert self.lengths is not None
        assert self.padding is not None
        assert self.behind is not None
        self.lengths.fill_(length)
        self.padding.copy_((mask == 0).sum(-1)) if mask is not None else self.padding.zero_()
        self.behind.copy_(self.padding if behind is None else behind)
        self.shifted = behind is not None
        self.known = length

    def clear(self) -> None:
        """For other tokens: what is there might hold a NaN."""
        kept = [one for one in (*self.keys, *self.values) if one is not None]
        if kept:
            torch._foreach_zero_(kept)
        for layer in self.recurrent.values():
            layer.reset()
        self.known = -1

    @torch.inference_mode(False)
    def grow(self, max_length: int, length: int) -> None:
        """Make room for more tokens, with the first ``length`` of those that are there."""
        kept = list(zip(self.keys, self.values, strict=True))
        self.max_length, self.known = max_length, -1
        self.tables, self.workspace, self._pool = Tables(max_length), None, None
        for captured in (self.graphs, self.seen, self.inputs):
            captured.clear()
        for layer, (keys, values) in enumerate(kept):
            if keys is not None and values is not None:
                self.allocate(layer, keys.transpose(1, 2), values.transpose(1, 2))
                for new, old in ((self.keys[layer], keys), (self.values[layer], values)):
                    assert new is not None
                    new[:, :length] = old[:, :length]

    def pool(self) -> Any:
        """Of the memory of all its graphs: they run one after another."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def leave_pool(self) -> None:
        """After a capture that has failed: torch takes it for being captured into."""
        self._pool = None

    @contextlib.contextmanager
    def stepping(self, bucket: int) -> Iterator[None]:
        """Inside, layers append at ``lengths`` and attend to at most ``bucket`` tokens."""
        self.bucket, self.busy = bucket, True
        try:
            yield
        finally:
            self.bucket, self.busy = 0, False

    @contextlib.contextmanager
    def filling(self, last: Tensor, order: Tensor | None = None) -> Iterator[None]:
        """Inside, layers get a prompt, and tokens behind it, which steps write over: the prompt's
        last place is number ``last``, int64 ``[1]`` on the device. ``order``: see there."""
        del last
        self.order, self.busy = order, True
        try:
            yield
        finally:
            self.order, self.busy = None, False

    def ordered(self, new: Tensor) -> Tensor:
        """Keys or values of new tokens, ``[batch, kv_heads, tokens, head_dim]``, as they are
        kept."""
        if self.order is None:
            return new
        return new.gather(2, self.order[:, None, :, None].expand_as(new))


class KVCacheLayer(CacheLayerMixin):
    """One layer of a :class:`KVCache`."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, store: Store, index: int) -> None:
        self.store, self.index, self.length = store, index, 0
        self.pending = False

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.store.keys[self.index] is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """``[batch, kv_heads, length, head_dim]``, a view."""
        return self._seen(self.store.keys[self.index])

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._seen(self.store.values[self.index])

    def _seen(self, kept: Tensor | None) -> Tensor | None:
        return None if kept is None else kept[:, : self.length].transpose(1, 2)

    @property
    def batch_size(self) -> int:
        kept = self.store.keys[self.index]
        return -1 if kept is None else kept.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.store.allocate(self.index, key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, new, head_dim]``; returns what the layer attends to, as views
        of that layout.

        Raises:
            GenerationError: the cache is full, or has another batch, shape, dtype or device.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.store.keys[self.index], self.store.values[self.index]
        assert keys is not None
        assert values is not None
        self._check(keys, key_states, "keys")
        self._check(values, value_states, "values")
        if self.store.bucket:  # `attend` does the rest
            self.pending = True
            setattr(key_states, CACHE_LAYER, self)
            return key_states, value_states
        end = self.length + key_states.shape[2]
        if end > self.store.max_length:
            raise GenerationError(
                "the KV cache is full",
                found=f"{self.length} tokens in it and {key_states.shape[2]} new ones",
                required=f"at most {self.store.max_length}, its max_length",
                fix="flexops.KVCache(config, max_length=<tokens of the prompt and all new ones>),"
                f" {end} or more, or fewer new tokens",
            )
        return self._append(key_states, value_states, end)

    def _append(self, key: Tensor, value: Tensor, end: int) -> tuple[Tensor, Tensor]:
        for kept, new in zip(self._kept(), (key, value), strict=True):
            kept[:, self.length : end].copy_(self.store.ordered(new).transpose(1, 2))
        self.length = end
        if self.store.order is not None:
            return key, value
        keys, values = (kept[:, :end].transpose(1, 2) for kept in self._kept())
        return keys, values

    def _check(self, kept: Tensor, new: Tensor, name: str) -> None:
        if kept.shape[0] != new.shape[0]:
            raise GenerationError(
                "the batch of a KV cache is that of its first tokens",
                found=f"{name} of {new.shape[0]} sequences, for a cache of {kept.shape[0]}",
                required="the same number of sequences in every call",
                fix="a new flexops.KVCache, or cache.batch_select_indices(...) or"
                " cache.batch_repeat_interleave(...) before the call",
            )
        if (kept.device, kept.dtype, kept.shape[2::]) != (
            new.device,
            new.dtype,
            (new.shape[1], new.shape[3]),
        ):
            raise GenerationError(
                "these tokens do not belong to this KV cache",
                found=f"{name} of {new.shape[1]} heads of {new.shape[3]}, {new.dtype}, on"
                f" {new.device}",
                required=f"{kept.shape[2]} heads of {kept.shape[3]}, {kept.dtype}, on"
                f" {kept.device}, as of its first tokens",
                fix="a new flexops.KVCache after a model was moved or changed",
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float,
        sinks: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Append tokens and attend, without knowing on the host how many there are.

        Args:
            query: ``[batch, heads, new, head_dim]``; ``key`` and ``value`` of the new tokens, with
                ``kv_heads``.
            window: how many tokens each sees, with itself; None: all.
            rotary: tables of cosines and sines, ``[positions, rotary_dim / 2]``, where query and
                key are not rotated yet.

        Returns:
            ``[batch, new, heads, head_dim]``.
        """
        self.pending = False
        cos, sin = rotary if rotary is not None else (None, None)
        return self._attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            cos,
            sin,
            softmax_scale=scale,
            window_size=(-1 if window is None else window - 1, -1),
            softcap=softcap,
            rotary_interleaved=False,
            rotary_from_leftpad=True,
            early=True,
            sinks=sinks,
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Any, sin: Any, **options: Any
    ) -> Tensor:
        keys, values = (kept[:, : self.store.bucket] for kept in self._kept())
        several = query.shape[1] > 1
        special = several or options["softcap"] != 0.0 or options["sinks"] is not None
        if state.queue is not None and not special:
            rotary = None if cos is None else (cos, sin)
            lengths = self.store.lengths, self.store.padding
            given = query, key, value, keys, values, rotary, lengths
            numbers = options["softmax_scale"], options["window_size"][0]
            made: Tensor | None = state.queue.attend(*given, *numbers)
            if made is not None:
                return made
        result = attention_with_kvcache(
            query,
            keys,
            values,
            key,
            value,
            cos,
            sin,
            cache_seqlens=self.store.lengths,
            cache_leftpad=self.store.padding,
            causal=several,
            **options,
        )
        assert isinstance(result, Tensor)
        return result

    # ---- what transformers asks of a layer -------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.store.max_length

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove so many tokens (transformers counts them below 0), or all behind that many
        (above 0)."""
        if tokens_to_remove > 0:
            self.cut(min(self.length, tokens_to_remove))
        else:
            self.cut(max(self.length + tokens_to_remove, 0))

    def cut(self, length: int) -> None:
        """Forget the tokens behind the first ``length``."""
        self.length = length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for kept in self._kept():
            seen = kept[:, : self.length]
            seen.copy_(seen.index_select(0, beam_idx.to(kept.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda kept: kept.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda kept: kept[indices.to(kept.device)])

    def _kept(self) -> list[Tensor]:
        kept = self.store.keys[self.index], self.store.values[self.index]
        return [one for one in kept if one is not None]

    @torch.inference_mode(False)
    def _replace(self, change: Any) -> None:
        """Of another batch: graphs point to the memory before."""
        if not self.is_initialized:
            return
        self.store.keys[self.index], self.store.values[self.index] = map(change, self._kept())

    def clone(self) -> Any:
        """A copy of the tokens; None if there is no memory for any."""
        return (self.keys.clone(), self.values.clone()) if self.is_initialized else None  # type: ignore[union-attr]

    def restore(self, kept: Any) -> None:
        """Take over a copy."""
        self.update(*kept)
