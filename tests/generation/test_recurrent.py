"""Caches of models with layers that keep a state: linear attention, Mamba, convolutions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import Tensor

import flexops
from flexops.errors import GenerationError
from flexops.generation import decoder, prompt, recurrent

NEW = 8
NAMES = [
    "qwen3_next", "qwen3_5", "olmo_hybrid", "lfm2", "bamba", "jamba", "falcon_h1", "zamba2",
    "zamba",
]  # fmt: skip
OWN = ("jamba", "zamba")
"""Whose recurrence is one of their own, of which tokens behind a prompt become a part."""


def small(name: str = "qwen3_next") -> Any:
    config = zoo.tiny_config(transformers.CONFIG_MAPPING[name], name)
    if name == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    torch.manual_seed(0)
    return zoo.shaken(zoo.class_of(config)(config)).eval()


def prompts(padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 1 - int(padded)
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options
    found = model.generate(**given, do_sample=False, **options)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_plain_model(name, graphs):
    """From captured steps, one after another in the same memory."""
    model = small(name)
    calls: list[dict[str, Any]] = [{}, {"padded": True}, {"num_beams": 2}]
    given = [(prompts(one.pop("padded", False)), one) for one in calls]
    expected = [generated(model, ids, **options) for ids, options in given]
    report = flexops.patch(model)
    (row,) = [row for row in report.rows if row.operator.startswith("generation")]
    assert row.swapped, row.reason
    for _ in range(2):
        for (ids, options), wanted in zip(given, expected, strict=True):
            with torch.inference_mode():
                assert torch.equal(generated(model, ids, **options), wanted)
        for (ids, _), wanted in zip(given[:2], expected, strict=False):
            found = flexops.generate(model, **ids, max_new_tokens=NEW, eos_token_id=())
            assert torch.equal(found, wanted)
    # each time of two rows, of four, and one that chooses tokens; prompts with padding, and without
    assert graphs.made == 6 + 2 * (name not in OWN)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN])
def test_prompts_leave_the_states_of_their_tokens(name, graphs):
    """Filled up, with and without padding, shorter than a convolution, too: by graphs, and before
    that."""
    model = small(name)
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    flexops.patch(model)
    for length, padding in ((9, 0), (9, 3), (40, 0), (2, 0), (31, 29)):
        given = ids[:, :length]
        mask = torch.ones_like(given)
        mask[1, :padding] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        alone = []
        for row in range(2):
            cache = flexops.KVCache(model.config, 64)
            own = given[row : row + 1, padding * row :]
            with torch.no_grad():
                model(own, past_key_values=cache, use_cache=True)
            alone.append(cache.store.states())
        expected = [torch.cat(pair) for pair in zip(*alone, strict=True)]
        for _ in range(3):
            cache = decoder.decoder_of(model).borrow(model, 2, 64)
            with torch.inference_mode():
                model(
                    input_ids=given,
                    attention_mask=mask,
                    position_ids=places,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            torch.testing.assert_close(cache.store.states(), expected, rtol=1e-4, atol=1e-5)
            assert all(layer.has_previous_state[0] for layer in cache.store.recurrent.values())
            del cache
    assert graphs.made == 3  # of 32 tokens, with padding and without, and of 64


@pytest.mark.parametrize(("most", "made"), [(128, 2), (127, 1)])
def test_longer_prompts_are_graphs_than_without_states(most, made, graphs, monkeypatch):
    """Beside the graph of a step."""
    monkeypatch.setattr(prompt, "MOST_TOKENS", 64)
    monkeypatch.setattr(prompt, "MOST_WITH_STATES", most)
    model = small()
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = generated(model, given)
    flexops.patch(model)
    for _ in range(3):
        with torch.inference_mode():
            assert torch.equal(generated(model, given), wanted)
    assert graphs.made == made


def chat(model: Any, cache: Any, turns: tuple[int, ...] = (3, 4, 40)) -> Tensor:
    """Turns of so many tokens, each behind all tokens so far."""
    ids = prompts()["input_ids"][:, :0]
    for length in turns:
        more = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))
        ids = torch.cat([ids, more], 1)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ids = generated(model, given, past_key_values=cache)
    return ids


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("name", "bits"), [*((name, 16) for name in NAMES), ("qwen3_next", 8), ("falcon_h1", 8)]
)
def test_a_conversation_goes_on(name, bits):
    """By graphs, turns included, which are filled up: tokens behind them change no state."""
    model = small(name)
    expected = chat(model, transformers.DynamicCache(config=model.config))
    flexops.patch(model)
    cache = flexops.KVCache(model.config, max_length=256, bits=bits)
    for _ in range(2):
        found = chat(model, cache)
        assert (found == expected).float().mean() > (0.9 if bits == 8 else 0.999)
        cache.reset()
    turns = {"prompt"} if bits == 8 else {"prompt", "chunk"}
    assert {key[0] for key in cache.store.graphs} == {"step"} | (set() if name in OWN else turns)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alone(duplicate, name):
    model = small(name)
    flexops.patch(model)
    cache = flexops.KVCache(model.config, max_length=128)
    begun = chat(model, cache, (3,))
    copied = duplicate(cache)
    ids = {"input_ids": torch.cat([begun, begun[:, :2]], 1)}
    one, two = (generated(model, ids, past_key_values=x) for x in (cache, copied))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_rows_are_repeated_and_selected(name):
    model = small(name)
    flexops.patch(model)
    cache = flexops.KVCache(model.config, max_length=64)
    given = prompts()["input_ids"]
    with torch.no_grad():
        model(given, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        next_ = torch.tensor([[5], [6]])
        found = model(next_, past_key_values=cache, use_cache=True).logits
        whole = torch.cat([given[[1, 0]], next_], 1)
        expected = model(whole, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_states_cannot_forget_tokens(name):
    model = small(name)
    flexops.patch(model)
    cache = flexops.KVCache(model.config, max_length=64)
    chat(model, cache, (3,))
    assert not cache.is_croppable
    with pytest.raises(GenerationError, match="cannot forget tokens"):
        cache.crop(-2)
    with pytest.raises(GenerationError, match="one with states of layers"):
        flexops.generate(model, prompts()["input_ids"], cache=cache)
    cache.crop_to(0)
    assert cache.length == 0
    assert not any(one.any() for one in cache.store.states())


@pytest.mark.usefixtures("graphs")
def test_a_layer_that_moves_its_state_is_not_captured(monkeypatch):
    model = small("olmo_hybrid")
    expected = generated(model, prompts())

    def move(self: Any, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states.clone()
        self.is_recurrent_states_initialized[state_idx] = True
        return self.recurrent_states[state_idx]

    monkeypatch.setattr(recurrent.StateLayer, "update_recurrent_state", move)
    flexops.patch(model)
    with pytest.warns(flexops.FallbackWarning, match="a layer has put its state elsewhere"):
        assert torch.equal(generated(model, prompts()), expected)
    assert torch.equal(generated(model, prompts()), expected)


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", ["nemotron_h", "lfm2_moe"])
def test_a_capture_that_fails_changes_no_state(name):
    """On a CPU their experts ask the host, in the middle of a step."""
    model = zoo.tiny(name).eval()
    expected = generated(model, prompts(True), max_new_tokens=20)
    flexops.patch(model)
    for _ in range(2):
        assert torch.equal(generated(model, prompts(True), max_new_tokens=20), expected)
    assert "the host reads a tensor" in decoder.decoder_of(model).refused


def test_a_cache_of_the_models_own_is_left_to_it():
    model = zoo.tiny("minimax").eval()
    expected = generated(model, prompts())
    report = flexops.patch(model)
    (row,) = [row for row in report.rows if row.operator.startswith("generation")]
    assert row.reason == "it has a cache of its own"
    assert torch.equal(generated(model, prompts()), expected)
