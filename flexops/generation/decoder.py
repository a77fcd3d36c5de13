"""What a model keeps between calls: memory of caches, with the steps that were captured for it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import modules_of
from ..build.load import loader
from ..errors import GenerationError
from . import step
from .cache import KVCache
from .layers import Store

_decoders: weakref.WeakKeyDictionary[nn.Module, Decoder] = weakref.WeakKeyDictionary()
"""Beside the models, whose copies and pickles must not have graphs."""
_GRANULE = 256
_MORE = {"prompt": " of a prompt", "chunk": " of several tokens", "lookup": " of tried tokens"}
"""What may fail to be captured while steps of one token are."""


def decoder_of(model: nn.Module) -> Decoder:
    found = _decoders.get(model)
    if found is None:
        found = _decoders.setdefault(model, Decoder())
    return found


def forget(model: nn.Module) -> None:
    """Free what was kept for a model."""
    _decoders.pop(model, None)


def captures(device: torch.device) -> bool:
    """Whether steps are captured there."""
    return device.type == "cuda"


class Decoder:
    """One model's.

    Attributes:
        refused: why its step cannot be captured, once that was tried.
        fills: whether prompts can be filled up (:mod:`.prompt`), for states of the model.
    """

    def __init__(self) -> None:
        self.refused = ""
        self.fills: dict[Any, bool] = {}
        self._free: list[tuple[Any, Store]] = []
        self._generator: torch.Generator | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """One, for the seeds of all calls: captured steps draw from the one that they know."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device)
        return self._generator

    def refusal(self, model: Any) -> str:
        return self.refused or step.refusal(model)

    def borrow(self, model: Any, batch: int, max_length: int) -> KVCache:
        """An empty cache for a model; its memory comes back when the cache is no more."""
        state = fingerprint(model)
        room = -(-max_length // _GRANULE) * _GRANULE
        kept = None
        while self._free and kept is None:
            known, store = self._free.pop()
            if known == state and store.batch == batch and room <= store.max_length <= 4 * room:
                kept = store
        cache = KVCache(model.config, room)
        if kept is not None:
            kept.clear()
            cache.adopt(kept)
        cache.decoder, cache.state = self, state
        weakref.finalize(cache, self._take_back, state, cache.store)
        return cache

    def serve(self, model: Any, cache: KVCache) -> None:
        """Let steps with a user's cache be captured."""
        cache.decoder, cache.state = self, fingerprint(model)

    def _take_back(self, state: Any, store: Store) -> None:
        """Of the latest one only."""
        if store.graphs or store.seen:
            self._free = [(state, store)]

    def captured(
        self,
        store: Store,
        key: Any,
        function: Callable[[], Any],
        buffers: tuple[Tensor, ...],
        generator: torch.Generator | None = None,
    ) -> step.Graph | None:
        """The graph of a prompt or a step, captured if it is not there; None if it cannot be, which
        is said once."""
        if self.refused or step.is_capturing(buffers[0]):
            return None
        graph: step.Graph | None = store.graphs.get(key)
        if graph is None:
            states = store.states()
            before = [layer.remember() for layer in store.recurrent.values()]
            try:
                changed = (*buffers, *states)
                graph = step.Graph(function, changed, pool=store.pool(), generator=generator)
                if [*map(id, states)] != [*map(id, store.states())]:
                    raise GenerationError("a layer has put its state elsewhere")
            except Exception as error:  # of any code of the model's
                for put_back in before:
                    put_back()
                what = _MORE.get(key[0], "")
                reason = f"capture{what} failed: {_first_line(error)}"
                store.leave_pool()
                if not what:
                    self.refused = reason
                device = buffers[0].device.type
                loader.decline("generation", device, reason, fix="docs/inference.md")
                return None
            store.graphs[key] = graph
        return graph


class _Kinds(dict[type, int]):
    """Of types of attributes: 1, a setting; 2, a list of some; 0, neither, as most are."""

    def __missing__(self, kind: type) -> int:
        self[kind] = 1 if issubclass(kind, int | float | str) else 2 * (kind in (list, tuple))
        return self[kind]


_kinds = _Kinds()
_OF_TENSORS = operator.attrgetter("shape", "dtype", "device")


def fingerprint(model: Any) -> int:
    """What a captured step depends on: where parameters are, and the modules' settings. Each prompt
    waits for it."""
    text = model.config.get_text_config(decoder=True)
    modules = modules_of(model)
    every = [vars(module) for module in modules]
    settings = [one for each in every for one in each.values() if _kinds[type(one)]]
    tensors = [
        one
        for module in modules
        for some in (module._parameters, module._buffers)
        for one in some.values()
        if one is not None
    ]
    parts: list[Any] = [torch.is_autocast_enabled("cuda"), text.num_hidden_layers]
    parts += [id(each.get("forward")) for each in every]
    parts += [
        one if _kinds[type(one)] == 1 else tuple(word for word in one if isinstance(word, str))
        for one in settings
    ]
    parts += map(Tensor.data_ptr, tensors)
    parts += map(_OF_TENSORS, tensors)
    return hash(tuple(parts))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"
