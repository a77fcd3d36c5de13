"""Models that read pictures: steps behind prompts with and without pictures are "captured"."""

from __future__ import annotations

from typing import Any

import pictured
import pytest
import tiny
import torch
import transformers
from torch import Tensor

import flexops
from flexops.generation import decoder

NEW = 6


def generated(model: Any, given: dict[str, Tensor]) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(**given, **options)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", pictured.TYPES)
def test_tokens_are_those_of_the_plain_model(name):
    model = pictured.small(name)
    with_picture = pictured.inputs(model)
    words = {"input_ids": with_picture["input_ids"].clamp(max=59)}
    padded = words | {"attention_mask": with_picture["attention_mask"]}
    kinds = {key: torch.zeros_like(x) for key, x in with_picture.items() if "type" in key}
    every = with_picture, words, padded | kinds
    with tiny.eagerly(model):
        expected = [generated(model, given) for given in every]
    report = flexops.patch(model)
    (row,) = [row for row in report.rows if row.operator.startswith("generation")]
    assert row.swapped, row.reason
    for _ in range(2):
        for given, wanted in zip(every, expected, strict=True):
            assert torch.equal(generated(model, given), wanted)
            ((_, store),) = decoder.decoder_of(model)._free
            assert {key[0] for key in store.graphs} >= {"step"}
            if given is with_picture:
                assert store.shifted == (name in pictured.SHIFTED)
    prompts = {key[-1] for key in store.graphs if key[0] == "prompt"}
    both = {False, not bool(padded["attention_mask"].all())}
    assert prompts == (set() if name == "paligemma" else both)  # whose positions begin at 1


def chat(model: Any, given: dict[str, Tensor], cache: Any) -> Tensor:
    """A prompt with a picture, and two turns of words behind it."""
    for turn in range(3):
        options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        ids = model.generate(**given, past_key_values=cache, do_sample=False, **options)
        more = torch.randint(3, 60, (2, 4 + turn), generator=torch.Generator().manual_seed(turn))
        new = ids.shape[1] + more.shape[1] - given["input_ids"].shape[1]
        given = {
            key: torch.nn.functional.pad(x, (0, new), value=int(key == "attention_mask"))
            for key, x in given.items()
            if key.endswith(("_mask", "_type_ids"))
        } | {key: x for key, x in given.items() if key == "image_grid_thw"}
        given["input_ids"] = torch.cat([ids, more], 1)
    assert isinstance(ids, Tensor)
    return ids


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", ["llava", "paligemma", "qwen2_5_vl", "qwen3_vl"])
def test_a_conversation_goes_on(name):
    """Positions stay where the picture has left them."""
    model = pictured.small(name)
    given = pictured.inputs(model)
    with tiny.eagerly(model):
        text = model.config.get_text_config()
        expected = chat(model, given, transformers.DynamicCache(config=text))
    flexops.patch(model)
    for _ in range(2):
        cache = decoder.decoder_of(model).borrow(model, 2, 256)
        assert torch.equal(chat(model, given, cache), expected)
        assert "step" in {key[0] for key in cache.store.graphs}
