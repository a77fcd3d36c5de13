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
from flexops.generation import step

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
