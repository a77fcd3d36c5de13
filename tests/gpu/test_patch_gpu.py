"""``attn_implementation="flexops"`` on a GPU, where no mask is made for a window: sinks, windows
and chunks against the models' own eager attention."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import test_apply
import test_recurrence
import test_vision
import tiny
import torch
import zoo
from torch import Tensor

import flexops
from flexops.ops import state_scan
from flexops.patching import attention, recurrence

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformers_models")]
DEVICE = "cuda"
NAMES = [*tiny.SINKS, *tiny.CHUNKS, "mistral", "gemma2"]


def named(name: str, implementation: str) -> Any:
    attention.register_attention()
    model = tiny.model(name).eval()
    model.set_attn_implementation(implementation)
    return model.to(DEVICE)


def batch(name: str, padding: str) -> dict[str, Tensor]:
    given = tiny.batch(name, padding=padding)
    return {key: x.to(DEVICE) for key, x in given.items() if key != "labels"}


def outcome(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of what is no padding, and the gradient of every parameter."""
    logits = model(**inputs, use_cache=False).logits
    seen = logits[inputs["attention_mask"].bool()] if "attention_mask" in inputs else logits
    weights = torch.linspace(-1, 1, seen.numel(), device=seen.device).view(seen.shape)
    (seen.float() * weights).sum().backward()
    found = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    return found | {"logits": seen.detach()}


def distances(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor, relative to its size, or to a part of the largest gradient's."""
    assert actual.keys() == expected.keys()
    least = 1e-3 * max(x.norm().item() for key, x in expected.items() if key != "logits")
    return {
        key: ((actual[key] - x).norm() / x.norm().clamp(min=least)).item()
        for key, x in expected.items()
    }


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")  # float32 has no kernels
@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_eager_attention_does(name, padding):
    inputs = batch(name, padding)
    eager, ours = (outcome(named(name, one), inputs) for one in ("eager", attention.NAME))
    if name in tiny.SINKS:
        assert any(key.endswith("sinks") and x.norm() > 0 for key, x in eager.items())
    found = distances(ours, eager)
    assert max(found.values()) < 1e-3, found


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")  # float32 has no kernels
@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "mistral"])
def test_it_generates_the_tokens_of_eager_attention(name):
    asked: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    inputs = batch(name, "left")
    eager, ours = (
        named(name, one).generate(**inputs, **asked) for one in ("eager", attention.NAME)
    )
    assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    ("name", "size", "has_mask"),
    [("gpt_oss", 6, False), ("mistral", 6, False), ("llama4", tiny.CHUNK, True)],
)
def test_only_a_window_that_is_passed_has_no_mask(name, size, has_mask):
    length = tiny.LENGTH
    made = attention.mask(
        1, length, length, local_size=size, config=tiny.config(name), device=torch.device(DEVICE)
    )
    assert (made is not None) == has_mask


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_compute_sinks_and_their_gradient(dtype, window):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(0)
    length, config = 130, tiny.config("gpt_oss")
    shapes = ((2, 8, length, 64), (2, 2, length, 64), (2, 2, length, 64), (8,))
    tensors = [torch.randn(shape, device=DEVICE) for shape in shapes]
    grad = torch.randn(2, length, 8, 64, device=DEVICE)

    def run(function: Any, dtype: torch.dtype, mask: Tensor | None) -> list[Tensor]:
        q, k, v, sinks = (x.to(dtype).requires_grad_() for x in tensors)
        part = SimpleNamespace(
            sinks=sinks, num_key_value_groups=4, training=False, is_causal=True, config=config
        )
        options = {"scaling": 0.125, "sliding_window": window, "s_aux": sinks}
        out = function(part, q, k, v, mask, **options)[0]
        return [out, *torch.autograd.grad(out, (q, k, v, sinks), grad.to(dtype))]

    i = torch.arange(length, device=DEVICE)
    distance = i[:, None] - i
    seen = (distance >= 0) & (distance < (window or length))
    hidden = torch.zeros(length, length, device=DEVICE, dtype=torch.float64)
    hidden = hidden.masked_fill(~seen, torch.finfo(torch.float64).min)[None, None]
    truth = run(eager_attention_forward, torch.float64, hidden)
    for actual, expected in zip(run(attention.attention, dtype, None), truth, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 0.02, error


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_packed_pictures_are_no_further_from_the_truth(name, monkeypatch):
    """In bfloat16, where a tower's layer attends to all pictures, or windows, in one call."""
    calls = []
    ours = attention._ops.attention
    monkeypatch.setattr(
        attention._ops,
        "attention",
        lambda *args, **named: calls.append(named) or ours(*args, **named),
    )
    inputs = {key: x.to(DEVICE) for key, x in test_vision.patches().items()}

    def found(dtype, patched=False):
        torch.manual_seed(0)
        model = zoo.shaken(test_vision.MODELS[name][0]()).to(DEVICE, dtype)
        given = inputs | {"pixel_values": inputs["pixel_values"].to(dtype)}
        options = {"skip_logits": False} if patched else {}
        if patched:
            flexops.patch(model)
        out = test_vision.results(model, given, **options)
        return {key: x.float() for key, x in out.items()}

    truth = found(torch.float32)
    errors = [
        sum(test_apply.distance(found(torch.bfloat16, patched), truth, 0.1).values())
        for patched in (False, True)
    ]
    assert errors[1] < 1.3 * errors[0]
    assert len(calls) == 2  # one for each layer of the tower
    assert all(one["cu_seqlens_q"] is not None for one in calls)


@pytest.mark.parametrize("name", ["olmo_hybrid", "bamba", "falcon_h1"])
def test_kernels_compute_the_gradients_of_recurrences(name, monkeypatch):
    """In training, of which not all steps fill a chunk; not further from float32 than
    transformers."""
    torch.manual_seed(0)
    exact = test_recurrence.MODELS[name]().to(DEVICE).train()
    # not flash-linear-attention's, which refuses some versions of Triton
    modeling = sys.modules[type(exact).__module__]
    for function in ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan"):
        own = recurrence._reference_of(getattr(modeling, function, None))
        monkeypatch.setattr(modeling, function, own, raising=False)
    ids = torch.randint(1, 61, (2, 150), device=DEVICE)

    def gradient(model: Any) -> Tensor:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([one.grad.double().flatten() for one in model.parameters()])

    plain = copy.deepcopy(exact).to(torch.bfloat16)
    ours = copy.deepcopy(plain)
    flexops.patch(ours)
    theirs, wanted, calls = gradient(plain), gradient(exact), []
    differentiable = state_scan.differentiable
    monkeypatch.setattr(
        state_scan, "differentiable", lambda *given: calls.append(1) or differentiable(*given)
    )
    found = gradient(ours)
    assert calls
    assert (found - wanted).norm() < 1.2 * (theirs - wanted).norm()
