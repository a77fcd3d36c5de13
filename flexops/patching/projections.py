"""The projections of an attention as one product: the first of them that is called makes what the
others will be asked for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..generation import products
from ..generation.state import state
from ..nn import Int4Linear
from ..nn.linears import shared, together
from .forwards import given, plain
from .probe import Swap

NAMES = ("q_proj", "k_proj", "v_proj")


def projection(module: Any, x: Tensor, *, siblings: tuple[Any, ...]) -> Any:
    """One of them: the first that is called makes what the others will be asked for. In graphs each
    is computed alone."""
    if torch.compiler.is_compiling():
        return plain(module, x)
    if products.takes(x, *siblings):
        return _in_a_step(module, x, siblings)
    known = shared(module, x, siblings, together)
    return plain(module, x) if known is None else known


def _in_a_step(module: nn.Module, x: Tensor, siblings: tuple[Any, ...]) -> Tensor:
    """The same in a decode step, where what was made is the thread's own."""
    made = state.projected
    if made is None or made[0] is not x:
        widths = [one.weight.shape[0] for one in siblings]
        results = products.product(x, siblings).split(widths, -1)
        made = state.projected = x, dict(zip(map(id, siblings), results, strict=True))
    found: Tensor = made[1][id(module)]
    return found


def output(module: Any, x: Tensor) -> Any:
    """The linear layer behind attention."""
    if not torch.compiler.is_compiling() and products.takes(x, module):
        return products.product(x, (module,), ends=True)
    return plain(module, x)


def alone(module: Any, x: Tensor) -> Any:
    """Any other linear layer of a model that generates."""
    if state.active and not torch.compiler.is_compiling() and products.takes(x, module):
        return products.product(x, (module,))
    return plain(module, x)


def swap(module: Any) -> Swap:
    linears = tuple(getattr(module, name) for name in NAMES)
    found: Swap = [(one, functools.partial(projection, one, siblings=linears)) for one in linears]
    last: Any = getattr(module, "o_proj", None)
    if type(last) in (nn.Linear, Int4Linear) and "forward" not in last.__dict__:
        found.append((last, functools.partial(output, last)))
    return found


def concerns(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in NAMES)


def refuse(module: Any) -> str:
    """Why an attention's projections stay apart; "" if they need not."""
    linears = [getattr(module, name) for name in NAMES]
    if {type(one) for one in linears} not in ({nn.Linear}, {Int4Linear}):
        return "its projections are no plain linear layers"
    if len({one.in_features for one in linears}) > 1:
        return "its projections read tensors of different widths"
    if any(given(one) is not None for one in linears):
        return "a projection's forward was replaced before, by something else"
    return ""
