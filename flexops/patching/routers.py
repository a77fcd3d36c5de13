"""Routers: the experts of each token and their weights in one kernel, behind the product that a
class's own code computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..generation.products import router_logits
from ..nn.linears import DTYPES
from ..ops.routing import route_tokens
from .forwards import plain, replacement
from .probe import (
    LENGTH,
    WIDTH,
    Swap,
    by,
    disagreement,
    once,
    own_class,
    own_code,
    settings,
    small,
    undisturbed,
)

_BIAS = "e_score_correction_bias"
_GROUPED = ("num_group", "n_group", "topk_group", "moe_statics")


def concerns(module: Any) -> bool:
    """Whether a module chooses some, ``top_k``, of a linear layer's results as
    :func:`flexops.route_tokens` does. DeepSeek's choose from groups first."""
    weight, k = module._parameters.get("weight"), getattr(module, "top_k", None)
    own = set(module._parameters) | set(module._buffers)
    looks_so = (
        weight is not None
        and weight.dim() == 2
        and type(k) is int
        and 0 < k < len(weight)
        and own <= {"weight", "bias", _BIAS}
        and not module._modules
        and not any(hasattr(module, name) for name in _GROUPED)
    )
    return looks_so and _kind(module) is not None


def _kind(module: Any) -> dict[str, Any] | None:
    """The options of ``route`` that make it compute what the class's own code does."""

    def find() -> dict[str, Any] | None:
        wide = _is_wide(module)
        for scoring, normalize, scaled in itertools.product(
            ("softmax", "sigmoid"), (True, False), (False, True)
        ):
            kind = {"scoring": scoring, "normalize": normalize, "scaled": scaled, "wide": wide}
            swap = functools.partial(_swap, by(route, **kind))
            if not any(
                disagreement(functools.partial(miniature, module, training), swap)
                for training in (False, True)
            ):
                return kind
        return None

    names = frozenset(module._parameters) | frozenset(module._buffers)
    return once(("router", names, own_class(module), own_code(module), settings(module)), find)


def candidates(module: Any) -> Iterator[tuple[Any, ...]]:
    yield "route_tokens", functools.partial(_swap, by(route, **(_kind(module) or {})))


def _swap(swap: Callable[[Any], Swap], module: Any) -> Swap:
    return swap(module.router if isinstance(module, _Whole) else module)


class _Whole(nn.Module):
    """All that a router gives, as one tensor: its logits, and the weight of each expert."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        logits, weights, choices = self.router(x)
        of_experts = torch.zeros_like(logits).scatter(1, choices, weights.to(logits.dtype))
        return torch.cat([logits, of_experts], 1)


def _is_wide(module: Any) -> tuple[bool, bool]:
    """Whether logits and weights are float32 where x has 16 bits."""
    made, (x,), _ = miniature(module)
    try:
        with undisturbed():
            logits, weights, _ = made.router.bfloat16()(x.bfloat16())
    except (Exception, SystemExit):  # whatever code of another may raise; the probe says what
        return False, False
    return logits.dtype == torch.float32, weights.dtype == torch.float32


@replacement
def route(
    module: Any, hidden_states: Tensor, *, scoring: Any, normalize: bool, scaled: bool,
    wide: tuple[bool, bool],
) -> Any:  # fmt: skip
    """Logits, weights and choices. ``scaled``: weights are divided by how many there are."""
    x, weight, bias = hidden_states, module.weight, module._parameters.get("bias")
    alike = wide[0] or x.dtype == weight.dtype
    if x.dtype not in DTYPES or weight.dtype not in DTYPES or not alike:
        return plain(module, hidden_states)
    x = x.reshape(-1, weight.shape[1])
    if wide[0]:
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    few = router_logits(x, weight, bias)
    logits = F.linear(x, weight, bias) if few is None else few
    correction = getattr(module, _BIAS, None)
    correction = None if correction is None else correction.float()
    scale = 1 / module.top_k if scaled else 1.0
    options = {"scoring": scoring, "normalize": normalize, "scale": scale}
    try:
        weights, choices = route_tokens(logits, module.top_k, bias=correction, **options)
    except ValueError:  # on a CPU, of logits that are not numbers
        return plain(module, hidden_states)
    return logits, weights if wide[1] else weights.to(logits.dtype), choices


def miniature(module: Any, training: bool = False) -> Any:
    experts, hidden = module.weight.shape
    count = module.top_k + 5
    if experts == hidden:  # which of them a number of the module is cannot be known
        sizes = {experts: count}
    else:
        sizes = {experts: count, hidden: WIDTH if count != WIDTH else 2 * WIDTH}
    made = small(module, sizes)
    made.top_k = module.top_k  # which may be one of the sizes
    # scores of near equal logits hardly tell softmax from sigmoid
    made.weight = nn.Parameter(torch.randn(*(sizes[n] for n in module.weight.shape)))
    for one in (made._parameters.get("bias"), getattr(made, _BIAS, None)):
        if one is not None:
            one.data = torch.randn(count)
    return _Whole(made).train(training), (torch.randn(LENGTH, made.weight.shape[1]),), {}
