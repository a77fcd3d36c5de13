"""``attn_implementation="flexops"`` in transformers' own models, against their eager attention: every option that generation has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import flexops
from flexops.patching import attention

NEW = 9  # tokens, more than a window is long
GENERATIONS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "dynamic cache, left": {},
    "static cache, left": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
    "beams, left": {"num_beams": 3},
}
"""``left``: one sequence of the batch is padded there."""


def test_a_model_is_loaded_with_it(tmp_path: Path) -> None:
    """As the guide has it; what is saved says nothing of flexops, so that it can be loaded without."""
    flexops.patching.register_attention()
    tiny.model("llama").save_pretrained(tmp_path)
    model, plain = (AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=one).eval() for one in (attention.NAME, "eager"))
    inputs = tiny.batch("llama")
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert "flexops" not in (tmp_path / "config.json").read_text()


def named(name: str, implementation: str, **changes: Any) -> Any:
    attention.register_attention()
    model = tiny.model(name, **changes).eval()
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("how", GENERATIONS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])  # gemma2: a soft cap, and a window in every other layer
def test_it_generates_the_tokens_of_eager_attention(name: str, how: str) -> None:
    inputs = {key: value for key, value in tiny.batch(name, padding="left" if "left" in how else "").items() if key != "labels"}
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "output_scores": True, "return_dict_in_generate": True, **GENERATIONS[how]}
    eager, ours = (named(name, implementation).generate(**inputs, **asked) for implementation in ("eager", attention.NAME))
    assert ours.sequences.shape[1] == tiny.LENGTH + NEW
    assert torch.equal(ours.sequences, eager.sequences)
    for actual, expected in zip(ours.scores, eager.scores, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_is_filled_in_pieces(kind: type) -> None:
    """A prompt handed over in parts of several tokens: queries that are fewer than keys, and not one, which see all that came before them."""
    tokens = tiny.batch("gemma2")["input_ids"]
    whole = named("gemma2", "eager")(tokens).logits
    model = named("gemma2", attention.NAME)
    cache = kind(config=model.config) if kind is DynamicCache else kind(config=model.config, max_cache_len=tiny.LENGTH)
    pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split((5, 4, 3), 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_it_is_the_operator_that_computes(name: str) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        named(name, attention.NAME)(**tiny.batch(name))
    assert torch.ops.flexops.attention in counter.get_flop_counts()["Global"]
