"""A gated activation together with the linear layer behind it, so that what is between the two need
not be kept.

``swiglu(gate, up)`` keeps gate and up for its backward pass, and the layer behind it keeps the
product: three tensors of the block's inner width, which is most of what a feed-forward block keeps.
Here the backward pass works the product out once more, for the gradient of the layer's weight, in
the same pass over gate and up that gives their gradients. The gradient of the product is
overwritten by that of the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import product_dtype
from ._arguments import check_shape, check_tensor
from ._declared import define
from ._register import caller
from .activation import (
    Approximation,
    check_gated,
    gated_backward_reference,
    gated_reference,
    not_tanh,
)

_NAMES = ("silu", "none", "tanh")
"""Of the activations, as in :mod:`.activation`, in the order of their numbers here."""


def swiglu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """``linear(swiglu(gate, up), weight, bias)``, which keeps ``gate`` and ``up`` for its backward
    pass, but not their product.

    Args:
        gate, up, interleaved: as for :func:`flexops.swiglu`.
        weight: ``[m, n]``, float32, bfloat16 or float16; of another dtype than gate it is converted
            to that, as a copy.
        bias: ``[m]``, of these dtypes, or None.

    Returns:
        ``[..., m]`` of gate's dtype, or of autocast's: the matrix products follow it.
        Differentiable, once, with respect to all four.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes or devices are not as above.
    """
    return _gated_linear(gate, up, weight, bias, 0, interleaved)


def geglu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: Approximation = "none",
    interleaved: bool = False,
) -> Tensor:
    """``linear(geglu(gate, up), weight, bias)``; otherwise like :func:`swiglu_linear`."""
    return _gated_linear(
        gate,
        up,
        weight,
        bias,
        2 if approximate == "tanh" or not_tanh("geglu_linear", approximate) else 1,
        interleaved,
    )


def _gated_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    which: int,
    interleaved: bool,
) -> Tensor:
    dtype = product_dtype(gate) if isinstance(gate, Tensor) else torch.float32
    result: Tensor = _CALL(gate, up, weight, bias, which, interleaved, dtype)
    return result


def _check(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    which: int,
    interleaved: bool,
    *_: Any,
) -> None:
    op = "geglu_linear" if which else "swiglu_linear"
    for name, tensor in (("weight", weight), *((("bias", bias),) if bias is not None else ())):
        check_tensor(f"flexops.{op}", name, tensor)
    check_gated(op, gate, up, interleaved)
    width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    check_shape(f"flexops.{op}", "weight", weight, ["any", width])
    if bias is not None:
        check_shape(f"flexops.{op}", "bias", bias, weight.shape[:1])


def _product(gate: Tensor, up: Tensor | None, which: int, interleaved: bool) -> Tensor:
    if gate.dtype == torch.float64:  # which is for checks of this function only
        return gated_reference(gate, up, _NAMES[which], interleaved)
    ops = torch.ops.flexops
    result: Tensor = (
        ops.geglu.default(gate, up, which == 2, interleaved)
        if which
        else ops.swiglu.default(gate, up, interleaved)
    )
    return result


def _gradients(
    grad: Tensor, gate: Tensor, up: Tensor | None, which: int, interleaved: bool, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of gate and up, and what the forward pass gave them for. ``grad`` is written over where
    that spares memory."""
    ops = torch.ops.flexops
    if up is not None and gate.dtype != torch.float64:
        return grad, *ops.gated_backward_.default(grad, gate, up, which, again)
    product = _product(gate, up, which, interleaved) if again else gate.new_empty(0)
    if gate.dtype == torch.float64:
        return *gated_backward_reference(grad, gate, up, _NAMES[which], interleaved), product
    if which:
        return *ops.geglu_backward.default(grad, gate, None, which == 2, interleaved), product
    return *ops.swiglu_backward.default(grad, gate, None, interleaved), product


def _reference(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    which: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> Tensor:
    dtype = gate.dtype if gate.dtype == torch.float64 else dtype
    with torch.autocast(gate.device.type, enabled=False):
        product = _product(gate, up, which, interleaved)
        return F.linear(
            product.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )


def _backward_reference(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    which: int,
    interleaved: bool,
    inner: bool,
    outer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``gate`` and ``up`` if ``inner``, and of ``weight`` if ``outer``; else
    empty."""
    of_gate, of_up, of_weight = gate.new_empty(0), gate.new_empty(0), weight.new_empty(0)
    with torch.autocast(gate.device.type, enabled=False):
        if inner:
            of_product = (grad @ weight.to(grad.dtype)).to(gate.dtype).contiguous()
            of_gate, of_up, product = _gradients(of_product, gate, up, which, interleaved, outer)
        elif outer:
            product = _product(gate, up, which, interleaved)
        if outer:
            of_weight = (
                grad.reshape(-1, weight.shape[0]).t()
                @ product.reshape(-1, weight.shape[1]).to(grad.dtype)
            ).to(weight.dtype)
    return of_gate, of_up, of_weight


def _fake(gate: Tensor, _: Tensor | None, weight: Tensor, *rest: Any) -> Tensor:
    return gate.new_empty(
        [*gate.shape[:-1], weight.shape[0]],
        dtype=gate.dtype if gate.dtype == torch.float64 else rest[-1],
    )


def _backward_fake(
    _: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    inner, outer = rest[-2:]
    of_gate = gate.new_empty(gate.shape if inner else [0])
    of_up = gate.new_empty(up.shape) if inner and up is not None else gate.new_empty(0)
    return of_gate, of_up, weight.new_empty(weight.shape if outer else [0])


def _setup(ctx: Any, args: tuple[Any, ...], _: Tensor) -> None:
    ctx.save_for_backward(*args[:3])
    ctx.bias_dtype = None if args[3] is None else args[3].dtype
    ctx.options = args[4:6]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    inner, outer = wanted[0] or wanted[1], wanted[2]
    of_gate, of_up, of_weight = torch.ops.flexops.gated_linear_backward.default(
        grad, gate, up, weight, *ctx.options, inner, outer
    )
    of_bias = (
        grad.reshape(-1, grad.shape[-1])
        .sum(0, dtype=None if grad.dtype == torch.float64 else torch.float32)
        .to(ctx.bias_dtype)
        if wanted[3]
        else None
    )
    return (
        of_gate if wanted[0] else None,
        of_up if wanted[1] else None,
        of_weight if outer else None,
        of_bias,
        None,
        None,
        None,
    )


def _in_place_reference(
    grad: Tensor, gate: Tensor, up: Tensor, activation: int, again: bool
) -> tuple[Tensor, Tensor]:
    of_gate, of_up = gated_backward_reference(grad, gate, up, _NAMES[activation], False)
    grad.copy_(of_gate)
    return of_up, (
        gated_reference(gate, up, _NAMES[activation], False) if again else gate.new_empty(0)
    )


define("gated_backward_", _in_place_reference)
define(
    "gated_linear",
    _reference,
    _fake,
    check=_check,
    setup_context=_setup,
    backward=_backward,
    function="swiglu_linear",
)
define(
    "gated_linear_backward",
    _backward_reference,
    _backward_fake,
)
_CALL = caller(torch.ops.flexops.gated_linear.default)
