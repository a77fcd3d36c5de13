"""What transformers' modules of experts consist of: their weights, flags and gates."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""What transformers' decorator ``use_experts_implementation`` gives a class, and its defaults."""
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
_USUAL = ("usual_gate", "_default_apply_gate")


def flag(module: Any, name: str) -> Any:
    return getattr(module, name, FLAGS[name])


def has_norm(module: Any) -> bool:
    """Whether a norm follows each expert; transformers older than 5.23 have none."""
    return bool(getattr(module, "has_post_expert_norm", False))


def has_flags(module: Any) -> bool:
    """Whether its class goes through transformers' experts interface."""
    return all(isinstance(getattr(module, name, None), bool) for name in FLAGS)


def standard_activation(module: Any) -> Any:
    """The activation of experts that are act(gate) * up and nothing else; "" for others."""
    standard = (
        all(flag(module, name) == usual for name, usual in FLAGS.items())
        and not has_norm(module)
        and _has_usual_gate(module)
    )
    return _ACTIVATIONS.get(type(module.act_fn).__name__, "") if standard else ""


def _has_usual_gate(module: Any) -> bool:
    return getattr(type(module), "_apply_gate", usual_gate).__name__ in _USUAL


def usual_gate(module: Any, packed: Tensor) -> Any:
    gate, up = packed.chunk(2, -1)
    return module.act_fn(gate) * up


def gate_of(module: Any) -> Callable[..., Any]:
    """What makes the inner columns of those of gate and up."""
    own: Callable[..., Any] = functools.partial(usual_gate, module)
    return getattr(module, "_apply_gate", own)


Layer = tuple[Tensor, Tensor | None]
"""``[experts, outputs, inputs]``, and the biases."""


class Parts(NamedTuple):
    """What experts consist of: the layer of gate and up, or of up alone; that of
    down; what is between; the activation, if :func:`flexops.gated_experts` computes all; a norm;
    options of :func:`flexops.ops.few_experts.few_experts`, if that computes few tokens."""

    first: Layer
    last: Layer
    inner: Callable[..., Any]
    kind: Any = ""
    norm: Any = None
    few: dict[str, Any] | None = None


def parts_of(module: Any) -> Parts:
    """Those of a module of transformers."""

    def layer(name: str) -> Layer:
        weight, beside = getattr(module, name), f"{name}_bias"
        bias = getattr(module, beside) if flag(module, "has_bias") else None
        return weight.transpose(1, 2) if flag(module, "is_transposed") else weight, bias

    gated = flag(module, "has_gate")
    first = layer("gate_up_proj" if gated else "up_proj")
    norm = module.post_expert_norm if has_norm(module) else None
    inner = gate_of(module) if gated else module.act_fn
    few = few_options(module) if gated and norm is None else None
    return Parts(first, layer("down_proj"), inner, standard_activation(module), norm, few)


def few_options(module: Any) -> dict[str, Any] | None:
    if _has_usual_gate(module):
        activation = _ACTIVATIONS.get(type(module.act_fn).__name__)
        return None if activation is None else {"activation": activation}
    kind: Any = type(module)
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float) and _is_clamped(kind):
        return {"activation": "clamped", "interleaved": True, "alpha": alpha, "limit": limit}
    return None


@functools.cache
def _is_clamped(kind: Any) -> bool:
    """Whether a class's gate is gpt-oss's: with alpha and limit, of a gate and an up in turn."""
    both = types.SimpleNamespace(alpha=1.5, limit=2.0)
    with torch.device("cpu"):  # from_pretrained builds models on meta, and of 16 bits by default
        one_way = torch.linspace(-3, 3, 16, dtype=torch.float32)
        packed = torch.stack([one_way, -one_way])
        try:
            made = kind._apply_gate(both, packed)
        except Exception:  # it reads more of itself
            return False
        gate, up = packed[:, ::2].clamp(max=2.0), packed[:, 1::2].clamp(-2.0, 2.0)
        wanted = (up + 1) * gate * torch.sigmoid(1.5 * gate)
        alike = isinstance(made, Tensor) and made.shape == wanted.shape
        return alike and torch.allclose(made, wanted)
