"""Prompts and later tokens that are filled up, and "captured" from the second of a length on."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import Tensor

import flexops
from flexops.generation import decoder, prompt, replay, step

NEW = 6


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(length))


def expected(model: Any, ids: Tensor) -> Tensor:
    """Of the model that is not patched yet."""
    with tiny.eagerly(model):
        found = model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    assert isinstance(found, Tensor)
    return found


def generated(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return flexops.generate(model, ids, max_new_tokens=NEW, eos_token_id=(), **options)


def store_of(model: Any) -> Any:
    ((_, store),) = decoder.decoder_of(model)._free
    return store


def fills(model: Any) -> bool:
    return any(decoder.decoder_of(model).fills.values())


def test_lengths_are_few_and_close():
    made = [prompt.filled_length(n) for n in range(1, prompt.MOST_TOKENS + 1)]
    assert made == sorted(made)
    assert len(set(made)) <= 24
    assert all(n <= one < n + max(32, n / 4) for n, one in enumerate(made, 1))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3"])
def test_tokens_are_those_of_the_prompt_alone(name, graphs):
    """Shorter than a window and longer, as long as what it is filled up to, and one token."""
    model = tiny.model(name).eval()
    given = [tokens(length) for length in (9, 31, 32, 1)]
    wanted = [expected(model, ids) for ids in given]
    flexops.patch(model)
    for _ in range(2):
        for ids, one in zip(given, wanted, strict=True):
            assert torch.equal(generated(model, ids), one)
            own = model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None)
            assert torch.equal(own, one)
    assert fills(model)
    assert graphs.made == 3  # one length; a step of each of the two loops


def test_cached_keys_are_those_of_the_prompt_alone(graphs):
    model, ids = tiny.model("llama").eval(), tokens(20)
    plain = flexops.KVCache(model.config, 64)
    with torch.no_grad():
        model(ids, past_key_values=plain, use_cache=True)
    flexops.patch(model)
    cache = flexops.KVCache(model.config, 64)
    for _ in range(2):
        cache.crop_to(0)
        flexops.generate(model, ids, max_new_tokens=1, cache=cache)
        assert cache.length == 20
        for one, known in zip(cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(one.keys, known.keys)
            torch.testing.assert_close(one.values, known.values)
    assert graphs.made == 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compressed_keys_are_those_of_the_prompt_alone(name, bits, graphs):
    """Of prompts that fit into the ring, that just do not, and that are codes for the most part."""
    model = tiny.model(name, max_position_embeddings=512).eval()
    options = {"bits": bits, "group_size": 32, "residual_length": 32}
    lengths, plain = (20, 63, 64, 65, 200), []
    for length in lengths:
        cache = flexops.KVCache(model.config, 256, **options)
        with torch.no_grad():
            model(tokens(length), past_key_values=cache, use_cache=True)
        plain.append(cache)
    flexops.patch(model)
    cache = flexops.KVCache(model.config, 256, **options)
    for _ in range(2):
        for length, known in zip(lengths, plain, strict=True):
            cache.crop_to(0)
            found = flexops.generate(
                model, tokens(length), max_new_tokens=1, eos_token_id=(), cache=cache
            )
            assert found.shape == (2, length + 1)
            assert cache.length == length
            for one, wanted in zip(cache.layers, known.layers, strict=True):
                for new, old in ((one.keys, wanted.keys), (one.values, wanted.values)):
                    assert (new - old).norm() < 0.02 * old.norm()  # a few codes differ by one
    assert graphs.made == 4  # 32, 64, 96 and 224 tokens


class Mean(torch.nn.Module):
    """Adds the mean of all tokens."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Any:
        x = self.inner(ids)
        return x + x.mean(1, keepdim=True)


def _looks_ahead() -> Any:
    model = tiny.model("llama").eval()
    model.model.embed_tokens = Mean(model.model.embed_tokens)
    return model


def _turns_by_length() -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return tiny.model("llama", rope_parameters=rope, max_position_embeddings=8).eval()


@pytest.mark.parametrize("make", [_looks_ahead, _turns_by_length])
def test_models_whose_prompts_are_left_as_they_are(make, graphs):
    model, ids = make(), tokens(9)
    wanted = expected(model, ids)
    flexops.patch(model)
    for _ in range(3):
        assert torch.equal(generated(model, ids), wanted)
    assert not fills(model)
    assert graphs.made == 1


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (9, {"max_length": 9 + NEW}),
        (prompt.MOST_TOKENS // 2 + 1, {}),
    ],
    ids=["no room", "long"],
)
def test_prompts_that_are_left_as_they_are(length, options, graphs):
    model, ids = tiny.model("llama", max_position_embeddings=2048).eval(), tokens(length)
    wanted = expected(model, ids)
    flexops.patch(model)
    made: dict[str, Any] = {"max_length": length + 64} | options
    cache = flexops.KVCache(model.config, **made)
    for _ in range(3):
        cache.crop_to(0)
        found = generated(model, ids, cache=cache)
        assert torch.equal(found, wanted)
    assert graphs.made == 1


def test_learned_positions_have_an_end(graphs):
    """Neither a prompt nor a turn is filled up beyond it."""
    sizes = {"n_positions": 29, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids = tokens(21, rows=1)
    wanted = expected(model, ids)
    turns = [tokens(9, rows=1), tokens(8, rows=1)]
    chatted = chat(model, turns, transformers.DynamicCache(config=model.config))
    flexops.patch(model)
    for _ in range(3):
        assert torch.equal(generated(model, ids), wanted)
    cache = decoder.decoder_of(model).borrow(model, 1, 64)
    assert torch.equal(chat(model, turns, cache), chatted)
    assert {key[0] for key in cache.store.graphs} == {"step", "tokens"}
    assert graphs.made == 2


def padded(length: int, *paddings: int) -> tuple[Tensor, Tensor]:
    """Prompts and their mask."""
    ids = tokens(length, rows=len(paddings))
    return ids, (torch.arange(length) >= torch.tensor(paddings)[:, None]).long()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.usefixtures("graphs")
def test_tokens_behind_padding_are_those_of_the_prompt_alone(name):
    """More padding than a window has, none, and all but one token."""
    model = tiny.model(name).eval()
    given = [padded(*one) for one in ((9, 4, 0), (25, 0, 24, 13), (31, 30, 3), (9, 0, 4))]
    wanted = [
        [expected(model, ids[row : row + 1, mask[row] == 1])[0, -NEW:] for row in range(len(ids))]
        for ids, mask in given
    ]
    flexops.patch(model)
    for _ in range(2):
        for (ids, mask), one in zip(given, wanted, strict=True):
            found = generated(model, ids, attention_mask=mask)
            assert torch.equal(found[:, -NEW:], torch.stack(one))
            options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
            own = model.generate(ids, attention_mask=mask, **options)
            assert torch.equal(own[:, -NEW:], torch.stack(one))
    assert fills(model)
    assert {key[-1] for key in store_of(model).graphs if key[0] == "prompt"} == {True}


@pytest.mark.parametrize("bits", [16, 8])
def test_keys_behind_padding_are_those_of_the_prompt_alone(bits, graphs):
    """At the places that they would have with the padding, where later turns expect them."""
    model, paddings = tiny.model("llama", max_position_embeddings=512).eval(), (0, 7, 39)
    ids, mask = padded(40, *paddings)
    flexops.patch(model)
    cache = flexops.KVCache(model.config, 128, bits=bits)
    for _ in range(2):
        cache.crop_to(0)
        flexops.generate(model, ids, mask, max_new_tokens=1, eos_token_id=(), cache=cache)
        assert cache.length == 40
    assert graphs.made == 1
    for row, start in enumerate(paddings):
        alone = flexops.KVCache(model.config, 128)
        with torch.no_grad():
            model(ids[row : row + 1, start:], past_key_values=alone, use_cache=True)
        for one, known in zip(cache.layers, alone.layers, strict=True):
            for new, old in ((one.keys, known.keys), (one.values, known.values)):
                error = (new[row : row + 1, :, start:] - old).norm()
                assert error <= (1e-5 if bits == 16 else 0.02) * old.norm()


@pytest.mark.parametrize("case", ["at the right", "on both sides", "counted", "from 1 on"])
def test_other_padding_is_left_to_the_model(case, graphs):
    """And positions that are not those of the prompt's own tokens."""
    model, (ids, mask) = tiny.model("llama").eval(), padded(9, 4, 0)
    given = {"attention_mask": mask.flip(1) if case == "at the right" else mask}
    if case == "on both sides":
        given["attention_mask"] = mask * mask.flip(1)
    elif case == "from 1 on":
        given["position_ids"] = mask.cumsum(-1)
    options = {"use_cache": True, "logits_to_keep": 1} | given
    with torch.no_grad(), tiny.eagerly(model):
        wanted = model(ids, **options).logits
    flexops.patch(model)
    for _ in range(3):
        cache = decoder.decoder_of(model).borrow(model, 2, 64)
        with torch.no_grad():
            found = model(ids, past_key_values=cache, **options).logits
        torch.testing.assert_close(found, wanted)
    assert graphs.made == 0


def test_padding_of_many_prompts_is_left_to_the_model(graphs):
    model, (ids, mask) = tiny.model("llama").eval(), padded(9, *[4] * 17)
    alone = expected(model, ids[:, 4:])
    flexops.patch(model)
    for _ in range(3):
        found = generated(model, ids, attention_mask=mask)
        assert torch.equal(found[:, 9:], alone[:, 5:])
    assert graphs.made == 1


def test_a_prompt_that_cannot_be_captured_runs_as_before(monkeypatch, graphs):
    model, ids = tiny.model("llama").eval(), tokens(9)
    wanted = expected(model, ids)
    flexops.patch(model)
    assert torch.equal(generated(model, ids), wanted)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted")

    with monkeypatch.context() as context:
        context.setattr(step, "Graph", fail)
        with pytest.warns(flexops.FallbackWarning, match="capture of a prompt failed: RuntimeErr"):
            assert torch.equal(generated(model, ids), wanted)
    assert torch.equal(generated(model, ids), wanted)
    assert not fills(model)
    assert graphs.made == 1
    assert decoder.decoder_of(model).refused == ""


# ---- several tokens behind others ----------------------------------------------------------------


def test_widths_are_few():
    made = [replay.width_of(n) for n in range(1, replay.MOST_TOKENS + 1)]
    assert made == sorted(made)
    assert len(set(made)) <= 13
    assert all(n <= one for n, one in enumerate(made, 1))


def chat(model: Any, turns: list[Tensor], cache: Any) -> Tensor:
    """Turns of a user, each behind all tokens so far."""
    ids = turns[0][:, :0]
    for turn in turns:
        ids = torch.cat([ids, turn], 1)
        with tiny.eagerly(model):
            ids = model.generate(
                ids, past_key_values=cache, do_sample=False, max_new_tokens=NEW, eos_token_id=None,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
    return ids


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3"])
def test_a_conversation_goes_on(name):
    """Turns of few tokens, of many, and of more than any graph has."""
    model = tiny.model(name, max_position_embeddings=2048).eval()
    turns = [tokens(n) for n in (9, 3, 40, replay.MOST_TOKENS + 1, 2, 33)]
    expected = chat(model, turns, transformers.DynamicCache(config=model.config))
    flexops.patch(model)
    for _ in range(2):
        cache = decoder.decoder_of(model).borrow(model, 2, 512)
        assert torch.equal(chat(model, turns, cache), expected)
        del cache
    assert {key[0] for key in store_of(model).graphs} == {"prompt", "step", "chunk"}
    assert not decoder.decoder_of(model).refused


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_candidates_are_tried_by_graphs(name):
    model, ids = tiny.model(name).eval(), tokens(4, rows=1).repeat(1, 5)
    wanted = expected(model, ids)
    flexops.patch(model)
    for _ in range(2):
        with tiny.eagerly(model):
            found = model.generate(
                ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None,
                prompt_lookup_num_tokens=3,
            )  # fmt: skip
        assert torch.equal(found, wanted)
    assert "chunk" in {key[0] for key in store_of(model).graphs}


def test_positions_of_a_users_own_are_kept(graphs):
    """A call behind a cache whose positions are not the next ones runs the model's code."""
    model, ids = tiny.model("llama").eval(), tokens(9)
    more, positions = tokens(3), torch.tensor([[20, 21, 30]])
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    logits = []
    for patched in (False, True):
        cache: Any = transformers.DynamicCache(config=model.config)
        if patched:
            flexops.patch(model)
            cache = decoder.decoder_of(model).borrow(model, 2, 64)
        with tiny.eagerly(model), torch.no_grad():
            model.generate(ids, past_key_values=cache, **options)
            made = graphs.made
            given = {"past_key_values": cache, "position_ids": positions}
            logits.append(model(more, **given).logits)
        assert graphs.made == made
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


def test_tokens_that_cannot_be_captured_run_as_before(uncapturable):
    model, turns = tiny.model("llama").eval(), [tokens(9), tokens(3)]
    expected = chat(model, turns, transformers.DynamicCache(config=model.config))
    flexops.patch(model)
    uncapturable("chunk")
    cache = decoder.decoder_of(model).borrow(model, 2, 64)
    with pytest.warns(flexops.FallbackWarning, match="capture of several tokens failed: TypeErr"):
        assert torch.equal(chat(model, turns, cache), expected)
    assert decoder.decoder_of(model).refused == ""
    assert cache.decoder is not None
