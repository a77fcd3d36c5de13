"""``flexops.KVCache`` of 8 and 4 bits."""

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

LENGTH, NEW = 75, 40


def prompt(rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def cache_of(model: Any, bits: int, length: int = LENGTH + NEW) -> flexops.KVCache:
    return flexops.KVCache(model.config, length, bits=bits, group_size=32, residual_length=32)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.extra)])
@pytest.mark.parametrize("bits", [8, 4])
def test_steps_on_the_device_give_the_tokens_of_steps_on_the_host(name, bits):
    """The one by attention over codes, the other by dequantized keys and values."""
    model, inputs = tiny.model(name).eval(), {"input_ids": prompt()["input_ids"]}  # no padding
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    flexops.patch(model)
    by_host = cache_of(model, bits)
    expected = model.generate(**inputs, past_key_values=by_host, **options)
    by_device = cache_of(model, bits)
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=(), cache=by_device)
    assert torch.equal(found, expected)
    for one, other in zip(by_host.layers, by_device.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-3, atol=0.2 if bits == 4 else 0.02)


def test_beams_and_copies():
    model, inputs = tiny.model("llama").eval(), prompt()
    flexops.patch(model)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": NEW, "eos_token_id": None}
    cache = cache_of(model, 8)
    found = model.generate(**inputs, past_key_values=cache, **options)
    expected = model.generate(**inputs, cache_implementation="dynamic", **options)
    assert (found == expected).float().mean() > 0.9
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.length == cache.length
        for one, two in zip(cache.layers, other.layers, strict=True):
            assert torch.equal(one.keys, two.keys)
            assert torch.equal(one.values, two.values)
        assert torch.equal(other.store.padding, cache.store.padding)
    keys, values = cache.layers[1].keys, cache.layers[1].values
    cache.batch_select_indices(torch.tensor([4, 0]))
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[1].keys, keys[[4, 4, 0, 0]])
    assert torch.equal(cache.layers[1].values, values[[4, 4, 0, 0]])


def test_a_cut_brings_tokens_back_from_their_codes():
    model = tiny.model("llama").eval()
    cache = cache_of(model, 8, 200)
    with torch.no_grad():
        model(torch.randint(3, 97, (1, 150)), past_key_values=cache)
        before = [(layer.keys, layer.values) for layer in cache.layers]
        cache.crop(90)
        assert cache.length == 90
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys[:, :, :90])
            assert torch.equal(layer.values, values[:, :, :90])
        model(torch.randint(3, 97, (1, 60)), past_key_values=cache)
        assert cache.length == 150
        cache.crop_to(0)
        fresh, tokens = cache_of(model, 8, 200), torch.randint(3, 97, (1, 170))
        for one in (cache, fresh):
            model(tokens, past_key_values=one)
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


def test_bad_numbers_are_errors():
    config = tiny.model("llama").config
    lengths = ({"bits": 4, "residual_length": length} for length in (100, "128"))
    for wrong in ({"bits": 3}, {"bits": 4, "group_size": 48}, *lengths):
        with pytest.raises(GenerationError, match=str(next(reversed(wrong.values())))):
            flexops.KVCache(config, 64, **wrong)
