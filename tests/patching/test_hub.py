"""HF's kernels with flexops' layers: by :func:`flexops.patching.kernel_mapping`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kernels
import pytest
import test_recurrence
import tiny
import torch
import transformers
import zoo
from test_apply import distance, results
from torch import nn

import flexops
from flexops.ops import state_scan
from flexops.patching import hub

UNSUPPORTED = {
    **dict.fromkeys(
        ("SiLU", "GeLU", "GeluTanh", "NewGELU", "FastGELU", "QuickGELU"),
        "an activation alone is one pass over memory in torch too",
    ),
    **dict.fromkeys(
        (
            "Qwen3_5GatedDeltaNet", "chunk_kda", "fused_recurrent_kda", "mamba_inner_fn",
            "mamba_split_conv1d_scan_combined", "selective_scan_fn",
            "MultiScaleDeformableAttention", "EsmFold2TriangleMultiplication",
        ),
        "flexops has no such operator",
    ),
}  # fmt: skip
"""The other names that transformers marks, with the reason."""
OF_ZOO = ("glm4", "gpt_oss", "qwen3_5_text")


pytestmark = pytest.mark.usefixtures("one_thread")


def made(name: str) -> tuple[Any, dict[str, Any]]:
    if name in test_recurrence.MODELS:
        torch.manual_seed(0)
        model = zoo.shaken(test_recurrence.MODELS[name]())
        tokens = torch.arange(24).view(2, 12) * 7 % model.config.vocab_size
        return model, {"input_ids": tokens, "labels": tokens}
    if name in OF_ZOO:
        model = zoo.tiny(name)
        return model, zoo.batch(model, False)
    return tiny.model(name), tiny.batch(name)


@pytest.mark.parametrize(
    ("name", "mode", "expected_layers"),
    [
        ("llama", "INFERENCE", "RMSNorm RotaryPosEmb"),
        ("qwen3_next", "TRAINING", "CausalConv1d ChunkGatedDeltaRule RMSNormGated"),
        *(
            pytest.param(*case, marks=pytest.mark.extra)
            for case in (
                ("llama", "TRAINING", "RMSNorm RotaryPosEmb"),
                ("qwen3", "TRAINING", "RMSNorm RotaryPosEmb"),
                ("glm4", "TRAINING", "RMSNorm"),
                ("gpt_oss", "TRAINING", "MoeMLP RMSNorm RotaryPosEmb"),
                ("qwen3_5_text", "TRAINING", "CausalConv1d RMSNormGated RMSNormZeroCentered"),
                ("falcon_h1", "TRAINING", "CausalConv1d Mamba2ChunkScan RMSNorm RotaryPosEmb"),
                ("lfm2", "INFERENCE", "CausalConv1d RMSNorm RotaryPosEmb"),
            )
        ),
    ],
)
def test_kernelize_takes_our_mapping(name, mode, expected_layers, monkeypatch):
    """Results and gradients are the model's; each marked layer runs flexops' code, not its own."""
    model, inputs = made(name)
    expected = results(model, inputs)
    ran: set[str] = set()
    original = hub._run

    def run(module: nn.Module, find: Any, *args: Any, **kwargs: Any) -> Any:
        def looked_for(one: Any) -> Any:
            forward = find(one)
            own = getattr(forward, "func", None) is hub.plain and find is not hub._experts
            if not own:
                ran.add(module.forward.__func__.__qualname__.split(".")[0])
            return forward

        return original(module, looked_for, *args, **kwargs)

    monkeypatch.setattr(hub, "_run", run)
    monkeypatch.setattr(hub, "_FOUND", f"_{name}_{mode}")  # functions are shared between models
    mapping: Any = flexops.patching.kernel_mapping()
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        model = kernels.kernelize(
            model.train(mode == "TRAINING"), mode=getattr(kernels.Mode, mode), device="cpu"
        )
        differences = distance(results(model, inputs), expected)
    assert max(differences.values()) < 2e-5, differences
    assert set(expected_layers.split()) <= ran, ran


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_recurrences_run_where_no_gradient_is_needed(name, monkeypatch):
    """Prompts, and steps, which write the cache's state."""
    model, inputs = made(name)
    ids = inputs["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.eval().generate(ids, **options)
    monkeypatch.setattr(hub, "_FOUND", f"_{name}_recurrences")
    calls = set()
    for function in test_recurrence.DELTA_RULE | test_recurrence.MAMBA2:
        original = getattr(state_scan, function)
        monkeypatch.setattr(
            state_scan,
            function,
            lambda *a, of=function, run=original, **k: calls.add(of) or run(*a, **k),
        )
    mapping: Any = flexops.patching.kernel_mapping()
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
        found = model.generate(ids, **options)
    assert torch.equal(found, expected)
    expected_calls = {"qwen3_next": test_recurrence.DELTA_RULE, "bamba": test_recurrence.MAMBA2}
    assert calls == expected_calls[name]


@pytest.mark.extra
def test_every_mark_of_transformers_has_a_layer_or_a_reason():
    folder = Path(transformers.__file__).parent
    pattern = re.compile(
        r'^@use_kernel_(?:forward|func)_from_hub(?:_with_fallback)?\(\s*"(\w+)"', re.MULTILINE
    )
    marks = {
        name
        for path in (*folder.glob("models/*/modeling_*.py"), folder / "activations.py")
        for name in pattern.findall(path.read_text())
    }
    assert marks == {*hub.LAYERS, *UNSUPPORTED} & marks
    assert set(hub.LAYERS) <= marks
