"""Gated experts of few tokens, as a decode step has them: each choice reads its expert's weights
where they are, in as long as that takes; nothing is sorted.

With ``e = choices[t, j]``, gates and ups of ``packed = gate_up[e] x[t] + gate_up_bias[e]``::

    h[t, j] = act(gate) up                or, clamped, (up + 1) gate sigmoid(alpha gate)
    out[t] = sum_j weights[t, j] (down[e] h[t, j] + down_bias[e])

Gates and ups are rounded to x's dtype, and so is ``h``; the rest is computed in float32.

Weights of 4 bits are those of :mod:`.int4_linear`, or MXFP4's numbers in the same places: a code is
a sign, two bits of exponent and one of mantissa, and the scale of each 32 columns a power of two.
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
from .int4_linear import (
    TILE_N,
    Int4Weight,
    check_packed,
    quantize_int4,
    unpack_int4,
    unpack_reference,
)

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


_MOST_OF_TOKEN = 64


def _most_choices_int4(device: torch.device, experts: int, group_size: int) -> int:
    """Of a call. With more, products of sorted choices, which read each expert's weights once, are
    faster: by wgmma, and by mma.sync; both measured on an H200."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return 2 * experts
    return experts // 2 if group_size == 32 else experts


def fits_int4(x: Tensor, choices: Tensor, gate_up: Int4Weight, down: Int4Weight) -> bool:
    """Whether the kernels take these tensors (as :func:`few_experts_int4` does)."""
    hidden, inner = gate_up.k, down.k
    return (
        x.is_cuda
        and x.dtype in _HALVES
        and gate_up.dtype == down.dtype
        and gate_up.dtype in _HALVES
        and choices.numel() > 0
        and choices.shape[-1] <= _MOST_OF_TOKEN
        and hidden % TILE_N == 0
        and inner % TILE_N == 0
        and not torch.is_autocast_enabled("cuda")
        and _runs_on(x.device)
        and choices.numel() <= _most_choices_int4(x.device, down.n // hidden, down.group_size)
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


def few_experts_int4(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    gate_up: Int4Weight,
    down: Int4Weight,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    mxfp4: bool = False,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Tensor:
    """:func:`few_experts` with weights of 4 bits, read as they are.

    Args:
        gate_up: ``[experts 2 inner, hidden]``, the rows of each expert behind those of the one
            before; ``inner`` is a multiple of 16. Scales are bfloat16 or float16.
        down: ``[experts hidden, inner]``; ``hidden`` is a multiple of 16. Scales and zero points
            are as those of ``gate_up``.
        mxfp4: codes are MXFP4's numbers, in groups of 32 and without zero points.

    The others are those of :func:`few_experts`, with at most 64 choices of a token.
    """
    given = (*gate_up[:3], *down[:3], *biases, gate_up.group_size, mxfp4, interleaved)
    number = ACTIVATIONS[activation]
    result: Tensor = _INT4_CALL(x, choices, weights, *given, number, alpha, limit)
    return result


def unpack_mxfp4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """``[N, K]``, the numbers of a weight whose codes are MXFP4's, with scales in groups of 32."""
    check_packed("flexops.ops.unpack_mxfp4", weight)
    check_mxfp4("flexops.ops.unpack_mxfp4", weight)
    packed, scales, _, n, k, _ = weight
    result: Tensor = _UNPACK(packed, scales, n, k, dtype)
    return result


def check_mxfp4(where: str, weight: Int4Weight) -> None:
    if weight.group_size != 32 or weight.zeros is not None:
        raise ValueError(f"{where}: MXFP4 has groups of 32 columns and no zero points")


def _unpack_reference(packed: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return unpack_reference(Int4Weight(packed, scales, None, n, k, 32), dtype, True)


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


def _check_int4(x: Tensor, choices: Tensor, weights: Tensor, *rest: Any) -> None:
    op = "flexops.ops.few_experts_int4"
    packed, scales, zeros, down, down_scales, down_zeros, *biases, _, mxfp4 = rest[:10]
    named = {"gate_up": packed, "gate_up_scales": scales, "gate_up_zeros": zeros, "down": down}
    named |= {"down_scales": down_scales, "down_zeros": down_zeros}
    check_places(op, {"x": x, "choices": choices, "weights": weights, **named})
    if x.dim() != 2 or x.shape[1] % TILE_N or not x.shape[1]:
        raise ValueError(f"{op}: x must be [tokens, a multiple of 16], got {list(x.shape)}")
    if weights.dtype not in (torch.float32, x.dtype):
        raise TypeError(f"{op}: weights must be float32 or {x.dtype}, got {weights.dtype}")
    check_shape(op, "choices", choices, [x.shape[0], "k"])
    check_shape(op, "weights", weights, choices.shape, whose="choices")
    gate_up, last = _matrices(x, rest)
    for where, one in ((f"{op} (gate_up)", gate_up), (f"{op} (down)", last)):
        check_packed(where, one)
        if mxfp4:
            check_mxfp4(where, one)
    experts = last.n // x.shape[1]
    shapes = [experts, gate_up.n // experts], [experts, x.shape[1]]
    for name, bias, shape in zip(("gate_up_bias", "down_bias"), biases, shapes, strict=True):
        if bias is not None:
            check_shape(op, name, bias, shape)


def _matrices(x: Tensor, rest: Any) -> tuple[Int4Weight, Int4Weight]:
    """Gate and up, and down, of all experts, from an operator's arguments behind the weights."""
    packed, scales, zeros, down, down_scales, down_zeros = rest[:6]
    rows, of_down, group_size = TILE_N * packed.shape[0], TILE_N * down.shape[0], rest[8]
    experts = of_down // x.shape[1]
    if not experts or of_down % x.shape[1] or rows % (2 * TILE_N * experts):
        raise ValueError(
            "flexops.ops.few_experts_int4: gate_up and down must have the rows of all experts,"
            f" multiples of 16 of each, got {rows} and {of_down} for x of shape {list(x.shape)}"
        )
    inner = rows // (2 * experts)
    return (
        Int4Weight(packed, scales, zeros, rows, x.shape[1], group_size),
        Int4Weight(down, down_scales, down_zeros, of_down, inner, group_size),
    )


def _reference_int4(x: Tensor, choices: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    mxfp4, interleaved, activation, alpha, limit = rest[9:]
    unpack = unpack_mxfp4 if mxfp4 else unpack_int4
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    first, last = (unpack(one, torch.float32).to(wide) for one in _matrices(x, rest))
    experts = len(last) // x.shape[1]
    both = (one.view(experts, -1, one.shape[1]) for one in (first, last))
    given = (*both, *rest[6:8], False, interleaved, activation, alpha, limit)
    return _reference(x, choices, weights, *given)


define("few_experts", _reference, check=_check)
define("few_experts_int4", _reference_int4, check=_check_int4)
define(
    "mxfp4_unpack",
    _unpack_reference,
    lambda packed, _, n, k, dtype: packed.new_empty([n, k], dtype=dtype),
)
_CALL = caller(torch.ops.flexops.few_experts.default)
_UNPACK = caller(torch.ops.flexops.mxfp4_unpack.default)
_INT4_CALL = caller(torch.ops.flexops.few_experts_int4.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """Two tokens of two experts; by columns, clamped and with biases; of 4 bits, and of MXFP4."""
    half: Any = functools.partial(make, dtype=torch.bfloat16)
    x, weights = half(2, 64), half(2, 2)
    gate_up, down = half(3, 48, 64) / 8, half(3, 64, 24) / 4
    choices = torch.tensor([[0, 2], [1, 3]], device=x.device)  # the last one is no expert
    first = few_experts(x, choices, weights, gate_up, down)
    gate_up, down = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (gate_up, down))
    biases = half(3, 48), half(3, 64)
    clamped: Any = {"activation": "clamped", "interleaved": True, "alpha": 1.7, "limit": 2.0}
    second = few_experts(x, choices, weights, gate_up, down, biases, **clamped)
    x, gate_up, down = half(2, 64), half(3 * 128, 64) / 8, half(3 * 64, 64) / 8
    of_four = [
        few_experts_int4(x, choices, weights, quantize_int4(gate_up, size, symmetric),
                         quantize_int4(down, size, symmetric), mxfp4=mxfp4)
        for size, symmetric, mxfp4 in ((64, False, False), (32, True, True))
    ]  # fmt: skip
    return first, second, *of_four, unpack_mxfp4(quantize_int4(gate_up, 32, True), x.dtype)
