"""Layers within a decode step: those whose parts are no more what was patched compute as they
are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import zoo
from torch import nn

import flexops
from flexops.generation import products


def _doubled(_: nn.Module, __: Any, y: Any) -> Any:
    return (y[0] * 2, *y[1:]) if isinstance(y, tuple) else y * 2


def _activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _hook_of(*path: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.get_submodule(".".join(path)).register_forward_hook(_doubled)

    return change


def _bias_of(*path: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        linear = layer.get_submodule(".".join(path))
        linear.bias = nn.Parameter(torch.randn(linear.out_features))

    return change


CHANGES = {
    "activation": _activation,
    "a bias of one projection": _bias_of("self_attn", "k_proj"),
    "a bias of the gate": _bias_of("mlp", "gate_proj"),
    "a hook of a projection": _hook_of("self_attn", "k_proj"),
    "a hook of the block": _hook_of("mlp"),
    "a hook of attention": _hook_of("self_attn"),
    "a hook of the second norm": _hook_of("post_attention_layernorm"),
}


def tokens(model: Any, changed: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
    """Of the patched model in steps, and of the model's own code."""
    inputs = {"input_ids": torch.arange(3, 30).view(3, 9)}
    flexops.patch(model)
    if changed:
        changed(model.model.layers[0])
    found = flexops.generate(model, **inputs, max_new_tokens=12, eos_token_id=())
    flexops.unpatch(model)
    with tiny.eagerly(model):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
        return found, model.generate(**inputs, **options)


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_was_changed_later_computes_what_it_is(change):
    found, wanted = tokens(tiny.model("llama").eval(), CHANGES[change])
    assert torch.equal(found, wanted)


def test_a_layer_that_scales_what_it_adds_does_so_in_a_step():
    """Granite's, whose parts have the names of Llama's."""
    model = tiny.model("granite_swa", residual_multiplier=0.3).eval()
    assert {"self_attn", "mlp"} < set(model.model.layers[0]._modules)
    found, wanted = tokens(model)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "granitemoehybrid", "lfm2"])
def test_every_linear_layer_is_a_product_of_few_rows_in_a_step(name, monkeypatch):
    """Packed ones, too; the plain block of GPT-NeoX reads its weights itself."""
    model = tiny.model(name) if name in ("llama", "phi3") else zoo.tiny(name)
    seen = set()
    composed = products.few_rows.composed

    def watch(x: torch.Tensor, weights: Any, *rest: Any, **named: Any) -> torch.Tensor:
        seen.update(one.data_ptr() for one in weights)
        return composed(x, weights, *rest, **named)

    monkeypatch.setattr(products.few_rows, "composed", watch)
    found, wanted = tokens(model.eval())
    assert torch.equal(found, wanted)
    linears = [one for one in model.base_model.modules() if isinstance(one, nn.Linear)]
    known = [one for one in linears if one.weight.data_ptr() in seen]
    others = [one for one in linears if one.weight.data_ptr() not in seen]
    assert known
    assert bool(others) is (name == "gpt_neox")


def test_linear_layers_are_given_back():
    model = tiny.model("phi3").eval()
    flexops.patch(model)
    linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
    assert any("forward" in one.__dict__ for one in linears)
    flexops.patch(model, generation=False)
    flexops.unpatch(model)
    assert not any("forward" in one.__dict__ for one in linears)
