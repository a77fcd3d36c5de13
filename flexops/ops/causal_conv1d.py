"""The causal depthwise convolution of linear-attention and state-space models (Mamba: Gu and Dao,
arXiv 2312.00752).

Each channel ``d`` of ``x`` has a filter of ``W`` taps::

    out[b, d, t] = activation(bias[d] + sum(weight[d, k] * x[b, d, t - W + 1 + k] for each k < W))

where ``x`` is 0 before its first step, or what ``initial_states`` says. Where several sequences are
packed into one, it is 0 before the first step of each. Everything is computed in float32, whatever
the dtype of ``x``.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import (
    ANY_FLOAT,
    check_device,
    check_sequences,
    check_shape,
    check_tensor,
    wide,
)
from ._declared import define
from ._multi_tensor import increment_versions
from ._register import caller
from ._self_check import Make, checking

MOST_TAPS = 4


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    seq_idx: Tensor | None = None,
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The causal depthwise convolution, with the activation, in one pass. Formula: see the module.

    Args:
        x: ``[B, D, L]``, float32, float16 or bfloat16. It is read where it lies if the channels
            are neighbours in memory (``[B, L, D]`` transposed, as models have it), else copied.
        weight: ``[D, W]``, W from 1 to 4, of these dtypes.
        bias: ``[D]`` or None.
        activation: "silu" (or "swish"), or None.
        initial_states: ``[B, D, W - 1]``: the steps before ``x``; None for zeros.
        return_final_states: also return the last ``W - 1`` steps of ``initial_states`` and ``x``.
        seq_idx: integers ``[B, L]``: which sequence each step belongs to, where several are packed
            one behind the other. Nothing of another sequence is in a result. Not together with
            initial or final states.

    Returns:
        ``[B, D, L]`` of the dtype of ``x``, with neighbouring channels in memory; with
        ``return_final_states`` a tuple ``(out, final_states)``.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes or the activation are not as above.

    Differentiable once, with respect to ``x``, ``weight``, ``bias`` and ``initial_states``.
    """
    where = "flexops.causal_conv1d:"
    silu = _check(where, x, weight, bias, activation)
    width = weight.shape[1]
    if width > MOST_TAPS:
        raise ValueError(
            f"{where} weight must have 1 to {MOST_TAPS} taps, got shape {_shape(weight)}"
        )
    rows, before = x.transpose(1, 2), 0
    sequences = None
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise ValueError(
                f"{where} seq_idx says that several sequences are packed: there are no"
                " initial_states and final states of them; leave these out"
            )
        check_sequences(where[:-1], seq_idx, "x", x.transpose(1, 2))
        sequences = seq_idx.int().contiguous()
    if initial_states is not None:
        check_tensor(where[:-1], "initial_states", initial_states, ANY_FLOAT)
        check_device(where[:-1], "initial_states", initial_states, "x", x)
        check_shape(where[:-1], "initial_states", initial_states, [*x.shape[:2], width - 1])
        rows = torch.cat([initial_states.transpose(1, 2).to(x.dtype), rows], 1)
        before = width - 1
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    taps = weight.t().to(dtype, memory_format=torch.contiguous_format)  # one kernel
    taps = (taps if width == MOST_TAPS else F.pad(taps, (0, 0, MOST_TAPS - width, 0))).contiguous()
    offset = None if bias is None else wide(bias)
    out: Tensor = _CALL(rows, taps, offset, sequences, silu)[:, before:].transpose(1, 2)
    if not return_final_states:
        return out
    last = rows[:, max(rows.shape[1] - width + 1, 0) :]
    final = F.pad(last, (0, 0, width - 1 - last.shape[1], 0))  # a copy: it keeps no other steps
    return out, final.transpose(1, 2)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The convolution of the next steps, for decoding: **writes the state in place**.

    Args:
        x: ``[B, D, L]``, or ``[B, D]`` for one step; float32, float16 or bfloat16, any strides.
        conv_state: ``[B, D, S]`` of the dtype of ``x``, ``S`` at least ``W - 1``: the last steps
            before ``x``, the newest last. It becomes the last ``S`` of these and of ``x``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        activation: "silu" (or "swish"), or None.

    Returns:
        the shape and dtype of ``x``, contiguous. Not differentiable.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes or the activation are not as above.
    """
    where = "flexops.causal_conv1d_update:"
    steps = x.unsqueeze(-1) if isinstance(x, Tensor) and x.dim() == 2 else x
    silu = _check(where, steps, weight, bias, activation)
    check_tensor(where[:-1], "conv_state", conv_state, ANY_FLOAT)
    check_shape(where[:-1], "conv_state", conv_state, [*steps.shape[:2], "S"])
    if conv_state.shape[2] + 1 < weight.shape[1]:
        raise ValueError(
            f"{where} conv_state must hold at least {weight.shape[1] - 1} steps, got shape"
            f" {_shape(conv_state)}"
        )
    with torch.no_grad():
        if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
            weight, bias = wide(weight), None if bias is None else wide(bias)
        out: Tensor = _UPDATE(conv_state, steps, weight.contiguous(), bias, silu)
    increment_versions([conv_state])
    return out.squeeze(-1) if x.dim() == 2 else out


def _check(
    where: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> bool:
    """Whether the activation is silu."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None or name != "bias":
            check_tensor(where[:-1], name, tensor, ANY_FLOAT)
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{where} activation must be None or 'silu', got {activation!r}")
    check_shape(where[:-1], "x", x, "BDL")
    check_shape(where[:-1], "weight", weight, [x.shape[1], "W"], " with at least one tap")
    if weight.shape[1] == 0:
        raise ValueError(f"{where} weight must have at least one tap, got {_shape(weight)}")
    if bias is not None:
        check_shape(where[:-1], "bias", bias, x.shape[1:2])
    return activation is not None


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


# ---- the ops: x, [B, L, D]; weight, [4, D] ----


def _from(x: Tensor, before: int, sequences: Tensor | None) -> Tensor:
    """What lies so many steps before each step of ``[B, L, D]``, or behind it; 0 where nothing is,
    or another sequence."""
    moved = torch.roll(x, before, 1)
    places = torch.arange(x.shape[1], device=x.device) - before
    kept = (places >= 0) & (places < x.shape[1])
    if sequences is not None:
        kept = kept & (sequences == torch.roll(sequences, before, 1))
    return torch.where(kept[..., None], moved, 0)


def _filtered(x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor | None) -> Tensor:
    """``x`` is wide."""
    out = sum(_from(x, MOST_TAPS - 1 - k, sequences) * weight[k] for k in range(MOST_TAPS))
    assert isinstance(out, Tensor)
    return out if bias is None else out + bias


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor | None, silu: bool
) -> Tensor:
    out = _filtered(wide(x), weight, bias, sequences)
    return (F.silu(out) if silu else out).to(x.dtype).contiguous()


def _backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequences: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x``, and of weight and bias."""
    values, inner = wide(x), wide(grad)
    if silu:
        y = _filtered(values, weight, bias, sequences)
        sigmoid = torch.sigmoid(y)
        inner = inner * (sigmoid * (1 + y * (1 - sigmoid)))
    of_x, sums = torch.zeros_like(inner), []
    for k in range(MOST_TAPS):
        before = MOST_TAPS - 1 - k
        of_x = of_x + _from(inner, -before, sequences) * weight[k]
        sums.append((_from(values, before, sequences) * inner).sum((0, 1)))
    return of_x.to(x.dtype).contiguous(), torch.stack([*sums, inner.sum((0, 1))])


def _update_reference(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    both = torch.cat([state, x], 2)
    width, length = weight.shape[1], x.shape[2]
    recent = wide(both[:, :, both.shape[2] - length - width + 1 :])
    out = (recent.unfold(2, width, 1) * wide(weight).unsqueeze(1)).sum(3)
    out = out if bias is None else out + wide(bias).unsqueeze(1)
    state.copy_(both[:, :, both.shape[2] - state.shape[2] :])
    return (F.silu(out) if silu else out).to(x.dtype).contiguous()


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, sequences = ctx.saved_tensors  # type: ignore[attr-defined]
    of_x, sums = torch.ops.flexops.causal_conv1d_backward.default(
        grad,
        x,
        weight,
        bias,
        sequences,
        ctx.silu,  # type: ignore[attr-defined]
    )
    return of_x, sums[:MOST_TAPS], None if bias is None else sums[MOST_TAPS]


define("causal_conv1d", _reference, saves=("x", "weight", "bias", "sequences"), backward=_backward)
define("causal_conv1d_backward", _backward_reference)
define("causal_conv1d_update_", _update_reference, function="causal_conv1d_update")
_CALL = caller(torch.ops.flexops.causal_conv1d.default)
_UPDATE = caller(torch.ops.flexops.causal_conv1d_update_.default)


@checking()
def self_check(make: Make) -> Any:
    """The convolution, its gradient, and a step, which writes the state."""
    x, grad, state = make(2, 150, 24), make(2, 150, 24), make(2, 24, 4)
    weight, bias = make(4, 24), make(24)
    ops = torch.ops.flexops
    step = x[:, :3].transpose(1, 2), weight.t().contiguous(), bias, True
    packed = torch.arange(300, dtype=torch.int32, device=x.device).view(2, 150) // 7
    return (
        *(ops.causal_conv1d(x, weight, bias, of, True) for of in (None, packed)),
        *(ops.causal_conv1d_backward(grad, x, weight, bias, of, True) for of in (None, packed)),
        ops.causal_conv1d_update_(state, *step),
        state,
    )
