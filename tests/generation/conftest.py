"""Everything here is about transformers' models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexops.generation import decoder, step
from flexops.generation.layers import Store


@pytest.fixture(autouse=True)
def _needs(transformers_models: None) -> None:
    pass


class Recorder(TorchDispatchMode):
    """Remembers the operators that are called, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted: the host reads a tensor")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Recorded:
    """In the place of a graph: each replay calls the operators of the capture again, with the
    tensors that they had, and writes where their results are. Nothing else runs."""

    made = 0

    def __init__(self, function: Any, state: Any, *, generator: Any, **_: Any) -> None:
        Recorded.made += 1
        drawn = None if generator is None else generator.get_state()
        before = [one.clone() for one in state]
        for mode in (contextlib.nullcontext(), recorder := Recorder()):
            with mode:
                self.result = function()
            for one, kept in zip(state, before, strict=True):
                one.copy_(kept)
        if drawn is not None:
            generator.set_state(drawn)
        self._calls = recorder.calls

    def replay(self) -> Any:
        for func, args, kwargs, out in self._calls:
            for to, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(to, Tensor) and to.data_ptr() != new.data_ptr():
                    to.copy_(new)
        return self.result


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """Prompts and steps are "captured" on the CPU, too."""
    monkeypatch.setattr(step, "Graph", Recorded)
    monkeypatch.setattr(decoder, "captures", lambda _: True)
    monkeypatch.setattr(Store, "pool", lambda _: None)
    Recorded.made = 0
    return Recorded


@pytest.fixture
def uncapturable(graphs: type[Recorded], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes captures of one kind fail, by the first part of their keys."""
    del graphs
    captured = decoder.Decoder.captured

    def make(kind: str) -> None:
        def fail(self: Any, store: Any, key: Any, *more: Any) -> Any:
            with monkeypatch.context() as context:
                if key[0] == kind:
                    context.setattr(step, "Graph", None)  # cannot be called
                return captured(self, store, key, *more)

        monkeypatch.setattr(decoder.Decoder, "captured", fail)

    return make


class Heard:
    """A streamer."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, part: Tensor) -> None:
        self.parts.append(part if part.dim() == 2 else part[:, None])

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def heard() -> Heard:
    return Heard()
