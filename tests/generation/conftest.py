"""Everything here is about transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from flexops.generation import decoder, step
from flexops.generation.layers import Store


@pytest.fixture(autouse=True)
def _needs(transformers_models: None) -> None:
    pass


class Eager:
    """In the place of a graph: each replay computes."""

    made = 0
    function: Any = None

    def __init__(self, function: Any, state: Any, *, generator: Any, **_: Any) -> None:
        Eager.made += 1
        drawn = None if generator is None else generator.get_state()
        before = [one.clone() for one in state]
        function()
        for one, kept in zip(state, before, strict=True):
            one.copy_(kept)
        if drawn is not None:
            generator.set_state(drawn)

    def replay(self) -> Any:
        function, self.function = self.function, None
        return function()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Eager]:
    """Prompts and steps are "captured" on the CPU, too."""
    captured = decoder.Decoder.captured

    def current(self: Any, store: Any, key: Any, function: Any, *more: Any) -> Any:
        graph = captured(self, store, key, function, *more)
        if isinstance(graph, Eager):
            graph.function = function
        return graph

    monkeypatch.setattr(step, "Graph", Eager)
    monkeypatch.setattr(decoder.Decoder, "captured", current)
    monkeypatch.setattr(decoder, "captures", lambda _: True)
    monkeypatch.setattr(Store, "pool", lambda _: None)
    Eager.made = 0
    return Eager


@pytest.fixture
def uncapturable(graphs: type[Eager], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
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
