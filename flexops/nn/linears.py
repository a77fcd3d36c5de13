"""Linear layers that read the same tensor: the gradients that they give it need no additions of
their own.

The projections of an attention are one product: those of keys and values are often too small to
fill a GPU. Parameters stay what they are; the one matrix is made of them for each product, which
costs little beside it. Those of a gated block stay two products, of which the backward pass' second
adds to the first's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_transforming, is_unheard, product_dtype
from ..ops._register import once_differentiable
from . import Int4Linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (nn.Parameter, Tensor)
_LEAST_ROWS = 1024
"""Beside so many, a copy of the weights is little."""


def is_plain(parameter: Tensor | None) -> bool:
    """Whether operators take it: a part of a DTensor, say, they do not."""
    return parameter is None or (type(parameter) in _PLAIN and parameter.dtype in DTYPES)


def function_of(module: Any) -> Any:
    """What a module's replaced ``forward``, a ``functools.partial``, calls; None if it has none."""
    return getattr(module.__dict__.get("forward"), "func", None)


LINEARS = ("Linear", "Conv1D")
"""Names of classes: torch's linear layer, and GPT-2's, whose weight is transposed."""


def is_linear(module: Any, names: tuple[str, ...] = LINEARS) -> bool:
    cls = type(module)
    known = cls is nn.Linear or cls.__module__ == "transformers.pytorch_utils"
    return known and cls.__name__ in names


REPLACED = "its forward was replaced before, by something else"
"""Why a module is skipped."""
NAMES = ("projection", "output", "alone")
"""Of the functions that a plain linear layer's forward is replaced by (``projections.py``)."""
FP8 = "fp8_forward"
"""The function that takes their place in fp8 (``fp8.py``)."""
_FOUND = "_flexops_projected"


def shared(
    module: Any, x: Tensor, siblings: tuple[Any, ...], product: Callable[..., list[Tensor] | None]
) -> Tensor | None:
    """What ``module`` makes of x: the first of its siblings that is called computes all. None if
    ``product`` gives None, or another than the first is called."""
    if x.is_inference():  # its changes in place are not counted
        return None
    found = module.__dict__.pop(_FOUND, None)
    if found is not None and found[0] is x and found[2] == x._version:
        made: Tensor = found[1]
        return made
    results = product(x, siblings) if siblings[0] is module else None
    if results is None:
        return None
    # attention keeps the values, and must not keep all three with them
    results[-1] = results[-1].contiguous()
    for one, result in zip(siblings[1:], results[1:], strict=True):
        one.__dict__[_FOUND] = (x, result, x._version)
    return results[0]


def is_bare(linear: Any, names: tuple[str, ...] = LINEARS[:1], *, fp8: bool = False) -> bool:
    """Whether its weight and bias are all there is to it; with ``fp8`` also in a layer of fp8."""
    return (
        is_linear(linear, names)
        and _computes_its_own(linear, fp8)
        and type(linear.weight) is nn.Parameter
        and is_plain(linear.bias)
    )


def is_int4(linear: Any) -> bool:
    """The same of a layer with a weight of 4 bits."""
    return type(linear) is Int4Linear and _computes_its_own(linear)


def _computes_its_own(linear: Any, fp8: bool = False) -> bool:
    name = getattr(function_of(linear), "__name__", "")
    own = "forward" not in linear.__dict__ or name in (*NAMES, *(FP8,) * fp8)
    return own and is_unheard(linear)


class _Products(torch.autograd.Function):
    """Linear layers of one tensor: as one product (``joined``), or each alone, of which the
    backward pass' later ones add to the first's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, count: int, joined: bool, *parts: Tensor
    ) -> Any:
        ctx.x_dtype, ctx.shape, ctx.count, ctx.joined = x.dtype, x.shape, count, joined
        ctx.dtypes, ctx.sizes = [one.dtype for one in parts], [len(one) for one in parts[:count]]
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            # frozen weights need no gradient, for which x would be kept
            kept = any(ctx.needs_input_grad[4 : 4 + count])
            ctx.save_for_backward(x if kept else None, *parts[:count])
            weights, biases = (_joined(one, joined) for one in (parts[:count], parts[count:]))
            made = [
                F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
                for weight, bias in itertools.zip_longest(weights, biases)
            ]
            return made[0] if joined else tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows, of_x = [grad.reshape(-1, grad.shape[-1]) for grad in grads], None
        wanted, count = ctx.needs_input_grad[4:], ctx.count

        def each(compute: Callable[[Tensor], Tensor], asked: tuple[bool, ...]) -> list[Any]:
            if ctx.joined and any(asked):
                return list(compute(rows[0]).split(ctx.sizes))
            return [compute(one) if yes else None for one, yes in zip(rows, asked, strict=False)]

        with torch.autocast(grads[0].device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                for one, weight in zip(rows, _joined(weights, ctx.joined), strict=True):
                    weight = weight.to(one.dtype)
                    of_x = one @ weight if of_x is None else of_x.addmm_(one, weight)
                assert of_x is not None
                of_x = of_x.view(ctx.shape).to(ctx.x_dtype)
            of_weights = each(lambda one: one.t() @ x.reshape(-1, x.shape[-1]), wanted[:count])
            of_biases = each(lambda one: one.sum(0, dtype=torch.float32), wanted[count:])
        found = itertools.zip_longest([*of_weights, *of_biases], ctx.dtypes, wanted)
        given = [
            one.to(dtype) if asked and one is not None else None for one, dtype, asked in found
        ]
        return of_x, None, None, None, *given


def _joined(parts: Sequence[Tensor], joined: bool) -> Sequence[Tensor]:
    return [torch.cat(list(parts))] if joined and parts else parts


def pair(x: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """``first(x), second(x)``."""
    parts = _parts(x, (first, second), 0)
    if parts is None:
        return first(x), second(x)
    both: tuple[Tensor, Tensor] = _Products.apply(x, product_dtype(x), 2, False, *parts)
    return both


def together(x: Tensor, linears: tuple[Any, ...]) -> list[Tensor] | None:
    """What linear layers make of one tensor, by one product; None where that is not to be."""
    parts = _parts(x, linears, _LEAST_ROWS)
    if parts is None:
        return None
    made: Tensor = _Products.apply(x, product_dtype(x), len(linears), True, *parts)
    return list(made.split([one.weight.shape[0] for one in linears], -1))


def _parts(x: Tensor, linears: tuple[Any, ...], least: int) -> list[Tensor] | None:
    """The weights and biases of plain linear layers that are to be differentiated; None if they are
    something else, or x has fewer rows."""
    if not torch.is_grad_enabled() or not all(map(is_bare, linears)):
        return None  # another module, such as an adapter's, may have no weight
    weights = [one.weight for one in linears]
    biases = [one.bias for one in linears if one.bias is not None]
    usual = (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.numel() >= least * x.shape[-1]
        and not is_transforming()
        and (x.requires_grad or any(weight.requires_grad for weight in weights))
        and x.device.type in ("cpu", "cuda")
        and (x.dtype == weights[0].dtype or torch.is_autocast_enabled(x.device.type))
    )
    kinds = {(one.device, one.dtype) for one in weights} | {(x.device, weights[0].dtype)}
    if not usual or len(kinds) > 1 or len(biases) not in (0, len(linears)):
        return None
    return [*weights, *biases]
