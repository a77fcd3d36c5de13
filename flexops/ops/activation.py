"""Activations with what stands beside them in a feed-forward block: a bias before, a gate after.

=================  ===============================================================================
``bias_gelu``      ``gelu(x + bias)``; gelu is ``x Phi(x)``, with Phi of the normal distribution
                   (``approximate="none"``),
                   ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (``"tanh"``) or
                   ``x sigmoid(1.702 x)`` (``"quick"``): Hendrycks and Gimpel, 2016
``bias_silu``      ``silu(x + bias)``; silu is ``x sigmoid(x)``
``bias_relu2``     ``relu(x + bias) ** 2``
``swiglu``         ``silu(gate) * up``: Shazeer, "GLU Variants Improve Transformer", 2020
``geglu``          ``gelu(gate) * up``
=================  ===============================================================================

Everything between reading the inputs and rounding the result is float32: ``x + bias`` is not
rounded to x's dtype, as two operations would. Backward passes keep the inputs only and work out the
rest again; a bias's gradient is added up in float32, in an order that depends on the shape and the
device alone, so it has the same bits every time.

As in torch, infinite inputs give NaN where a formula has infinity times zero: ``gelu(-inf)``,
``silu(-inf)``, and gradients at either infinity.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ._arguments import check_shape, check_tensor, wide
from ._declared import define
from ._register import caller
from ._self_check import Make, checking

Approximation = Literal["none", "tanh"]
_GELUS = ("none", "tanh", "quick")


def bias_gelu(
    x: Tensor, bias: Tensor | None = None, approximate: Literal["none", "tanh", "quick"] = "none"
) -> Tensor:
    """``gelu(x + bias)``, in one pass; the backward pass works out both gradients in one, too.

    Args:
        x: float32, bfloat16 or float16, ``[..., n]``, any strides; rows that are slices of longer
            ones are read where they are.
        bias: ``[n]``, of any of these dtypes, or None.
        approximate: ``"none"`` (erf) or ``"tanh"``, as in ``torch.nn.functional.gelu``, or
            ``"quick"``, as in CLIP.

    Returns:
        a contiguous tensor of x's shape and dtype. Differentiable, once, with respect to ``x`` and
        ``bias``.

    Raises:
        TypeError: ``x`` or ``bias`` is no tensor of these dtypes.
        ValueError: a shape or ``approximate`` is not as above.
    """
    if approximate not in _GELUS:
        raise ValueError(
            f'flexops.bias_gelu: approximate must be "none", "tanh" or "quick", got {approximate!r}'
        )
    result: Tensor = _bias_gelu(x, bias, _GELUS.index(approximate))
    return result


def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(x + bias)``, ``silu(x) = x * sigmoid(x)``; otherwise like :func:`bias_gelu`."""
    result: Tensor = _bias_silu(x, bias)
    return result


def bias_relu2(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``relu(x + bias) ** 2``: So, Mańke, Liu, Dai, Shazeer and Le, "Primer", 2021; otherwise like
    :func:`bias_gelu`."""
    result: Tensor = _bias_relu2(x, bias)
    return result


def swiglu(gate: Tensor, up: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    """``silu(gate) * up``, from two tensors or from one that holds both.

    Args:
        gate: float32, bfloat16 or float16, ``[..., n]``, any strides; rows that are slices of
            longer ones, such as the chunks of a packed projection, are read where they are. Without
            ``up``: ``[..., 2 n]``, gate and up packed, and its gradient is packed as well.
        up: of gate's shape and dtype; None if ``gate`` holds both.
        interleaved: how they are packed: gate and up alternate (``gate[..., ::2]``, ``gate[...,
            1::2]``), or, if False, the gate is the first half and up the second.

    Returns:
        a contiguous tensor ``[..., n]`` of gate's dtype. Differentiable, once, with respect to
        ``gate`` and ``up``.

    Raises:
        TypeError: ``gate`` is no tensor of these dtypes, or ``up`` none of gate's.
        ValueError: shapes are not as above, or ``interleaved`` is given together with ``up``.
    """
    result: Tensor = _swiglu(gate, up, interleaved)
    return result


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Approximation = "none",
    interleaved: bool = False,
) -> Tensor:
    """``gelu(gate) * up``; see :func:`swiglu` for the arguments, and :func:`bias_gelu` for
    ``approximate``.

    Some models (Stable Diffusion's feed-forward blocks, say) pack the gate as the *second* half:
    call ``geglu(*reversed(x.chunk(2, -1)))`` there, which copies nothing.
    """
    result: Tensor = _geglu(
        gate, up, approximate == "tanh" or not_tanh("geglu", approximate), interleaved
    )
    return result


# ---- checks ----


def _check_biased(op: str, x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(f"flexops.{op}: x must have at least one dimension")


def check_gated(op: str, gate: Tensor, up: Tensor | None, interleaved: bool) -> None:
    check_tensor(f"flexops.{op}", "gate", gate)
    if gate.dim() == 0:
        raise ValueError(f"flexops.{op}: gate must have at least one dimension")
    if up is None:
        if gate.size(-1) % 2:
            raise ValueError(
                f"flexops.{op}: gate must have an even last dimension, since it holds gate and up"
                f" if up is None, got {list(gate.shape)}"
            )
        return
    check_tensor(f"flexops.{op}", "up", up, (gate.dtype,))
    check_shape(f"flexops.{op}", "up", up, gate.shape, whose="gate")
    if interleaved:
        raise ValueError(
            f"flexops.{op}: interleaved must be False if up is given: it says how one tensor holds"
            " both"
        )


def not_tanh(op: str, approximate: str) -> bool:
    if approximate != "none":
        raise ValueError(f'flexops.{op}: approximate must be "none" or "tanh", got {approximate!r}')
    return False


# ---- references: plain PyTorch ----


# Not torch's own: those of 1 + erf(x) and 1 + tanh(u) have no digits left where x is far below 0.


def _phi(x: Tensor) -> Tensor:
    """The normal distribution's."""
    phi: Tensor = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
    return phi


def _argument(x: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """``t``, of which silu, gelu(tanh) and gelu(quick) are ``x * sigmoid(t)`` because ``(1 +
    tanh(u)) / 2 = sigmoid(2 u)``; and its derivative."""
    if which in ("silu", "quick"):
        slope = 1.0 if which == "silu" else 1.702
        return x * slope, torch.full_like(x, slope)
    square = x.square().clamp(max=100.0)  # beyond that, sigmoid(t) is 0 or 1
    scale = math.sqrt(8 / math.pi)
    return x * (scale + scale * 0.044715 * square), scale + scale * 3 * 0.044715 * square


def _activation(x: Tensor, which: str) -> Tensor:
    if which == "relu2":
        return x.relu().square()
    return x * (_phi(x) if which == "none" else _argument(x, which)[0].sigmoid())


def _slope(x: Tensor, which: str) -> Tensor:
    """The activation's derivative."""
    if which == "relu2":
        return 2 * x.relu()
    if which == "none":
        return _phi(x) + x * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    t, inner = _argument(x, which)
    return t.sigmoid() + x * (t.sigmoid() * (-t).sigmoid()) * inner


def _biased(x: Tensor, bias: Tensor | None, which: str) -> Tensor:
    before = wide(x) if bias is None else wide(x) + wide(bias)
    return _activation(before, which).to(x.dtype).contiguous()


def _biased_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, which: str, bias_gradient: bool
) -> tuple[Tensor, Tensor]:
    before = wide(x) if bias is None else wide(x) + wide(bias)
    inner = wide(grad) * _slope(before, which)
    if bias is None or not bias_gradient:
        return inner.to(x.dtype).contiguous(), x.new_empty(
            0, dtype=x.dtype if bias is None else bias.dtype
        )
    return inner.to(x.dtype).contiguous(), (
        inner.sum(tuple(range(x.dim() - 1))).to(bias.dtype)
        if x.dim() > 1
        else inner.to(bias.dtype, copy=True)
    )


def _split(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    first, second = gate.chunk(2, -1)
    return first, second


def gated_reference(gate: Tensor, up: Tensor | None, which: str, interleaved: bool) -> Tensor:
    gates, ups = _split(gate, up, interleaved)
    return (_activation(wide(gates), which) * wide(ups)).to(gate.dtype).contiguous()


def gated_backward_reference(
    grad: Tensor, gate: Tensor, up: Tensor | None, which: str, interleaved: bool
) -> tuple[Tensor, Tensor]:
    gates, ups = (wide(part) for part in _split(gate, up, interleaved))
    outer = wide(grad)
    gate_grad, up_grad = outer * ups * _slope(gates, which), outer * _activation(gates, which)
    if up is not None:
        return gate_grad.to(gate.dtype).contiguous(), up_grad.to(gate.dtype).contiguous()
    packed = (
        torch.stack([gate_grad, up_grad], -1).flatten(-2)
        if interleaved
        else torch.cat([gate_grad, up_grad], -1)
    )
    return packed.to(gate.dtype).contiguous(), gate.new_empty(0)


# ---- operators ----


def _keep(ctx: Any, args: tuple[Any, ...], _: Tensor) -> None:
    """The two tensors, and the options that follow them."""
    ctx.save_for_backward(args[0], args[1])
    ctx.options = args[2:]


def _gradients(ctx: Any, op: Any, grad: Tensor, *options: bool) -> tuple[Tensor | None, ...]:
    first, second = op(grad, *ctx.saved_tensors, *ctx.options, *options)
    wanted = ctx.needs_input_grad
    return first if wanted[0] else None, second if wanted[1] else None, *(None for _ in ctx.options)


def _gelu_name(tanh: bool) -> str:
    return "tanh" if tanh else "none"


define(
    "bias_gelu",
    lambda x, bias, number: _biased(x, bias, _GELUS[number]),
    check=lambda x, *_: _check_biased("bias_gelu", x),
    setup_context=_keep,
    backward=lambda ctx, grad: _gradients(ctx, _bias_gelu_backward, grad, ctx.needs_input_grad[1]),
)
define(
    "bias_gelu_backward",
    lambda grad, x, bias, number, bias_gradient: _biased_backward(
        grad, x, bias, _GELUS[number], bias_gradient
    ),
)


def _define_biased(which: str) -> None:
    """``bias_silu`` and ``bias_relu2``, which have no options."""
    op = f"bias_{which}"
    gradient = f"{op}_backward"
    define(
        op,
        lambda x, bias: _biased(x, bias, which),
        check=lambda x, _: _check_biased(op, x),
        setup_context=_keep,
        backward=lambda ctx, grad: _gradients(
            ctx, getattr(torch.ops.flexops, gradient).default, grad, ctx.needs_input_grad[1]
        ),
    )
    define(
        gradient,
        lambda grad, x, bias, bias_gradient: _biased_backward(grad, x, bias, which, bias_gradient),
    )


_define_biased("silu")
_define_biased("relu2")
define(
    "swiglu",
    lambda gate, up, interleaved: gated_reference(gate, up, "silu", interleaved),
    check=lambda gate, up, interleaved: check_gated("swiglu", gate, up, interleaved),
    setup_context=_keep,
    backward=lambda ctx, grad: _gradients(ctx, _swiglu_backward, grad),
)
define(
    "swiglu_backward",
    lambda grad, gate, up, interleaved: gated_backward_reference(
        grad, gate, up, "silu", interleaved
    ),
)
define(
    "geglu",
    lambda gate, up, tanh, interleaved: gated_reference(gate, up, _gelu_name(tanh), interleaved),
    check=lambda gate, up, _, interleaved: check_gated("geglu", gate, up, interleaved),
    setup_context=_keep,
    backward=lambda ctx, grad: _gradients(ctx, _geglu_backward, grad),
)
define(
    "geglu_backward",
    lambda grad, gate, up, tanh, interleaved: gated_backward_reference(
        grad, gate, up, _gelu_name(tanh), interleaved
    ),
)

# Looked up once: small calls feel it.
_bias_gelu = caller(torch.ops.flexops.bias_gelu.default)
_bias_gelu_backward: Any = torch.ops.flexops.bias_gelu_backward.default
_bias_silu = caller(torch.ops.flexops.bias_silu.default)
_bias_relu2 = caller(torch.ops.flexops.bias_relu2.default)
_swiglu = caller(torch.ops.flexops.swiglu.default)
_swiglu_backward: Any = torch.ops.flexops.swiglu_backward.default
_geglu = caller(torch.ops.flexops.geglu.default)
_geglu_backward: Any = torch.ops.flexops.geglu_backward.default


@checking()
def self_check(make: Make) -> Any:
    """Every activation and its gradients."""
    x, up, grad, bias = make(65, 96), make(65, 96), make(65, 96), make(96)
    ops, results = torch.ops.flexops, []
    for which in ("silu", "tanh", "none"):
        gelu = () if which == "silu" else (which == "tanh",)
        number = () if which == "silu" else (_GELUS.index(which),)
        biased, gated = ("bias_silu", "swiglu") if which == "silu" else ("bias_gelu", "geglu")
        results += [
            getattr(ops, biased)(x, bias, *number),
            getattr(ops, f"{biased}_backward")(grad, x, bias, *number, True),
            getattr(ops, gated)(x, up, *gelu, False),
            getattr(ops, f"{gated}_backward")(grad, x, up, *gelu, False),
        ]
    return results
