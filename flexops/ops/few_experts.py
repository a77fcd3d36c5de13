"""Gated experts of few tokens, as a decode step has them: each choice reads its expert's weights
where they are, in as long as that takes; nothing is sorted.

With ``e = choices[t, j]``, gates and ups of ``packed = gate_up[e] x[t] + gate_up_bias[e]``::

    h[t, j] = act(gate) up                or, clamped, (up + 1) gate sigmoid(alpha gate)
    out[t] = sum_j weights[t, j] (down[e] h[t, j] + down_bias[e])

Gates and ups are rounded to x's dtype, and so is ``h``; the rest is computed in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import check_shape
from ._declared import define
from ._register import caller, check_places, has_native
from ._self_check import Make, checking

ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "clamped": 4}
_HALVES = (torch.bfloat16, torch.float16)
MOST_CHOICES, _MOST_OF_AN_EXPERT = 64, 2
"""Of a call, and on average of an expert. On an H200, 64 choices of 128 experts take as long as
products of sorted choices, which read each expert's weights once; more were not measured."""


def fits(x: Tensor, choices: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether the kernels take these tensors (``[tokens, hidden]``, and weights as of
    :func:`few_experts`), and are the fastest means."""
    count, hidden, inner = down.shape
    return (
        x.is_cuda
        and x.dtype in _HALVES
        and gate_up.dtype == down.dtype == x.dtype
        and 0 < choices.numel() <= min(MOST_CHOICES, _MOST_OF_AN_EXPERT * count)
        and hidden % 8 == 0
        and inner % 8 == 0
        and gate_up.shape[1] == 2 * inner
        and _are_columns(gate_up) == _are_columns(down)
        and all(one.is_contiguous() or _are_columns(one) for one in (gate_up, down))
        and not torch.is_autocast_enabled("cuda")
        and _runs_on(x.device)
    )


def weights_for(x: Tensor, weights: Tensor) -> Tensor:
    """Weights of choices, of any floating-point dtype, as :func:`few_experts` takes them."""
    of = weights if weights.dtype in (torch.float32, x.dtype) else weights.float()
    return of.contiguous()


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Whether it is a GPU whose kernels were measured."""
    return torch.cuda.get_device_capability(device)[0] >= 8 and has_native("few_experts", "cuda")


def _are_columns(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def few_experts(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Tensor:
    """The experts of each token, weighted and added up. Formulas: see the module.

    Args:
        x: ``[tokens, hidden]``, bfloat16 or float16.
        choices: ``[tokens, k]``, int64 or int32: a token's experts; what is no expert's number is
            left out.
        weights: ``[tokens, k]``, float32 or x's dtype. An expert of weight 0 is not computed.
        gate_up: ``[experts, 2 inner, hidden]``, x's dtype: rows of gates, then of ups, or one of
            each in turn if ``interleaved``. Contiguous, or its last two dimensions swapped are.
        down: ``[experts, hidden, inner]``, laid out as ``gate_up``.
        biases: ``[experts, 2 inner]`` and ``[experts, hidden]``, or None.
        activation: of :data:`ACTIVATIONS`; ``alpha`` and ``limit`` are of ``"clamped"``.

    Returns:
        ``[tokens, hidden]``. No gradient.
    """
    columns = _are_columns(gate_up)
    if columns:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    number = ACTIVATIONS[activation]
    result: Tensor = _CALL(
        x, choices, weights, gate_up, down, *biases, columns, interleaved, number, alpha, limit
    )
    return result


def _check(
    x: Tensor, choices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, columns: bool, *_: Any,
) -> None:  # fmt: skip
    op = "flexops.ops.few_experts"
    given = {"x": x, "choices": choices, "weights": weights, "gate_up": gate_up, "down": down}
    check_places(op, given)
    for name, tensor, dims in (("x", x, 2), ("gate_up", gate_up, 3), ("down", down, 3)):
        if tensor.dim() != dims:
            raise ValueError(f"{op}: {name} must have {dims} dimensions, got {list(tensor.shape)}")
    if weights.dtype not in (torch.float32, x.dtype):
        raise TypeError(f"{op}: weights must be float32 or {x.dtype}, got {weights.dtype}")
    check_shape(op, "choices", choices, [x.shape[0], "k"])
    check_shape(op, "weights", weights, choices.shape, whose="choices")
    experts, hidden = down.shape[0], x.shape[1]
    inner = down.shape[1 if columns else 2]
    shapes = [[experts, 2 * inner, hidden], [experts, hidden, inner]]
    for name, tensor, shape in zip(("gate_up", "down"), (gate_up, down), shapes, strict=True):
        check_shape(op, name, tensor, [shape[0], *shape[1:][:: -1 if columns else 1]])
    for name, bias, shape in (
        ("gate_up_bias", gate_up_bias, shapes[0]),
        ("down_bias", down_bias, shapes[1]),
    ):
        if bias is not None:
            check_shape(op, name, bias, shape[:2])


def _reference(
    x: Tensor, choices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, columns: bool, interleaved: bool,
    activation: int, alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    if columns:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    there = (choices >= 0) & (choices < len(down))
    chosen = choices.long().where(there, 0)

    def product(weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        out = (weight[chosen].to(wide) @ rows.to(wide).unsqueeze(-1)).squeeze(-1)
        return out if bias is None else out + bias[chosen].to(wide)

    packed = product(gate_up, x[:, None].expand(*choices.shape, -1), gate_up_bias)
    packed = packed.to(x.dtype).to(wide)
    gate, up = (packed[..., ::2], packed[..., 1::2]) if interleaved else packed.chunk(2, -1)
    h = _activated(gate, up, activation, alpha, limit).to(x.dtype)
    out = product(down, h, down_bias) * weights.to(wide)[..., None]
    return out.where(there[..., None], 0).sum(1).to(x.dtype)


def _activated(gate: Tensor, up: Tensor, activation: int, alpha: float, limit: float) -> Tensor:
    if activation == ACTIVATIONS["clamped"]:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if activation == ACTIVATIONS["silu"]:
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if activation == 2 else "tanh") * up


define("few_experts", _reference, check=_check)
_CALL = caller(torch.ops.flexops.few_experts.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """Two tokens of two experts; then by columns, clamped and with biases."""
    half: Any = functools.partial(make, dtype=torch.bfloat16)
    x, weights = half(2, 64), half(2, 2)
    gate_up, down = half(3, 48, 64) / 8, half(3, 64, 24) / 4
    choices = torch.tensor([[0, 2], [1, 3]], device=x.device)  # the last one is no expert
    first = few_experts(x, choices, weights, gate_up, down)
    gate_up, down = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (gate_up, down))
    biases = half(3, 48), half(3, 64)
    clamped: Any = {"activation": "clamped", "interleaved": True, "alpha": 1.7, "limit": 2.0}
    return first, few_experts(x, choices, weights, gate_up, down, biases, **clamped)
