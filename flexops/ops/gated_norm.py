"""The gated RMS norm of linear-attention and state-space models (Mamba 2: Dao and Gu, arXiv
2405.21060), in one pass over memory.

For each group of columns, with ``u = x`` or, if the gate is first, ``u = x * act(gate)``::

    n = u / sqrt(mean(u * u) + eps)
    out = weight * n * act(gate)        or, if the gate is first, weight * n

``act`` is silu, or sigmoid (Kimi Linear: arXiv 2510.26692). Everything is computed in float32 and
rounded once, to the dtype of ``x``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import FLOAT_DTYPES, check_shape, whole, wide
from ._declared import define
from ._register import caller, check_places, is_dense
from ._self_check import Make, checking
from .norm import check_eps


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_first: bool = True,
    groups: int = 1,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    """``rms_norm(x) * weight * act(gate)``, or with ``norm_first=False`` ``rms_norm(x *
    act(gate)) * weight``. Formula: see the module.

    Args:
        x: ``[..., H]``, float32, float16 or bfloat16.
        gate: the shape and dtype of ``x``.
        weight: ``[H]``, of these dtypes, or None.
        eps: added to the mean square.
        norm_first: as Qwen3-Next has it; False: as Mamba 2 and Bamba have it.
        groups: the last dimension is normalized in so many equal parts, each by itself.
        activation: of the gate.

    Returns:
        the shape and dtype of ``x``.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes or ``activation`` are not as above.

    Differentiable once, with respect to ``x``, ``gate`` and ``weight``.
    """
    where = "flexops.gated_rms_norm:"
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"{where} activation must be silu or sigmoid, got {activation!r}")
    for name, one in (("x", x), ("gate", gate), ("weight", weight)):
        if one is None and name == "weight":
            continue
        if not isinstance(one, Tensor):
            raise TypeError(f"{where} {name} must be a tensor, got {type(one).__name__}")
        if not is_dense(one):
            check_places(where[:-1], {name: one})
    check_shape(where[:-1], "gate", gate, x.shape, whose="x")
    check_eps("gated_rms_norm", eps)
    if whole(f"{where} groups", groups) < 1 or x.dim() == 0 or x.shape[-1] % groups != 0:
        raise ValueError(
            f"{where} groups must divide the last dimension of x, got {groups} for shape"
            f" {list(x.shape)}"
        )
    if weight is not None:
        check_shape(where[:-1], "weight", weight, x.shape[-1:])
    if weight is not None and weight.dtype in FLOAT_DTYPES and weight.dtype != x.dtype:
        weight = weight.float()
    rows = (one.unsqueeze(0).flatten(0, -2) if x.dim() != 2 else one for one in (x, gate))
    result: Tensor = _CALL(*rows, weight, eps, groups, norm_first, activation == "sigmoid")
    return result.view(x.shape)


# ---- the ops: x, [tokens, H] ----


def _scaled(u: Tensor, eps: float, groups: int) -> Tensor:
    parts = u.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    scaled: Tensor = (parts * scale).flatten(-2)
    return scaled


def _reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int, norm_first: bool,
    sigmoid: bool,
) -> Tensor:  # fmt: skip
    act, u = (torch.sigmoid if sigmoid else F.silu)(wide(gate)), wide(x)
    n = _scaled(u if norm_first else u * act, eps, groups)
    n = n if weight is None else n * wide(weight)
    return (n * act if norm_first else n).to(x.dtype).contiguous()


def _backward_reference(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    norm_first: bool,
    sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of weight, ``x`` and ``gate``; of no weight, a tensor of no elements."""
    values, gates, upstream = wide(x), wide(gate), wide(grad)
    half = torch.sigmoid(gates)
    act, slope = gates * half, half * (1 + gates * (1 - half))
    if sigmoid:
        act, slope = half, half * (1 - half)
    u = values if norm_first else values * act
    n = _scaled(u, eps, groups)
    of_weight = grad.new_empty(0)
    if weight is not None:
        of_weight = (upstream * n * (act if norm_first else 1)).sum(0).to(weight.dtype)
    weighted = upstream if weight is None else upstream * wide(weight)
    parts, of_n, of_parts = (
        one.unflatten(-1, (groups, -1)) for one in (u, weighted * (act if norm_first else 1), n)
    )
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    of_u = (scale * (of_n - of_parts * (of_n * of_parts).mean(-1, keepdim=True))).flatten(-2)
    of_x = of_u if norm_first else of_u * act
    of_gate = slope * (weighted * n if norm_first else of_u * values)
    return of_weight, of_x.to(x.dtype).contiguous(), of_gate.to(x.dtype).contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors
    of_weight, of_x, of_gate = torch.ops.flexops.gated_rms_norm_backward.default(
        grad, x, gate, weight, ctx.eps, ctx.groups, ctx.norm_first, ctx.sigmoid
    )
    return of_x, of_gate, None if weight is None else of_weight


define("gated_rms_norm", _reference, saves=("x", "gate", "weight"), backward=_backward)
define("gated_rms_norm_backward", _backward_reference)
_CALL = caller(torch.ops.flexops.gated_rms_norm.default)


@checking()
def self_check(make: Make) -> Any:
    """Both orders and activations, with their gradients."""
    x, gate, grad, weight = make(35, 96), make(35, 96), make(35, 96), make(96)
    ops = torch.ops.flexops
    return [
        (
            ops.gated_rms_norm(x, gate, weight, *options),
            ops.gated_rms_norm_backward(grad, x, gate, weight, *options),
        )
        for options in ((1e-6, 1, True, False), (1e-6, 3, False, False), (1e-6, 1, True, True))
    ]
