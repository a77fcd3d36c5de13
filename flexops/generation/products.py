"""What linear layers compute within one decode step: products of few
rows, with the norm before and the residual's addition behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch import is_unheard
from ..nn.linears import function_of, is_bare, is_int4
from ..ops import few_rows, few_rows_chain
from ..ops.int4_linear import TILE_N, streams
from .state import state

_ACTIVATIONS = {"silu": "silu", "none": "gelu", "tanh": "gelu_tanh"}
_HALVES = (torch.bfloat16, torch.float16)


def takes(x: Tensor, *linears: Any) -> bool:
    """Whether ``product`` computes these layers of ``x``, in a step."""
    return (
        state.active
        and x.numel() <= few_rows.MOST_ROWS * x.shape[-1]
        and (_are_int4(x, linears) or all(_is_plain(x, one) for one in linears))
        and len({one.bias is None for one in linears}) == 1
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_plain(x: Tensor, linear: Any) -> bool:
    return (
        is_bare(linear, fp8=True)
        and linear.weight.dtype == x.dtype
        and bool(linear.weight.is_contiguous())
    )


def _are_int4(x: Tensor, linears: tuple[Any, ...]) -> bool:
    """Whether these are layers of 4 bits that one product computes."""
    if not all(is_int4(one) for one in linears):
        return False
    weights = [one.weight for one in linears]
    return (
        all(one.n % TILE_N == 0 and (not x.is_cuda or streams(x, one)) for one in weights)
        and len({(one.k, one.group_size, one.zeros is None, one.dtype) for one in weights}) == 1
    )


def ends_a_block(linear: Any) -> bool:
    """Whether ``product`` can compute a layer that ends a block."""
    return is_bare(linear, fp8=True) or is_int4(linear)


def without_norm(x: Tensor, norm: Any, wanted: bool) -> Tensor:
    """``norm(x)``; or, if wanted and it can be, x itself for products that normalize it."""
    known = getattr(function_of(norm), "__name__", "") == "rms_norm"
    # a product of float16 numbers and a norm's weights might overflow
    weight = getattr(norm, "weight", None)
    right = x.dtype != torch.float16 and weight is not None and weight.dtype == x.dtype
    right = right and is_unheard(norm)
    if not (wanted and known and right):
        normed: Tensor = norm(x)
        return normed
    alias, options = x.view_as(x), norm.__dict__["forward"].keywords
    state.normed = (alias, norm.weight, options["eps"], options.get("offset", 0.0))
    return alias


@contextlib.contextmanager
def leaving(residual: Tensor, wanted: bool) -> Iterator[Callable[[Tensor], Tensor]]:
    """Have the product that ends the block within add this, if wanted; gives what adds it to the
    block's result otherwise."""
    state.residual = residual if wanted else None

    def add(x: Tensor) -> Tensor:
        added = wanted and state.residual is None
        return x if added else residual + x

    yield add
    state.residual = None


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """A router's product, ``[rows, k]`` by ``[experts, k]``; None where it is not this one's: in a
    step, of few rows of 16 bits on a GPU."""
    few = (
        state.active
        and x.device.type == "cuda"
        and x.dtype in _HALVES
        and x.dtype == weight.dtype
        and x.numel() <= few_rows.MOST_ROWS * x.shape[-1]
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cuda")
    )
    if not few:
        return None
    return few_rows.few_rows_linear(x, [weight], [] if bias is None else [bias], early=True)


def product(
    x: Tensor, linears: tuple[Any, ...], activation: str | None = None, ends: bool = False
) -> Tensor:
    """Linear layers of one input side by side, or the gated product of two.

    Args:
        activation: as patterns name it: ``silu``, ``none`` or ``tanh``.
        ends: it ends a block: what was left by :func:`leave` is added.
    """
    weights = [one.weight for one in linears]
    biases = [one.bias for one in linears if one.bias is not None]
    norm, eps, offset = None, 0.0, 0.0
    if state.normed is not None and state.normed[0] is x:
        _, norm, eps, offset = state.normed
    residual = None
    if ends:
        residual, state.residual = state.residual, None
    kind = None if activation is None else _ACTIVATIONS[activation]
    if state.queue is not None and few_rows_chain.fits(x, weights):
        width = weights[0].shape[0] if kind else sum(one.shape[0] for one in weights)
        out, number = x.new_empty([*x.shape[:-1], width]), few_rows.ACTIVATIONS[kind]
        phase = few_rows_chain.Phase(out, x, weights, biases, norm, residual, number)
        made: Tensor = state.queue.add(phase, (eps, offset))
        return made
    return _compute_of(x)(
        x, weights, biases, norm=norm, eps=eps, offset=offset, activation=kind,
        residual=residual, early=True,
    )  # fmt: skip


def gated_halves(x: Tensor, linear: Any, activation: str, gate_first: bool) -> Tensor | None:
    """The gated product of the halves of one layer; None where it is not this one's."""
    if not (takes(x, linear) and _is_plain(x, linear)) or linear.weight.shape[0] % 2:
        return None
    order = slice(None, None, 1 if gate_first else -1)
    weights, biases = (
        [] if one is None else one.chunk(2)[order] for one in (linear.weight, linear.bias)
    )
    return _compute_of(x)(x, weights, biases, activation=_ACTIVATIONS[activation], early=True)


def _compute_of(x: Tensor) -> Callable[..., Tensor]:
    on_gpu = x.dtype in _HALVES and x.device.type == "cuda"
    return few_rows.few_rows_linear if on_gpu else few_rows.composed
