"""Layers of the gated delta rule in prompts and in decode steps: they compute what their classes'
code does, and leave to it what they do not."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

import flexops
from flexops.generation.state import state
from flexops.patching import delta_net, forwards, recurrence

NAMES = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]


@pytest.fixture(params=NAMES)
def layer(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    model = zoo.shaken(zoo.tiny(request.param).eval())
    flexops.patch(model)
    return next(one for one in model.modules() if delta_net._pairs(one))


def cache() -> Any:
    return delta_net._Cache([LinearAttentionLayer()])


def run(layer: Any, tokens: Tensor, kept: Any, active: bool, **named: Any) -> Tensor:
    name = delta_net._argument(recurrence._code_of(type(layer)))
    state.active = active
    try:
        with torch.no_grad():
            out: Tensor = layer(tokens, **{name: kept}, **named)
        return out
    finally:
        state.active = False


def compare(layer: Any, monkeypatch: pytest.MonkeyPatch, batch: int = 2, **named: Any) -> list[str]:
    """A prompt and two steps; gives who computed the steps."""
    monkeypatch.setattr(layer, "layer_idx", 0)
    width, ran = layer.out_proj.weight.shape[0], []
    tokens = torch.randn(batch, 5, width)
    code = delta_net.rebound

    def rebound(*args: Any) -> Any:
        ran.append("class")
        return code(*args)

    monkeypatch.setattr(delta_net, "rebound", rebound)
    results = []
    for active in (False, True):
        kept = cache()
        run(layer, tokens[:, :3], kept, False)
        ran.clear()
        outputs = [run(layer, tokens[:, t : t + 1], kept, active, **named) for t in (3, 4)]
        results.append([*outputs, *kept.layers[0].conv_states.values()])
        results[-1] += kept.layers[0].recurrent_states.values()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    return ran


def test_a_step_is_what_the_class_computes(layer, monkeypatch):
    assert forwards.below_added(layer).func is delta_net.layer
    assert compare(layer, monkeypatch) == []


def test_others_are_left_to_the_class(layer, monkeypatch):
    """A mask; more rows than products of few rows take; states of another dtype."""
    hidden = torch.ones(2, 1)
    assert compare(layer, monkeypatch, attention_mask=hidden) == ["class"] * 2
    assert compare(layer, monkeypatch, batch=17) == ["class"] * 2
    monkeypatch.setattr(layer, "layer_idx", 0)
    tokens, kept = torch.randn(2, 4, layer.out_proj.weight.shape[0]), cache()
    run(layer, tokens[:, :3], kept, False)
    states = kept.layers[0]
    state.active = True
    try:
        assert delta_net.takes(layer, tokens[:, 3:], kept, None)
        assert not delta_net.takes(layer, tokens[:, 2:], kept, None)
        assert not delta_net.takes(layer, tokens[:, 3:], cache(), None)
        states.record_past = True
        assert not delta_net.takes(layer, tokens[:, 3:], kept, None)
        states.record_past = False
        states.recurrent_states[0] = states.recurrent_states[0].double()
        assert not delta_net.takes(layer, tokens[:, 3:], kept, None)
    finally:
        state.active = False


def counted(layer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry whenever the class's code runs."""
    monkeypatch.setattr(layer, "layer_idx", 0)
    ran: list[str] = []
    code = delta_net.rebound
    monkeypatch.setattr(delta_net, "rebound", lambda *args: ran.append("class") or code(*args))
    return ran


def test_prompts_are_what_the_class_computes(layer, monkeypatch):
    """One behind another, shorter than the convolution, too; then again in the same memory."""
    ran = counted(layer, monkeypatch)
    own, tokens = recurrence._code_of(type(layer)), torch.randn(2, 12, layer.out_proj.out_features)
    expected, kept = cache(), cache()
    for _ in range(2):
        for part in tokens.split([2, 7, 3], 1):
            with torch.no_grad():
                wanted = own(layer, part, **{delta_net._argument(own): expected})
            torch.testing.assert_close(run(layer, part, kept, False), wanted, rtol=1e-4, atol=1e-5)
            for name in ("conv_states", "recurrent_states"):
                pair = (getattr(one.layers[0], name)[0] for one in (kept, expected))
                torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
        for one in (kept, expected):
            one.layers[0].has_previous_state[0] = False
    assert ran == []


def test_other_prompts_are_left_to_the_class(layer, monkeypatch):
    """A mask; gradients; other states than float32; packed sequences; autocast; a token alone."""
    ran, tokens = counted(layer, monkeypatch), torch.randn(2, 5, layer.out_proj.out_features)
    run(layer, tokens, cache(), False)
    assert ran == []
    run(layer, tokens, cache(), False, attention_mask=torch.ones(2, 5))
    assert len(ran) == 1
    with torch.enable_grad():
        layer(tokens, **{delta_net._argument(recurrence._code_of(type(layer))): cache()})
    assert len(ran) == 2
    kept = cache()
    run(layer, tokens, kept, False)
    kept.layers[0].recurrent_states[0] = kept.layers[0].recurrent_states[0].double()
    with torch.no_grad():
        assert delta_net.takes_prompt(layer, tokens, cache(), None)
        assert not delta_net.takes_prompt(layer, tokens, kept, None)
        assert not delta_net.takes_prompt(layer, tokens, None, None)
        assert not delta_net.takes_prompt(layer, tokens[:, :1], cache(), None)
        assert not delta_net.takes_prompt(layer, tokens.double(), cache(), None)
        with torch.autocast("cpu"):
            assert not delta_net.takes_prompt(layer, tokens, cache(), None)
    with contextlib.suppress(ValueError):  # transformers 5.24 packs no sequences on a CPU
        run(layer, tokens[:1], cache(), False, seq_idx=torch.zeros(1, 5, dtype=torch.int32))
    assert len(ran) == 3


@pytest.mark.parametrize("factor", [1, 2])
def test_a_class_that_computes_something_else_has_no_step(layer, factor):
    base = type(layer)

    def forward(self: Any, hidden_states: Tensor, cache_params: Any = None, **named: Any) -> Tensor:
        name = delta_net._argument(recurrence._code_of(base))
        return factor * base.forward(self, hidden_states, **{name: cache_params}, **named)

    made = copy.copy(layer)
    made.__class__ = type(base.__name__, (base,), {"forward": forward})
    assert delta_net.fits(made, lambda _: {}) is (factor == 1)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_the_norm_may_be_another_one(layer, gate, monkeypatch):
    """The class's code and a step call it alike."""

    class Norm(nn.Module):
        def __init__(self, columns: int, eps: float) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(columns)), eps

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            x = x * (x.square().mean(-1, True) + self.eps).rsqrt() * self.weight
            return x * getattr(torch.nn.functional, gate)(z)

    layer.norm = Norm(layer.head_v_dim, 1e-6)
    assert delta_net.fits(layer, recurrence._references)
    assert compare(layer, monkeypatch) == []
