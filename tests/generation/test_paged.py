"""Continuous batching (``model.generate_batch``) of patched models: the tokens of plain
transformers, by block tables where every request has one new token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import flexops
from flexops.errors import PatchError
from flexops.generation import paged

ContinuousBatchingConfig = transformers.generation.configuration_utils.ContinuousBatchingConfig

PROMPTS = [[3, 4, 5, 6], list(range(7, 40)), [1, 2]]
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def generate(model: Any) -> list[list[int]]:
    config = transformers.GenerationConfig(
        max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # by default the cache takes most of the machine's free memory
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
    results = model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=sizes, progress_bar=False
    )
    return [results[name].generated_tokens for name in sorted(results)]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        pytest.param("Qwen3", {"head_dim": 16}, marks=pytest.mark.extra),
        ("Mistral", {"sliding_window": 16, "head_dim": 16}),
        # its layers with full attention have a window, too, and do not use it
        (
            "Exaone4",
            {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    ],
)
def test_a_patched_model_gives_the_tokens_of_plain_transformers(kind, more, monkeypatch):
    model = make(kind, **more)
    expected = generate(copy.deepcopy(model))
    assert [len(tokens) for tokens in expected] == [10] * 3
    called: list[tuple[int, ...]] = []
    by_tables = paged.attention_with_kvcache

    def spy(query: Any, *args: Any, **named: Any) -> Any:
        called.append(tuple(query.shape))
        return by_tables(query, *args, **named)

    monkeypatch.setattr(paged, "attention_with_kvcache", spy)
    flexops.patch(model)
    assert generate(model) == expected
    assert model.config._attn_implementation == "flexops", "as it was before"
    if "sliding_window" not in more:  # transformers has no block tables for windows
        assert called
        assert {shape[1] for shape in called} == {1}


def test_outside_of_continuous_batching_it_is_an_error():
    model = make("Llama")
    flexops.patch(model)
    model.set_attn_implementation("paged|flexops")
    with pytest.raises(PatchError, match="without a paged cache"):
        model(torch.tensor([[1, 2, 3]]))
