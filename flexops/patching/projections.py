"""The projections of an attention as one product: the first of them that is called makes what the
others will be asked for."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from . import decoding
from .forwards import replacement
from .linears import together

NAMES = ("q_proj", "k_proj", "v_proj")
_FOUND = "_flexops_projected"


@replacement
def projection(module: nn.Module, x: Tensor, *, siblings: tuple[Any, ...]) -> Tensor:
    """One of them: the first that is called makes what the others will be asked for."""
    found = module.__dict__.pop(_FOUND, None)
    if found is not None and found[0] is x and found[2] == x._version:
        made: Tensor = found[1]
        return made
    results = _of_all(x, siblings) if siblings[0] is module else None
    if results is None:
        return F.linear(x, module.weight, module.bias)  # type: ignore[arg-type]
    for one, result in zip(siblings[1:], results[1:], strict=True):
        one.__dict__[_FOUND] = (x, result, x._version)
    return results[0]


def _of_all(x: Tensor, siblings: tuple[Any, ...]) -> list[Tensor] | None:
    if decoding.takes(x, *siblings):
        widths = [one.weight.shape[0] for one in siblings]
        return list(decoding.product(x, siblings).split(widths, -1))
    results = together(x, siblings)
    if results is not None:
        # attention keeps the values, and must not keep all three with them
        results[-1] = results[-1].contiguous()
    return results


@replacement
def output(module: nn.Module, x: Tensor) -> Tensor:
    """The linear layer behind attention."""
    if decoding.takes(x, module):
        return decoding.product(x, (module,), ends=True)
    return F.linear(x, module.weight, module.bias)  # type: ignore[arg-type]


def refusal(module: Any) -> str | None:
    """Why an attention's projections stay apart; "" if they need not, None if it has no three."""
    linears = [getattr(module, name, None) for name in NAMES]
    if not all(isinstance(one, nn.Module) for one in linears):
        return None
    if not all(type(one) is nn.Linear for one in linears):
        return "its projections are no plain linear layers"
    return (
        ""
        if len({one.in_features for one in linears}) == 1  # type: ignore[union-attr]
        else "its projections read tensors of different widths"
    )
