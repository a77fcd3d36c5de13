"""Steps that try several tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import flexops
from flexops.errors import GenerationError
from flexops.generation import decoder, lookup, step

NEW = 24


def prompts(rows: int = 3) -> Tensor:
    """Words that come again."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 97, (rows, 5), generator=generator).repeat(1, 4)


NAMES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3"]


@pytest.mark.parametrize(
    ("name", "captured"),
    [*itertools.product(NAMES, (False, True)), ("gpt_oss", False)],  # its experts ask the host
)
def test_tokens_are_those_of_single_steps(name, captured, request, monkeypatch):
    """With padding at the left, and rows that repeat more than others."""
    if captured:
        request.getfixturevalue("graphs")
    model, ids = tiny.model(name).eval(), prompts()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    flexops.patch(model)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": ()}
    expected = flexops.generate(model, ids, mask, **options)
    steps: list[int] = []
    logits_of = step.logits_of

    def count(*args: Any, **named: Any) -> Tensor:
        steps.append(args[3].shape[1])
        return logits_of(*args, **named)

    monkeypatch.setattr(step, "logits_of", count)
    for tries in (1, 4):
        found = flexops.generate(model, ids, mask, prompt_lookup_num_tokens=tries, **options)
        assert torch.equal(found, expected)
    assert set(steps) == {2, 5}


def test_what_repeats_takes_few_steps(monkeypatch):
    model, ids = tiny.model("llama").eval(), prompts(rows=1)
    flexops.patch(model)
    free = flexops.generate(model, ids, max_new_tokens=200, eos_token_id=())
    again = free[:, 20:]  # the model goes on as it did before, once it repeats itself
    steps: list[int] = []
    keep = lookup.Buffers.keep

    def count(self: Any, lengths: Tensor) -> None:
        before = int(self.known)
        keep(self, lengths)
        steps.append(int(self.known) - before)

    monkeypatch.setattr(lookup.Buffers, "keep", count)
    found = flexops.generate(
        model, ids, max_new_tokens=200, eos_token_id=(), prompt_lookup_num_tokens=4
    )
    assert torch.equal(found[:, 20:], again)
    assert max(steps) == 5
    assert sum(steps) == 200
    assert len(steps) < 120


@pytest.mark.parametrize("captured", [False, True])
def test_rows_end_where_they_would(captured, heard, request):
    if captured:
        request.getfixturevalue("graphs")
    model, ids = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    free = flexops.generate(model, ids, max_new_tokens=30, eos_token_id=())
    ends = [int(free[0, 29]), int(free[1, 35]), int(free[2, 22])]
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": ends, "pad_token_id": 96}
    expected = flexops.generate(model, ids, **options)
    found = flexops.generate(model, ids, streamer=heard, prompt_lookup_num_tokens=6, **options)
    assert torch.equal(found, expected)
    assert torch.equal(torch.cat(heard.parts, 1), found)
    assert heard.ended
    one = flexops.generate(model, ids, prompt_lookup_num_tokens=6, max_new_tokens=1)
    assert torch.equal(one, free[:, :21])


def test_draws_have_the_distribution_of_single_steps():
    """Of the second new token, over many draws of the first two."""
    model, ids = tiny.model("llama").eval(), prompts(rows=1)
    model.lm_head.weight.data.mul_(4)  # so that some words are likely, and candidates right
    flexops.patch(model)
    options: dict[str, Any] = {"do_sample": True, "top_k": 6, "max_new_tokens": 3}
    many = ids.expand(1500, -1)
    counts = []
    for tries in (0, 3):
        found = flexops.generate(
            model, many, eos_token_id=(), seed=1, prompt_lookup_num_tokens=tries, **options
        )
        counts.append(torch.bincount(found[:, 21:].flatten(), minlength=97) / 3000)
    assert (counts[0] - counts[1]).abs().max() < 0.04
    assert (counts[0] > 0.1).sum() >= 2


def test_the_cache_has_what_was_generated():
    model, ids = tiny.model("llama").eval(), prompts(rows=1)
    flexops.patch(model)
    caches = [flexops.KVCache(model.config, 64) for _ in range(2)]
    for tries, cache in zip((0, 5), caches, strict=True):
        flexops.generate(
            model, ids, max_new_tokens=NEW, eos_token_id=(), cache=cache,
            prompt_lookup_num_tokens=tries,
        )  # fmt: skip
    one, other = caches
    assert one.length == other.length == 19 + NEW
    for layer, known in zip(other.layers, one.layers, strict=True):
        torch.testing.assert_close(layer.keys, known.keys, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_captured_is_computed(uncapturable):
    """In the call that finds that out; later calls take single steps."""
    model, ids = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    expected = flexops.generate(model, ids, max_new_tokens=NEW, eos_token_id=())
    uncapturable("lookup")
    with pytest.warns(flexops.FallbackWarning, match="capture of tried tokens failed"):
        found = flexops.generate(
            model, ids, max_new_tokens=NEW, eos_token_id=(), prompt_lookup_num_tokens=3
        )
    assert torch.equal(found, expected)
    again = flexops.generate(
        model, ids, max_new_tokens=NEW, eos_token_id=(), prompt_lookup_num_tokens=3
    )
    assert torch.equal(again, expected)
    assert decoder.decoder_of(model).refused == ""
    ((_, store),) = decoder.decoder_of(model)._free
    assert "tokens" in {key[0] for key in store.graphs}


def test_a_model_with_hooks_takes_single_steps():
    model, ids = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    expected = flexops.generate(model, ids, max_new_tokens=NEW, eos_token_id=())
    widths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    found = flexops.generate(
        model, ids, max_new_tokens=NEW, eos_token_id=(), prompt_lookup_num_tokens=3
    )
    assert torch.equal(found, expected)
    assert widths == [20] + [1] * (NEW - 1)
    assert decoder.decoder_of(model).refused == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 32}, "no such prompt_lookup_num_tokens.*32"),
        ({"prompt_lookup_num_tokens": -1}, "no such prompt_lookup_num_tokens.*-1"),
        ({"prompt_lookup_num_tokens": 2.5}, "no such prompt_lookup_num_tokens.*2.5"),
        ({"max_length": 20 + NEW}, "room for all tokens"),
        ({"bits": 4, "group_size": 32, "residual_length": 32}, "no such cache"),
    ],
    ids=str,
)
def test_bad_input(options, message):
    model, ids = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    given = {"prompt_lookup_num_tokens": 4} | options
    tries = given.pop("prompt_lookup_num_tokens")
    cache = None
    if given:
        cache = flexops.KVCache(model.config, **({"max_length": 100} | given))
    with pytest.raises(GenerationError, match=f"(?s){message}"):
        flexops.generate(
            model, ids, max_new_tokens=NEW, prompt_lookup_num_tokens=tries, cache=cache
        )
