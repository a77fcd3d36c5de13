"""Candidates of an assistant model: its steps are "captured", too, and its cache grows."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import flexops
from flexops.generation import decoder, step

pytestmark = pytest.mark.usefixtures("graphs")
NEW = 32


def generated(model: Any, **options: Any) -> Tensor:
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(2))
    found = model.generate(
        ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **options
    )
    assert isinstance(found, Tensor)
    return found


def helper(name: str) -> Any:
    """An assistant that gives candidates although it is not sure of them."""
    model = tiny.model(name).eval()
    model.generation_config.assistant_confidence_threshold = 0
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def free_graphs(model: Any) -> list[Any]:
    ((_, store),) = decoder.decoder_of(model)._free
    return list(store.graphs)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Caches are small; lengths to which they grow."""
    monkeypatch.setattr(decoder, "_GRANULE", 16)
    monkeypatch.setattr(step, "LEAST_BUCKET", 16)
    lengths: list[int] = []
    grow = decoder.Store.grow

    def note(self: Any, max_length: int, length: int) -> None:
        lengths.append(max_length)
        grow(self, max_length, length)

    monkeypatch.setattr(decoder.Store, "grow", note)
    return lengths


@pytest.mark.parametrize(("name", "alike"), [("llama", True), ("llama", False), ("gemma3", False)])
def test_tokens_are_those_without_an_assistant(name, alike, grown):
    model = tiny.model(name).eval()
    assistant = helper(name)
    if not alike:
        for parameter in assistant.parameters():
            parameter.data.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    with tiny.eagerly(model):
        expected = generated(model)
    flexops.patch(model)
    flexops.patch(assistant)
    for _ in range(2):
        assert torch.equal(generated(model, assistant_model=assistant), expected)
    assert {"step", "chunk"} <= {key[0] for key in free_graphs(assistant)}
    assert len(grown) == 1  # the second call has the memory of the first


def test_an_assistant_of_the_models_own_first_layers(grown):
    """Steps of some layers are not those of all."""
    model = helper("llama")
    with tiny.eagerly(model):
        expected = generated(model)
    flexops.patch(model)
    for options in ({"assistant_early_exit": 1}, {}, {"assistant_early_exit": 1}):
        assert torch.equal(generated(model, **options), expected)
    assert grown


def test_caches_asked_for_by_name(grown):
    model, assistant = tiny.model("llama").eval(), helper("llama")
    with tiny.eagerly(model):
        expected = generated(model)
    flexops.patch(model)
    flexops.patch(assistant)
    options = {"assistant_model": assistant, "cache_implementation": "flexops"}
    assert torch.equal(generated(model, **options), expected)
    assert grown
