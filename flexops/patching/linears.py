"""Linear layers that read the same tensor: the gradients that they give it need no additions of
their own.

The projections of an attention are one product: those of keys and values are often too small to
fill a GPU. Parameters stay what they are; the one matrix is made of them for each product, which
costs little beside it. Those of a gated block stay two products, of which the backward pass' second
adds to the first's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_transforming, is_unheard, product_dtype
from ..nn import Int4Linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (nn.Parameter, Tensor)
_LEAST_ROWS = 1024
"""Beside so many, a copy of the weights is little."""


def is_plain(parameter: Tensor | None) -> bool:
    """Whether operators take it: a part of a DTensor, say, they do not."""
    return parameter is None or (type(parameter) in _PLAIN and parameter.dtype in DTYPES)


LINEARS = ("Linear", "Conv1D")
"""Names of classes: torch's linear layer, and GPT-2's, whose weight is transposed."""


def is_linear(module: Any, names: tuple[str, ...] = LINEARS) -> bool:
    cls = type(module)
    known = cls is nn.Linear or cls.__module__ == "transformers.pytorch_utils"
    return known and cls.__name__ in names


NAMES = ("projection", "output")
"""Of the functions that a plain linear layer's forward is replaced by (``projections.py``)."""
_FOUND = "_flexops_projected"


def shared(
    module: Any, x: Tensor, siblings: tuple[Any, ...], product: Callable[..., list[Tensor] | None]
) -> Tensor | None:
    """What ``module`` makes of x: the first of its siblings that is called computes all. None if
    ``product`` gives None, or another than the first is called."""
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


def is_bare(linear: Any, names: tuple[str, ...] = LINEARS[:1]) -> bool:
    """Whether its weight and bias are all there is to it."""
    return (
        is_linear(linear, names)
        and _computes_its_own(linear)
        and type(linear.weight) is nn.Parameter
        and is_plain(linear.bias)
    )


def is_int4(linear: Any) -> bool:
    """The same of a layer with a weight of 4 bits."""
    return type(linear) is Int4Linear and _computes_its_own(linear)


def _computes_its_own(linear: Any) -> bool:
    forward = linear.__dict__.get("forward")
    own = forward is None or (
        isinstance(forward, functools.partial) and getattr(forward.func, "__name__", "") in NAMES
    )
    return own and is_unheard(linear)


class _Product(torch.autograd.Function):
    """``linear(x, cat(weights), cat(biases))``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int, *parts: Tensor) -> Tensor:
        weights, biases = parts[:count], parts[count:]
        with torch.autocast(x.device.type, enabled=False):
            ctx.x_dtype, ctx.dtypes, x = x.dtype, tuple(part.dtype for part in parts), x.to(dtype)
            ctx.sizes = [weight.shape[0] for weight in weights]
            # frozen weights need no gradient, for which x would be kept
            kept = any(ctx.needs_input_grad[3 : 3 + count])
            ctx.save_for_backward(x if kept else None, *weights)
            ctx.shape = x.shape
            return F.linear(
                x, torch.cat(weights).to(dtype), torch.cat(biases).to(dtype) if biases else None
            )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows, of_x, of_weights = grad.reshape(-1, grad.shape[-1]), None, [None] * len(weights)
        wanted = ctx.needs_input_grad[3:]
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = (rows @ torch.cat(weights).to(grad.dtype)).view(ctx.shape).to(ctx.x_dtype)
            if any(wanted[: len(weights)]):
                of_weights = list((rows.t() @ x.reshape(-1, x.shape[-1])).split(ctx.sizes))
            of_biases = (
                rows.sum(0, dtype=torch.float32).split(ctx.sizes)
                if any(wanted[len(weights) :])
                else ()
            )
        parts = [*of_weights, *of_biases, *[None] * (len(wanted) - len(weights) - len(of_biases))]
        given = [
            part.to(dtype) if asked and part is not None else None
            for part, dtype, asked in zip(parts, ctx.dtypes, wanted, strict=True)
        ]
        return of_x, None, None, *given


class _Pair(torch.autograd.Function):
    """``linear(x, first, bias), linear(x, second, bias)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, first: Tensor, second: Tensor, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            ctx.x_dtype, ctx.shape, ctx.bias_dtypes, x = (
                x.dtype,
                x.shape,
                [bias.dtype for bias in biases],
                x.to(dtype),
            )
            ctx.save_for_backward(x if any(ctx.needs_input_grad[2:4]) else None, first, second)
            weights = (first.to(dtype), second.to(dtype))
            one, other = (
                (
                    F.linear(x, weight, bias.to(dtype))
                    for weight, bias in zip(weights, biases, strict=True)
                )
                if biases
                else (F.linear(x, weight) for weight in weights)
            )
            return one, other

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows, of_x = [grad.reshape(-1, grad.shape[-1]) for grad in grads], None
        with torch.autocast(grads[0].device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = rows[0] @ weights[0].to(grads[0].dtype)
                of_x = (
                    of_x.addmm_(rows[1], weights[1].to(grads[1].dtype))
                    .view(ctx.shape)
                    .to(ctx.x_dtype)
                )
            of_weights = [
                (part.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype) if asked else None
                for part, weight, asked in zip(
                    rows, weights, ctx.needs_input_grad[2:4], strict=True
                )
            ]
            of_biases = [
                part.sum(0, dtype=torch.float32).to(dtype) if asked else None
                for part, dtype, asked in zip(
                    rows, ctx.bias_dtypes, ctx.needs_input_grad[4:], strict=False
                )
            ]
        return of_x, None, *of_weights, *of_biases


def pair(x: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """``first(x), second(x)``."""
    parts = _parts(x, (first, second), 0)
    if parts is None:
        return first(x), second(x)
    both: tuple[Tensor, Tensor] = _Pair.apply(x, product_dtype(x), *parts)
    return both


def together(x: Tensor, linears: tuple[Any, ...]) -> list[Tensor] | None:
    """What linear layers make of one tensor, by one product; None where that is not to be."""
    parts = _parts(x, linears, _LEAST_ROWS)
    if parts is None:
        return None
    return list(
        _Product.apply(x, product_dtype(x), len(linears), *parts).split(
            [one.weight.shape[0] for one in linears], -1
        )
    )


def _parts(x: Tensor, linears: tuple[Any, ...], least: int) -> list[Tensor] | None:
    """The weights and biases of plain linear layers that are to be differentiated; None if they are
    something else, or x has fewer rows."""
    if not all(map(is_bare, linears)):  # another module, such as an adapter's, may have no weight
        return None
    weights, biases = (
        [one.weight for one in linears],
        [one.bias for one in linears if one.bias is not None],
    )
    usual = (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.numel() >= least * x.shape[-1]
        and not is_transforming()
    )
    alike = len(
        {(weight.device, weight.dtype) for weight in weights} | {(x.device, weights[0].dtype)}
    ) == 1 and len(biases) in (0, len(linears))
    if (
        not usual
        or not alike
        or not (x.requires_grad or any(weight.requires_grad for weight in weights))
    ):
        return None
    if x.device.type not in ("cpu", "cuda") or (
        x.dtype != weights[0].dtype and not torch.is_autocast_enabled(x.device.type)
    ):
        return None
    return [*weights, *biases]
