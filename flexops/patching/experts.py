"""Mixtures of experts for transformers, registered as ``experts_implementation="flexops"``: grouped
products, and nothing of tokens x k x hidden written twice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_grad_enabled
from ..nn.expert_parts import (
    FLAGS,
    Layer,
    Parts,
    flag,
    has_flags,
    has_norm,
    parts_of,
    standard_activation,
    usual_gate,
)
from ..nn.linears import DTYPES
from ..ops.experts import (
    add_bias,
    check_choices,
    combine_rows,
    expert_order,
    gated_experts,
    spread_rows,
)
from ..ops.few_experts import few_experts, fits, weights_for
from ..ops.grouped_linear import grouped_linear
from .forwards import plain
from .probe import (
    LENGTH,
    Miniature,
    arguments,
    by,
    is_transformers,
    linear,
    parameter,
    small,
    small_sizes,
)

NAME = "flexops"
_REPLACEABLE = (None, "eager", "grouped_mm", "batched_mm", NAME)


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
            a choice out. Of experts with gate and up, but without down (LongCat), the result is
            what they read.
        top_k_weights: ``[tokens, k]``.

    Returns:
        ``[tokens, hidden]``, hidden_states' dtype.

    Weights may be the results of parametrizations, such as PEFT's LoRA of parameters: gradients
    reach them.
    """
    x = hidden_states.reshape(-1, hidden_states.shape[-1]).to(module.down_proj.dtype)
    choices = top_k_index.reshape(x.shape[0], -1)
    weights = top_k_weights.reshape(choices.shape)
    parts, count = parts_of(module), len(module.down_proj)
    first, biases = parts.first
    if len(first) == count:
        out = _compute(parts, x, choices, weights)
    else:
        if not torch.compiler.is_compiling():
            check_choices(choices, len(first))
        parts = parts._replace(first=(first[:count], biases))
        own = weights.masked_fill(choices < count, 0.0).sum(-1, keepdim=True)
        out = _compute(parts, x, choices.clamp(max=count), weights) + x * own.to(x.dtype)
    return out.view(hidden_states.shape).to(hidden_states.dtype)


def _compute(parts: Parts, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    first, last, inner, kind, norm, few = parts
    if kind:
        return gated_experts(x, choices, weights, first[0], last[0], activation=kind)
    if not torch.compiler.is_compiling():
        check_choices(choices, len(last[0]))
        if few is not None and _takes_few(x, choices, weights, first, last):
            given = x, choices, weights_for(x, weights), first[0], last[0], (first[1], last[1])
            return few_experts(*given, **few)
    order = expert_order(choices, len(last[0]))

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = grouped_linear(rows, weight, order.offsets)
        return out if bias is None else add_bias(out, bias, order)

    rows = spread_rows(x, order)
    out = linear(inner(linear(rows, *first)), *last)
    return combine_rows(out if norm is None else norm(out), weights, order)


def _takes_few(x: Tensor, choices: Tensor, weights: Tensor, first: Layer, last: Layer) -> bool:
    tensors = x, weights, *first, *last
    keeps = is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
    alike = all(one is None or one.dtype == x.dtype for one in (first[1], last[1]))
    return not keeps and alike and fits(x, choices, first[0], last[0])


# ---- patching ------------------------------------------------------------------------------------


def concerns(module: Any) -> bool:
    """Whether it is experts whose class goes through transformers' interface, or might: it has the
    weights of all, and is called with choices and their weights (Step 3.7, LongCat)."""
    if has_flags(module):
        return hasattr(module, "down_proj")
    if not _are_whole(module) or not hasattr(module, "act_fn"):
        return False
    return len(arguments(module)) == 3


def _are_whole(module: Any) -> bool:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(one, Tensor) and one.dim() == 3 for one in weights)


def refuse(module: Any) -> str:
    """Why experts stay as they are; "" if they need not."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen not in _REPLACEABLE:
        return f"the model was told to use {chosen}"
    if chosen not in (None, NAME):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as functions

        if chosen in functions and not is_transformers(functions[chosen]):
            return f"another function was registered as its experts, {chosen}"
    if module.down_proj.dim() != 3:
        return "its weights are not one 3-D tensor each"
    return ""


def variant(module: Any) -> Any:
    flags = (flag(module, name) for name in FLAGS)
    return (*flags, has_norm(module), type(getattr(module, "act_fn", None)))


def candidates(module: Any) -> Iterator[tuple[Any, ...]]:
    name = "gated_experts" if standard_activation(module) else "grouped_linear"
    yield name, by(experts)


def _small(module: Any) -> Any:
    """A small one, whose weights may be results of parametrizations."""
    names = [f"{one}_proj{bias}" for one in ("gate_up", "up", "down") for bias in ("", "_bias")]
    own = {name: getattr(module, name, None) for name in names}
    weights = {name: one for name, one in own.items() if isinstance(one, Tensor)}
    sizes = small_sizes(*(n for one in weights.values() for n in one.shape))
    given = {name: parameter(*(sizes[n] for n in one.shape)) for name, one in weights.items()}
    return small(module, sizes, **given)


def miniature(module: Any) -> Miniature:
    """With experts that are not chosen, with the class's own (eager) code."""
    made = _small(module)
    if hasattr(made, "config"):
        made.config._experts_implementation_internal = "eager"
    count, width = len(made.down_proj), made.down_proj.shape[1 + flag(module, "is_transposed")]
    every = count if not flag(module, "has_gate") else len(made.gate_up_proj)
    chosen = [[0, count - 1]] * (LENGTH - 2) + [[count - 1, every - 1 if every > count else 0]] * 2
    return made, (torch.randn(LENGTH, width), torch.tensor(chosen), torch.rand(LENGTH, 2)), {}


# ---- blocks that give every token to every expert ------------------------------------------------


def concerns_dense(module: Any) -> bool:
    """Whether a block's own code computes all experts of each token, of which a router's scores
    take one: Llama 4."""
    experts = getattr(module, "experts", None)
    return (
        isinstance(experts, nn.Module)
        and _are_whole(experts)
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
    both = module.experts.gate_up_proj, module.experts.down_proj
    first, last = ((one.transpose(1, 2), None) for one in both)
    parts = Parts(first, last, functools.partial(usual_gate, module.experts))
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
        yield "grouped_linear", by(grouped, transposed=transposed), make


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
