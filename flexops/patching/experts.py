"""Mixtures of experts for transformers, registered as ``experts_implementation="flexops"``: grouped
products, and nothing of tokens x k x hidden written twice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.linears import DTYPES
from ..ops.activation import swiglu
from ..ops.experts import (
    add_bias,
    check_choices,
    combine_rows,
    expert_order,
    gated_experts,
    spread_rows,
)
from ..ops.grouped_linear import grouped_linear
from .forwards import plain
from .probe import (
    LENGTH,
    Miniature,
    Swap,
    is_transformers,
    linear,
    parameter,
    small,
    small_sizes,
)

NAME = "flexops"
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What transformers' decorator ``use_experts_implementation`` gives a class."""
_REPLACEABLE = (None, "eager", "grouped_mm", "batched_mm", NAME)
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def register_experts() -> None:
    """Make transformers know ``experts_implementation="flexops"``; more than once does no harm."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts)


def experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """transformers' experts function.

    Args:
        module: the experts' module: its 3-D weights, flags and activation.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, k]``, the numbers of each token's experts; ``num_experts`` leaves
            a choice out.
        top_k_weights: ``[tokens, k]``.

    Returns:
        ``[tokens, hidden]``, hidden_states' dtype.

    Weights may be the results of parametrizations, such as PEFT's LoRA of parameters: gradients
    reach them.
    """
    x = hidden_states.reshape(-1, hidden_states.shape[-1]).to(module.down_proj.dtype)
    top_k_index = top_k_index.reshape(x.shape[0], -1)
    top_k_weights = top_k_weights.reshape(top_k_index.shape)
    out = _compute(_parts(module), x, top_k_index, top_k_weights)
    return out.view(hidden_states.shape).to(hidden_states.dtype)


def _has_norm(module: Any) -> bool:
    """Whether a norm follows each expert; transformers older than 5.23 have none."""
    return bool(getattr(module, "has_post_expert_norm", False))


def _standard_activation(module: Any) -> Any:
    """The activation of experts that are act(gate) * up and nothing else; "" for others."""
    # of a package, whose modules are loaded lazily, torch.compile of torch 2.11 imports nothing
    from transformers.integrations.moe import _default_apply_gate

    standard = (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
        and not _has_norm(module)
        and type(module)._apply_gate is _default_apply_gate
    )
    return _ACTIVATIONS.get(type(module.act_fn).__name__, "") if standard else ""


Layer = tuple[Tensor, Tensor | None]
"""``[experts, outputs, inputs]``, and the biases."""


class Parts(NamedTuple):
    """What experts consist of: the layers of gate and up, packed or apart, or of up alone; that of
    down; what is between; the activation, if :func:`flexops.gated_experts` computes all; a norm."""

    first: Sequence[Layer]
    last: Layer
    inner: Callable[..., Any]
    kind: Any = ""
    norm: Any = None


def _parts(module: Any) -> Parts:
    """Of experts with transformers' flags."""

    def layer(name: str) -> Layer:
        weight, beside = getattr(module, name), f"{name}_bias"
        bias = getattr(module, beside) if module.has_bias else None
        return weight.transpose(1, 2) if module.is_transposed else weight, bias

    first = layer("gate_up_proj" if module.has_gate else "up_proj")
    inner = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if _has_norm(module) else None
    return Parts([first], layer("down_proj"), inner, _standard_activation(module), norm)


def _compute(parts: Parts, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    first, last, inner, kind, norm = parts
    if kind:
        return gated_experts(x, choices, weights, first[0][0], last[0], activation=kind)
    if not torch.compiler.is_compiling():
        check_choices(choices, len(last[0]))
    order = expert_order(choices, len(last[0]))

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = grouped_linear(rows, weight, order.offsets)
        return out if bias is None else add_bias(out, bias, order)

    rows = spread_rows(x, order)
    out = linear(inner(*(linear(rows, *one) for one in first)), *last)
    return combine_rows(out if norm is None else norm(out), weights, order)


# ---- patching ------------------------------------------------------------------------------------


def concerns(module: Any) -> bool:
    """Whether it is experts whose class goes through transformers' interface."""
    return all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS) and hasattr(
        module, "down_proj"
    )


def refuse(module: Any) -> str:
    """Why experts stay as they are; "" if they need not."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as functions

    chosen = getattr(module.config, "_experts_implementation", None)
    if chosen not in _REPLACEABLE:
        return f"the model was told to use {chosen}"
    if chosen in functions and chosen != NAME and not is_transformers(functions[chosen]):
        return f"another function was registered as its experts, {chosen}"
    if module.down_proj.dim() != 3:
        return "its weights are not one 3-D tensor each"
    return ""


def variant(module: Any) -> Any:
    flags = (getattr(module, flag) for flag in _FLAGS)
    return (*flags, _has_norm(module), type(getattr(module, "act_fn", None)))


def candidates(module: Any) -> Iterator[tuple[Any, ...]]:
    name = "gated_experts" if _standard_activation(module) else "grouped_linear"
    yield name, lambda one: [(one, functools.partial(experts, one))]


def _small(module: Any) -> Any:
    """A small one, whose weights may be results of parametrizations."""
    names = [f"{one}_proj{bias}" for one in ("gate_up", "up", "down") for bias in ("", "_bias")]
    own = {name: getattr(module, name, None) for name in names}
    weights = {name: one for name, one in own.items() if isinstance(one, Tensor)}
    sizes = small_sizes(*(n for one in weights.values() for n in one.shape))
    given = {name: parameter(*(sizes[n] for n in one.shape)) for name, one in weights.items()}
    return small(module, sizes, **given)


def _choices(rows: int, count: int, other: int = 0) -> tuple[Tensor, Tensor]:
    """Of the first and the last expert, and another, with weights."""
    chosen = [[0, count - 1]] * (rows - 2) + [[count - 1, other]] * 2
    return torch.tensor(chosen), torch.rand(rows, 2)


def miniature(module: Any) -> Miniature:
    """With experts that are not chosen, with the class's own (eager) code."""
    made = _small(module)
    made.config._experts_implementation_internal = "eager"
    count, width = made.down_proj.shape[0], made.down_proj.shape[2 if module.is_transposed else 1]
    return made, (torch.randn(LENGTH, width), *_choices(LENGTH, count)), {}


# ---- blocks that give every token to every expert ------------------------------------------------


def concerns_dense(module: Any) -> bool:
    """Whether a block's own code computes all experts of each token, of which a router's scores
    take one: Llama 4."""
    experts = getattr(module, "experts", None)
    weights = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        all(isinstance(one, Tensor) and one.dim() == 3 for one in weights)
        and not concerns(experts)
        and isinstance(getattr(module, "router", None), nn.Module)
        and isinstance(getattr(module, "shared_expert", None), nn.Module)
    )


def refuse_dense(module: Any) -> str:
    return "" if getattr(module, "top_k", 0) == 1 else "its tokens have several experts each"


def dense(module: Any, hidden_states: Tensor) -> Any:
    """Such a block, with each token's own expert alone. The score scales what the expert reads."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = module.router(x)
    weights, choices = scores.max(1, keepdim=True)
    experts = module.experts

    def gate(packed: Tensor) -> Any:
        first, second = packed.chunk(2, -1)
        return second * experts.act_fn(first)

    layers = [(one.transpose(1, 2), None) for one in (experts.gate_up_proj, experts.down_proj)]
    parts = Parts(layers[:1], layers[1], gate)
    out = _compute(parts, x * weights, choices, torch.ones_like(weights))
    return module.shared_expert(x) + out, logits


def dense_miniature(module: Any) -> Miniature:
    experts = module.experts
    sizes = small_sizes(*experts.gate_up_proj.shape, *experts.down_proj.shape)
    width = sizes[experts.down_proj.shape[2]]
    made = small(module, sizes, shared_expert=linear(width, width))
    return made, (torch.randn(2, LENGTH, width),), {}


# ---- one product of each expert ------------------------------------------------------------------


def concerns_grouped(module: Any) -> bool:
    """Whether a module has the weights of several linear layers and no more: Aria's, JetMoE's."""
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._modules
    return weight is not None and weight.dim() == 3 and alone


def grouped_candidates(module: Any) -> Iterator[tuple[Any, ...]]:
    for transposed, listed in itertools.product((False, True), repeat=2):
        make = functools.partial(grouped_miniature, module, transposed, listed)
        yield "grouped_linear", functools.partial(_grouped_swap, transposed=transposed), make


def _grouped_swap(module: Any, transposed: bool) -> Swap:
    return [(module, functools.partial(grouped, module, transposed=transposed))]


def grouped(module: Any, x: Tensor, sizes: Any, *, transposed: bool) -> Any:
    """Rows of each expert one behind the other; ``sizes`` is how many each has."""
    listed = isinstance(sizes, list) and not torch.compiler.is_compiling()
    if x.dtype not in DTYPES or (listed and sum(sizes) != len(x)):
        return plain(module, x, sizes)
    weight = module.weight.transpose(1, 2) if transposed else module.weight
    sizes = torch.tensor(sizes, device=x.device) if isinstance(sizes, list) else sizes
    ends = sizes.to(x.device).cumsum(0).int()
    return grouped_linear(x, weight, ends)


def grouped_miniature(module: Any, transposed: bool, listed: bool) -> Miniature:
    made = small(module, small_sizes(*module.weight.shape))
    count, outputs, inputs = made.weight.shape
    sizes = [LENGTH - 2, *[0] * (count - 2), 2]
    x = torch.randn(LENGTH, outputs if transposed else inputs)
    return made, (x, sizes if listed else torch.tensor(sizes)), {}


# ---- experts of classes that do not go through transformers' interface ---------------------------


def _routed_parts(module: Any) -> Parts | None:
    act: Any = F.silu
    first: Any = getattr(module, "gate_up_proj", None)
    last: Any = getattr(module, "down_proj", None)
    one, two, mlp = map(module._modules.get, ("fc1", "fc2", "mlp"))
    flat: list[Any] = [getattr(mlp, name, None) for name in ("w1", "v1", "w2")]
    count = getattr(module, "num_experts", 0)
    apart: list[Any] = []
    whole = isinstance(first, Tensor) and isinstance(last, Tensor)
    if whole:  # Step 3.7, LongCat
        if not first.dim() == last.dim() == 3:
            return None
        act = getattr(module, "act_fn", F.silu)
    elif one is not None and two is not None and concerns_grouped(one) and concerns_grouped(two):
        first, last = (part.weight.transpose(1, 2) for part in (one, two))  # Aria
    elif count and all(isinstance(each, Tensor) and each.dim() == 2 for each in flat):  # DBRX
        first, *apart, last = (each.view(count, -1, each.shape[-1]) for each in flat)
        last, act = last.transpose(1, 2), getattr(mlp, "activation_fn", F.silu)
    else:
        return None
    own = getattr(module, "_apply_gate", None)
    kind = _ACTIVATIONS.get(type(act).__name__, "silu" if act is F.silu else "")

    def inner(gate: Tensor, up: Tensor | None = None) -> Any:
        if kind == "silu":
            return swiglu(gate, up)
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return act(gate) * up

    layers = [(each, None) for each in (first, *apart)]
    return Parts(layers, (last, None), own or inner, kind if whole and own is None else "")


def concerns_routed(module: Any) -> bool:
    """Whether a module has the weights of all experts, and its code goes from one to the next."""
    return not concerns(module) and _routed_parts(module) is not None


def routed(module: Any, hidden_states: Tensor, routing: Tensor, weights: Any = None) -> Any:
    """Such experts. ``routing`` has the choices, or, without ``weights``, what the module's
    ``route_tokens_to_experts`` makes them of. Choices behind the last expert stand for experts that
    return what they read (LongCat)."""
    parts = _routed_parts(module)
    if parts is None or hidden_states.dtype not in DTYPES:
        return plain(module, hidden_states, routing, *(() if weights is None else (weights,)))
    choices, weights = (
        module.route_tokens_to_experts(routing) if weights is None else (routing, weights)
    )
    (last, _), first = parts.last, [one for one, _ in parts.first]
    count = len(last)
    if not torch.compiler.is_compiling():
        check_choices(choices, len(first[0]))
    x = hidden_states.reshape(-1, hidden_states.shape[-1]).to(last.dtype)
    parts = parts._replace(first=[(one[:count], None) for one in first])
    out = _compute(parts, x, choices.clamp(max=count), weights)
    if len(first[0]) > count:
        out = out + x * weights.masked_fill(choices < count, 0.0).sum(-1, keepdim=True).to(x.dtype)
    return out.view(hidden_states.shape).to(hidden_states.dtype)


def routed_candidates(module: Any) -> Iterator[tuple[Any, ...]]:
    """Tokens in rows, and in rows of rows."""
    for shape in ((LENGTH,), (2, LENGTH)):
        make = functools.partial(routed_miniature, module, shape)
        yield "grouped_linear", lambda one: [(one, functools.partial(routed, one))], make


def routed_miniature(module: Any, shape: tuple[int, ...]) -> Miniature:
    found = _routed_parts(module)
    assert found is not None
    (last, _), first = found.last, [one for one, _ in found.first]
    sizes = small_sizes(*(n for one in (last, *first) for n in one.shape))
    count, width, inner = last.shape
    sizes.setdefault(count * inner, sizes[count] * sizes[inner])  # DBRX's weights are flat
    made = small(module, sizes)
    total = sizes[len(first[0])]
    x = torch.randn(*shape, sizes[width])
    rows = x.numel() // sizes[width]
    if "route_tokens_to_experts" in dir(module):
        return made, (x, torch.randn(rows, total)), {}
    other = total - 1 if total > sizes[count] else 0
    return made, (x, *_choices(rows, sizes[count], other)), {}
