"""Patched models with causal convolutions: results, gradients and decoding are those of
transformers."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers

import flexops
from flexops.patching import convolution

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MODELS: dict[str, Any] = {
    "lfm2": lambda: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    ),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **SMALL,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "bamba": lambda: transformers.BambaForCausalLM(
        transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1])
    ),
    "falcon_h1": lambda: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64, head_dim=8)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_tokens(name, monkeypatch):
    torch.manual_seed(0)
    plain = MODELS[name]()
    patched = copy.deepcopy(plain)
    report = flexops.patch(patched, in_graphs=True)
    assert "causal_conv1d" in {row.operator for row in report.swapped}, str(report)
    ids = torch.randint(1, 61, (2, 11))
    calls = []
    for function in ("causal_conv1d", "update"):
        original = getattr(convolution, function)
        monkeypatch.setattr(
            convolution,
            function,
            lambda *a, name=function, original=original, **k: (
                calls.append(name) or original(*a, **k)
            ),
        )
    outputs = []
    for model in (plain, patched):
        model.train()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        model.eval()
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        outputs.append((logits.detach(), tokens, [p.grad for p in model.parameters()]))
    assert set(calls) == {"causal_conv1d", "update"}
    (logits, tokens, gradients), (ours, our_tokens, our_gradients) = outputs
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(our_tokens, tokens)
    for actual, expected in zip(our_gradients, gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    assert flexops.unpatch(patched)
    assert torch.equal(patched(input_ids=ids, use_cache=False).logits, plain(ids).logits)


def test_another_convolution_is_left_alone():
    def whole(x: torch.Tensor, *rest: Any, **named: Any) -> Any:  # noqa: ARG001
        return x

    names: Any = {**vars(transformers.models.lfm2.modeling_lfm2), "causal_conv1d_fn": whole}
    original = inspect.unwrap(transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv.forward)
    other = type(original)(original.__code__, names)
    cls = type("Other", (torch.nn.Module,), {"forward": other})
    (row,) = flexops.patch(cls()).not_swapped
    assert row.operator == "causal_conv1d"
    assert row.reason.endswith("computes something else than the replacement")
