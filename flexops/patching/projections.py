"""The projections of an attention as one product: the first of them that is called makes what the
others will be asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..generation.state import state
from ..nn import Int4Linear
from . import decoding
from .forwards import replacement
from .linears import together

NAMES = ("q_proj", "k_proj", "v_proj")
_FOUND = "_flexops_projected"


@replacement
def projection(module: nn.Module, x: Tensor, *, siblings: tuple[Any, ...]) -> Tensor:
    """One of them: the first that is called makes what the others will be asked for."""
    if decoding.takes(x, *siblings):
        return _in_a_step(module, x, siblings)
    found = module.__dict__.pop(_FOUND, None)
    if found is not None and found[0] is x and found[2] == x._version:
        made: Tensor = found[1]
        return made
    results = together(x, siblings) if siblings[0] is module else None
    if results is None:
        return _plainly(module, x)
    # attention keeps the values, and must not keep all three with them
    results[-1] = results[-1].contiguous()
    for one, result in zip(siblings[1:], results[1:], strict=True):
        one.__dict__[_FOUND] = (x, result, x._version)
    return results[0]


def _plainly(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = type(module).forward(module, x)
    return made


def _in_a_step(module: nn.Module, x: Tensor, siblings: tuple[Any, ...]) -> Tensor:
    """The same in a decode step, where what was made is the thread's own."""
    made = state.projected
    if made is None or made[0] is not x:
        widths = [one.weight.shape[0] for one in siblings]
        results = decoding.product(x, siblings).split(widths, -1)
        made = state.projected = x, dict(zip(map(id, siblings), results, strict=True))
    found: Tensor = made[1][id(module)]
    return found


@replacement
def output(module: nn.Module, x: Tensor) -> Tensor:
    """The linear layer behind attention."""
    if decoding.takes(x, module):
        return decoding.product(x, (module,), ends=True)
    return _plainly(module, x)


def refusal(module: Any) -> str | None:
    """Why an attention's projections stay apart; "" if they need not, None if it has no three."""
    linears = [getattr(module, name, None) for name in NAMES]
    if not all(isinstance(one, nn.Module) for one in linears):
        return None
    if {type(one) for one in linears} not in ({nn.Linear}, {Int4Linear}):
        return "its projections are no plain linear layers"
    return (
        ""
        if len({one.in_features for one in linears}) == 1  # type: ignore[union-attr]
        else "its projections read tensors of different widths"
    )
