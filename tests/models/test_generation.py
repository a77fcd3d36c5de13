"""Generation with our cache: the tokens of plain transformers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import flexops
from flexops.errors import GenerationError
from flexops.generation import decoder, step
from flexops.generation.cache import Store

NAMES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt_oss"]
NEW = 14  # beyond the windows of tiny models


def prompts(padding: str = "", length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {"input_ids": torch.randint(3, 97, (3, length), generator=generator)}
    if padding:
        mask = torch.ones_like(found["input_ids"])
        mask[1, :4] = 0
        mask[2, :1] = 0
        found["input_ids"][mask == 0] = 0
        found["attention_mask"] = mask
    return found


def plain(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    chosen: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW} | options
    with tiny.eagerly(model):
        return model.generate(**inputs, **chosen)


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_transformers(name: str, padding: str) -> None:
    model, inputs = tiny.model(name).eval(), prompts(padding)
    expected = plain(model, inputs, eos_token_id=None)
    flexops.patch(model)
    assert (step.refusal(model) == "") == (name != "gpt_oss")
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_goes_into_transformers_generate(name: str, patched: bool, beams: int) -> None:
    model, inputs = tiny.model(name).eval(), prompts("left")
    options: dict[str, Any] = {"num_beams": beams, "eos_token_id": None}
    expected = plain(model, inputs, **options)
    if patched:
        flexops.patch(model)
    cache = flexops.KVCache(model.config, max_length=9 + NEW)
    assert torch.equal(plain(model, inputs, past_key_values=cache, **options), expected)
    assert cache.length == 8 + NEW


class Eager:
    """In the place of a graph: each replay computes."""

    made = 0

    def __init__(self, function: Any, state: Any, **_: Any) -> None:
        self.function = function
        Eager.made += 1
        before = [one.clone() for one in state]
        function()
        for one, kept in zip(state, before, strict=True):
            one.copy_(kept)

    def replay(self) -> Any:
        return self.function()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Eager]:
    """Steps are "captured" on the CPU, too."""
    monkeypatch.setattr(step, "Graph", Eager)
    monkeypatch.setattr(decoder, "captures", lambda _: True)
    monkeypatch.setattr(Store, "pool", lambda _: None)
    Eager.made = 0
    return Eager


CAPTURED = [name for name in NAMES if name != "gpt_oss"]


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", CAPTURED)
def test_transformers_own_loop_replays_steps(
    name: str, padding: str, graphs: type[Eager]
) -> None:
    model, inputs = tiny.model(name).eval(), prompts(padding)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}):
        torch.manual_seed(5)
        expected = plain(model, inputs, eos_token_id=None, **options)
        graphs.made = 0
        report = flexops.patch(model)
        assert [row for row in report.swapped if row.operator.startswith("generation")], report
        torch.manual_seed(5)
        found = plain(model, inputs, eos_token_id=None, **options)
        assert torch.equal(found, expected)
        assert graphs.made == 1
        flexops.unpatch(model)
