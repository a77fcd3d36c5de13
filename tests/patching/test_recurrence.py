"""Patched models with causal convolutions and recurrences: results, gradients and decoding are
those of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
import transformers

import flexops
from flexops.ops import state_scan
from flexops.patching import recurrence

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
    "olmo_hybrid": lambda: transformers.OlmoHybridForCausalLM(
        transformers.OlmoHybridConfig(
            **SMALL,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
        )
    ),
    "bamba": lambda: transformers.BambaForCausalLM(
        transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1])
    ),
    "falcon_h1": lambda: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64, head_dim=8)
    ),
}


CONVOLUTION = {"causal_conv1d", "update"}
DELTA_RULE = {"gated_delta_rule", "gated_delta_rule_update"}
MAMBA2 = {"mamba2_scan", "mamba2_scan_update"}
CALLED = {
    "lfm2": CONVOLUTION,
    # its prompts are computed as a whole
    "qwen3_next": CONVOLUTION | {"delta_steps", "gated_delta_rule_update"},
    "olmo_hybrid": CONVOLUTION | DELTA_RULE,
    "bamba": CONVOLUTION | MAMBA2,
    "falcon_h1": CONVOLUTION | MAMBA2,
}


@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_tokens(name, monkeypatch):
    torch.manual_seed(0)
    plain = MODELS[name]()
    patched = copy.deepcopy(plain)
    report = flexops.patch(patched, in_graphs=True)
    (row,) = [row for row in report.swapped if "causal_conv1d" in row.operator]
    named = {function.removesuffix("_update") for function in CALLED[name]}
    assert set(row.operator.split(", ")) == named - {"update", "delta_steps"}
    assert "causal_conv1d" in report.families()
    assert ("state_scan" in report.families()) is (name != "lfm2")
    ids = torch.randint(1, 61, (2, 11))
    calls = []

    def watch(module: Any, function: str) -> None:
        original = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *a, **k: calls.append(function) or original(*a, **k)
        )

    for function in CONVOLUTION:
        watch(recurrence, function)
    for function in DELTA_RULE | MAMBA2 | {"delta_steps"}:
        watch(state_scan, function)
    outputs = []
    for model in (plain, patched):
        calls.clear()  # the plain model's functions may be ones that HF's kernels has replaced
        model.train()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        model.eval()
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        outputs.append((logits.detach(), tokens, [p.grad for p in model.parameters()]))
    assert set(calls) == CALLED[name]
    (logits, tokens, gradients), (ours, our_tokens, our_gradients) = outputs
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(our_tokens, tokens)
    for actual, expected in zip(our_gradients, gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        assert flexops.unpatch(patched)
        assert torch.equal(patched(input_ids=ids, use_cache=False).logits, plain(ids).logits)


@pytest.mark.parametrize("said", ["seq_idx", "cu_seq_lens_q", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_sequences_of_their_own(name, said):
    """As transformers' collators pack them."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() == 3 and one.shape[1] == 1:
                one *= 20  # filters, of which hardly anything would be seen
    lengths = (5, 1, 9)
    ids = torch.randint(1, 61, (1, sum(lengths)))
    begins = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    index = [i for i, length in enumerate(lengths) for _ in range(length)]
    packed: dict[str, Any] = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]
    }
    if said != "cu_seq_lens_q":
        packed["seq_idx"] = torch.tensor([index], dtype=torch.int32)
    if said != "seq_idx" and name != "lfm2":  # which passes seq_idx on, and nothing else
        packed |= {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
        packed |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if len(packed) == 1:
        return

    def outcome(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        logits = call()
        (logits.square() * torch.linspace(0, 1, logits.numel()).view_as(logits)).sum().backward()
        return [logits, *(one.grad for one in model.parameters() if one.grad is not None)]

    def whole() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False, **packed).logits

    def apart() -> torch.Tensor:
        parts = ids.split(lengths, 1)
        return torch.cat([model(input_ids=one, use_cache=False).logits for one in parts], 1)

    plain = outcome(apart)
    flexops.patch(model)
    unsaid = model(input_ids=ids, use_cache=False, position_ids=packed["position_ids"]).logits
    assert not torch.allclose(unsaid, plain[0], rtol=1e-3, atol=1e-4)
    for one, other in zip(outcome(whole), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("package", [False, True])
@pytest.mark.parametrize("length", [1024, 1025])
def test_long_sequences_are_left_to_other_packages(length, package, chunked, monkeypatch):
    """Whose kernels use tensor cores, where ours do not."""
    monkeypatch.setattr(recurrence, "_is_there", lambda _: package)
    monkeypatch.setattr(recurrence, "is_chunked", lambda *_, **__: chunked)
    left = length > 1024 and package and not chunked
    gates, heads = torch.zeros(1, length, 1), torch.ones(1, length, 1, 8)
    found = recurrence.delta_rule(lambda *_, **__: "theirs")(heads, heads, heads, gates, gates)
    assert (found == "theirs") is left
    found = recurrence.mamba2(lambda *_, **__: "theirs")(
        heads, gates, -gates[0, 0], heads, heads, 64, dt_softplus=True
    )
    assert isinstance(found, str) is left


@pytest.mark.parametrize(
    "packed",
    [
        {"seq_idx": torch.zeros(1, 4, dtype=torch.int32)},
        {"cu_seq_lens_q": torch.tensor([0, 1, 4], dtype=torch.int32)},
    ],
)
def test_layers_of_packed_sequences_are_not_computed_as_a_whole(packed):
    """Newer transformers' function raises without mamba_ssm; it is one of a class's."""

    def original(*_, **named):
        if any(named.get(name) is not None for name in packed):
            raise ValueError("can't keep packed sequences apart")
        return "theirs"

    layer = MODELS["bamba"]().model.layers[0].mamba
    names = recurrence._replaced(inspect.unwrap(type(layer).forward))
    assert "mamba2_split_conv1d_scan_combined" in names
    whole, x = recurrence.mamba2_layer(original), torch.zeros(1, 4, 8)
    assert whole(x, D=None) == "theirs"
    assert whole(x, D=None, **packed) is None


def test_what_is_left_to_original_functions(monkeypatch):
    """Gradients that no kernel computes; of packed sequences nothing, but behind a state."""
    monkeypatch.setattr(recurrence, "_is_there", lambda _: True)
    gates, heads = torch.zeros(1, 1025, 1), torch.ones(1, 1025, 1, 8)
    packed = {"seq_idx": torch.zeros(1, 1025, dtype=torch.int32)}
    delta = recurrence.delta_rule(lambda *_, **__: "theirs")
    mamba = recurrence.mamba2(lambda *_, **__: "theirs")

    def left(**more: Any) -> list[bool]:
        state = more.pop("state", None)
        rule = delta(heads, heads, heads, gates, gates, initial_state=state, **more)
        scan = mamba(heads, gates, -gates[0, 0], heads, heads, 64, initial_states=state, **more)
        return [isinstance(one, str) for one in (rule, scan)]

    assert left() == [True, True]
    assert left(**packed) == [False, False]
    assert left(state=torch.zeros(1, 1, 8, 8), **packed) == [True, True]
    heads.requires_grad_()
    assert left(**packed) == [False, False]
    monkeypatch.setattr(recurrence, "_is_there", lambda _: False)
    assert left() == [True, True]
    heads.requires_grad_(False)
    assert left() == [False, False]


def test_functions_are_compared_with_transformers_own(monkeypatch):
    """Not with those of a package, which run on a GPU only; these compute where a gradient is."""
    module = transformers.models.qwen3_next.modeling_qwen3_next
    names = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    for name in names:
        own = recurrence._reference_of(getattr(module, name))
        assert inspect.isfunction(own)
        assert own.__name__ == name

        @functools.wraps(own)
        def theirs(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no GPU")

        monkeypatch.setattr(module, name, theirs)
    model = MODELS["qwen3_next"]()
    report = flexops.patch(model)
    assert any("gated_delta_rule" in row.operator for row in report.swapped)
    ids = torch.randint(1, 61, (2, 11))
    with torch.no_grad():
        model(input_ids=ids)
    with pytest.raises(RuntimeError, match="no GPU"):
        model(input_ids=ids)


def test_another_convolution_is_left_alone():
    def whole(x: torch.Tensor, *rest: Any, **named: Any) -> Any:  # noqa: ARG001
        return x

    names: Any = {**vars(transformers.models.lfm2.modeling_lfm2), "causal_conv1d_fn": whole}
    original = inspect.unwrap(transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv.forward)
    other = type(original)(original.__code__, names)
    cls = type("Other", (torch.nn.Module,), {"forward": other})
    (row,) = flexops.patch(cls()).not_swapped
    assert row.operator.startswith("causal_conv1d")
    assert row.reason.endswith("computes something else than the replacement")
