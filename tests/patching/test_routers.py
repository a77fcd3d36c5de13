"""Routers in ``flexops.patch``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import flexops
from flexops.patching import routers

EXPERTS, K, HIDDEN = 12, 3, 40
SIZES = {
    "vocab_size": 61, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 0,
    "num_experts_per_tok": K, "moe_intermediate_size": 24,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "Olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "Mixtral": {"num_local_experts": EXPERTS},
    "GptOss": {"num_local_experts": EXPERTS},
}


def routers_of(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if type(one).__name__.endswith("Router")]


def router(name: str, dtype: torch.dtype) -> Any:
    """A patched model's, and what it was."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    (found,) = routers_of(model)
    with torch.no_grad():
        for one in found.parameters():
            one.normal_()
    before = copy.deepcopy(found)
    report = flexops.patch(model)
    assert any(row.operator == "route_tokens" and row.swapped for row in report.rows)
    return found, before


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], rounding: float) -> None:
    """Of weights and choices, whatever the order of equal ones is."""
    dense = (weights.new_zeros(len(weights), 64).scatter(1, choices, weights)
             for weights, choices in (found, expected))  # fmt: skip
    torch.testing.assert_close(*dense, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_choices_weights_and_gradients(name: str, dtype: torch.dtype) -> None:
    ours, theirs = router(name, dtype)
    x = torch.randn(7, HIDDEN, dtype=dtype)
    logits, weights, choices = ours(x)
    expected = theirs(x)
    assert [one.dtype for one in (logits, weights, choices)] == [one.dtype for one in expected]
    assert torch.equal(logits, expected[0])
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert_same((weights, choices), expected[1:], rounding)
    weights.float().square().sum().backward()
    theirs(x)[1].float().square().sum().backward()
    torch.testing.assert_close(
        ours.weight.grad, theirs.weight.grad, rtol=8 * rounding, atol=8 * rounding
    )


class Sigmoid(nn.Module):
    """MiniMax's: by sigmoid, in float32, with a bias that chooses."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.top_k = k
        self.weight = nn.Parameter(torch.randn(experts, HIDDEN))
        self.register_buffer("e_score_correction_bias", torch.randn(experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        scores = logits.sigmoid()
        correction: Any = self.e_score_correction_bias
        _, choices = (scores + correction).topk(self.top_k, sorted=False)
        weights = scores.gather(1, choices)
        return logits, weights / weights.sum(-1, keepdim=True), choices


@pytest.mark.parametrize("experts", [EXPERTS, HIDDEN])
def test_a_bias_that_chooses(experts: int) -> None:
    """Also with as many experts as columns."""
    torch.manual_seed(0)
    module = nn.Sequential(Sigmoid(experts, K)).bfloat16()
    before = copy.deepcopy(module)
    assert flexops.patch(module).rows[0].operator == "route_tokens"
    x = torch.randn(5, HIDDEN).bfloat16()
    logits, weights, choices = module(x)
    expected = before(x)
    assert torch.equal(logits, expected[0])
    assert_same((weights, choices), expected[1:], 1e-5)


def test_inputs_for_the_class_own_code() -> None:
    """On a CPU a row that is not a number, and a router in float32 behind layers of 16 bits."""
    module = nn.Sequential(Cast(EXPERTS, K))
    before = copy.deepcopy(module)
    assert flexops.patch(module).rows[0].swapped
    x = torch.randn(5, HIDDEN)
    x[3, 0] = torch.nan
    for given in (x, torch.randn(5, HIDDEN).bfloat16()):
        for one, other in zip(module(given), before(given), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


class Cast(Sigmoid):
    """By softmax, in the weight's dtype, without a bias."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__(experts, k)
        del self.e_score_correction_bias

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits = nn.functional.linear(hidden_states.to(self.weight.dtype), self.weight)
        weights, choices = logits.float().softmax(-1).topk(self.top_k)
        return logits, weights, choices


class Noisy(Cast):
    """Another one in training."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return super().forward(hidden_states * (1.5 if self.training else 1.0))


class Groups(Sigmoid):
    topk_group = 1


class Other(Sigmoid):
    """Weights to the power of two."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits, weights, choices = super().forward(hidden_states)
        return logits, weights.square(), choices


def test_what_stays() -> None:
    assert not routers.concerns(Groups(EXPERTS, K))
    assert not routers.concerns(nn.Linear(HIDDEN, EXPERTS))
    assert not routers.concerns(Sigmoid(K, K))
    assert routers.concerns(Sigmoid(EXPERTS, K))
    assert not routers.concerns(Other(EXPERTS, K))
    assert not routers.concerns(Noisy(EXPERTS, K))
