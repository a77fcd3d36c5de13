"""Every type of transformers' text and vision-language models: patched, it computes what it did.

The default tests take one type of each structure, the slow ones all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from test_apply import distance
from torch import Tensor

import flexops

STRUCTURES = (
    "bart", "bert", "cohere", "deepseek_v3", "distilbert", "exaone4", "falcon", "gemma3", "glm4",
    "gpt2", "gpt_oss", "granite", "llama4_text", "mixtral", "modernbert", "mpt", "olmo2", "opt",
    "paligemma", "phi", "qwen2_vl", "qwen3_5_text", "roberta", "starcoder2", "t5",
)  # fmt: skip
"""One type of each structure: of norms, blocks, rotary embedding, layers, wrappers, losses."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def reference(model: Any) -> Iterator[None]:
    """torch's attention omits soft caps; transformers' eager one has them."""
    capped = [
        one
        for one in zoo.configs(model.config)
        if getattr(one, "attn_logit_softcapping", None) and one._attn_implementation == "sdpa"
    ]
    for one in capped:
        one._attn_implementation_internal = "eager"
    yield
    for one in capped:
        one._attn_implementation_internal = "sdpa"


def results(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Loss, logits or hidden states where there is no padding, and all gradients."""
    model.zero_grad()
    output = model(**inputs, **options)
    seen = inputs.get("attention_mask", torch.ones(3, 12)).bool()
    logits = output.get("logits") if "labels" in inputs else output.last_hidden_state
    if logits is not None and logits.shape[:2] == seen.shape:
        logits = logits[seen]
    loss = output.loss if "labels" in inputs else logits.float().square().mean()
    loss.backward()
    named = model.named_parameters()
    found = {name: one.grad.float() for name, one in named if one.grad is not None}
    found["loss"] = loss.detach()
    return found if logits is None else {**found, "logits": logits.detach().float()}


def tokens(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    asked = {key: one for key, one in inputs.items() if key != "labels"}
    asked |= {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}  # type: ignore[dict-item]
    made = model.generate(**asked, output_scores=True, return_dict_in_generate=True)
    return made.sequences, torch.stack(made.scores)


def check(name: str) -> None:
    model = zoo.tiny(name)
    flexops.patch(model)  # what is probed is probed once
    flexops.unpatch(model)
    for padded in (False, True):
        inputs = zoo.batch(model, padded)
        with reference(model):
            expected = results(model, inputs)
        before = results(model, inputs)
        report = flexops.patch(model)
        fused = any(row.operator == "linear_cross_entropy" for row in report.swapped)
        actual = results(model, inputs, **({"skip_logits": False} if fused else {}))
        far = distance(actual, expected)
        assert max(far.values()) < 1e-4, (padded, max(far, key=far.get))  # type: ignore[arg-type]
        if fused:
            actual = results(model, inputs)
            assert "logits" not in actual
            far = distance(actual, {key: one for key, one in expected.items() if key != "logits"})
            assert max(far.values()) < 1e-4, (padded, max(far, key=far.get))  # type: ignore[arg-type]
        flexops.unpatch(model)
        after = results(model, inputs)
        assert all(after[key].equal(one) for key, one in before.items())
    if not model.can_generate():
        return
    model.eval()
    with reference(model):
        sequences, scores = tokens(model, inputs)
    flexops.patch(model)
    made, ours = tokens(model, inputs)
    assert made.equal(sequences)
    torch.testing.assert_close(ours, scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_type_of_each_structure_computes_the_same(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(zoo.TYPES) - zoo.UNTESTED.keys() - set(STRUCTURES)))
def test_every_type_computes_the_same(name: str) -> None:
    check(name)
