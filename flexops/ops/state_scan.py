"""Recurrences whose state is a matrix: linear attention with the gated delta rule (Yang, Kautz and
Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464), and the state-space duality of Mamba-2 (Dao
and Gu, arXiv 2405.21060).

Each head has a state ``S`` of ``K`` rows and ``V`` columns. A step of ``q``, ``k`` and ``v``, with
a decay ``d`` and a rate ``r``::

    S = d * S
    S = S + outer(k, r * (v - S^T k))    # the delta rule; without it: outer(k, r * v)
    out = S^T q

States and sums are float32, whatever the dtype of ``v``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._torch import forward_mode, is_transforming
from ._arguments import (
    ANY_FLOAT,
    check_device,
    check_sequences,
    check_shape,
    check_tensor,
    number,
    wide,
)
from ._declared import define
from ._multi_tensor import increment_versions
from ._register import caller, is_tracing, no_forward_mode
from ._self_check import Make, checking
from .state_chunks import (
    CHUNKS,
    DELTA,
    GIVEN,
    SOFTPLUS,
    differentiable,
    has_gradients,
    is_chunked,
    reference,
    scanned,
)

_MOST_ROWS, _VECTOR = 256, 8
_STATES = (torch.float32, torch.float64)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention by the gated delta rule, over whole sequences. Formula: see the module; the
    decay of a step is ``exp(g)``, its rate ``beta``. Arguments are those of flash-linear-attention.

    Args:
        q, k: ``[batch, length, key_heads, K]``, float32, float16 or bfloat16.
        v: ``[batch, length, heads, V]`` of their dtype; ``heads`` is a multiple of ``key_heads``,
            whose neighbours share ``q`` and ``k``.
        g: ``[batch, length, heads]``, logarithms of decays, at most 0.
        beta: ``[batch, length, heads]``.
        scale: of ``q``; None: ``K ** -0.5``.
        initial_state: ``[batch, heads, K, V]``; None for zeros. It is not changed.
        output_final_state: also return the last state.
        use_qk_l2norm_in_kernel: first divide each row of ``q`` and of ``k`` by
            ``sqrt(sum of squares + 1e-6)``.
        cu_seqlens: integers ``[sequences + 1]``, ascending from 0 to ``length``: where sequences
            begin that are packed one behind the other, in a batch of 1. Each begins with a state of
            zeros; there are no initial and final states.

    Returns:
        ``(out, final_state)``: ``[batch, length, heads, V]`` of v's dtype; float32
        ``[batch, heads, K, V]``, or None.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes are not as above.

    Differentiable. Kernels compute gradients in bfloat16, on GPUs of 8.0 and newer, where ``K``
    (at most 128) and ``V`` are multiples of 8: once, twice raises. Plain PyTorch computes the
    others, and everything on a GPU where ``K`` or ``V`` is no multiple of 8, and everywhere where
    ``K`` is more than 256.
    """
    where = "flexops.gated_delta_rule"
    shape, factor = _check(where, q, k, v, g, beta, scale)
    if initial_state is not None:
        check_tensor(where, "initial_state", initial_state, ANY_FLOAT)
        check_device(where, "initial_state", initial_state, "v", v)
        check_shape(where, "initial_state", initial_state, shape)
    if cu_seqlens is not None:
        begins = _beginnings(where, cu_seqlens, v, initial_state, output_final_state)
        g = g.masked_fill(begins.unsqueeze(-1), -math.inf)
    arguments = (q, k, v, g, beta, None, None, None)
    said = (GIVEN, True, bool(use_qk_l2norm_in_kernel), factor, 0.0, math.inf)
    if _differentiates(where, *arguments, initial_state):
        out, final = _differentiable(initial_state, *arguments, *said)
        return out, final if output_final_state else None
    state = _state(initial_state, shape, v)
    out = _run(state, *arguments, *said)
    return out, state if output_final_state else None


def gated_delta_rule_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """The next steps of :func:`gated_delta_rule`, for decoding: **writes the state in place**.

    Args:
        state: float32 ``[batch, heads, K, V]``.
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel: as there.

    Returns:
        ``[batch, length, heads, V]`` of v's dtype. Not differentiable.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes are not as above.
    """
    where = "flexops.gated_delta_rule_update"
    check_tensor(where, "state", state, _STATES)
    shape, factor = _check(where, q, k, v, g, beta, scale)
    check_device(where, "state", state, "v", v)
    check_shape(where, "state", state, shape)
    said = (GIVEN, True, bool(use_qk_l2norm_in_kernel), factor, 0.0, math.inf)
    with torch.no_grad():
        out = _run(state, q, k, v, g, beta, None, None, None, *said)
    increment_versions([state])
    return out


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's recurrence over whole sequences. Arguments are those of mamba_ssm.

    Formula: see the module, without the delta rule; ``v`` is ``x``, ``k`` is ``B``, ``q`` is ``C``.
    The rate is ``r = clamp(softplus(dt + dt_bias), *dt_limit)``, the decay ``exp(A * r)``, and
    ``D * x`` is added to the result.

    Args:
        x: ``[batch, length, heads, P]``, float32, float16 or bfloat16.
        dt: ``[batch, length, heads]``.
        A: ``[heads]``, below 0.
        B, C: ``[batch, length, groups, N]`` of x's dtype; ``heads`` is a multiple of ``groups``,
            and neighbours share.
        D, dt_bias: ``[heads]`` or None.
        dt_softplus: whether ``softplus`` is computed; else the rate is the sum, clamped.
        dt_limit: the least and the greatest rate.
        initial_states: ``[batch, heads, P, N]``; None for zeros. They are not changed.
        return_final_states: also return the last states.
        seq_idx: integers ``[batch, length]``: which sequence each step belongs to, where several
            are packed one behind the other. Each but the first begins with a state of zeros.

    Returns:
        ``[batch, length, heads, P]`` of x's dtype; with ``return_final_states`` a tuple
        ``(out, final_states)``, of which the states are float32 ``[batch, heads, P, N]``.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes are not as above.

    Differentiable. Kernels compute gradients in bfloat16, on GPUs of 8.0 and newer, where ``N``
    (at most 256; 128 on GPUs of 8.6, 8.9 and 12) and ``P`` are multiples of 8: once, twice raises.
    Plain PyTorch computes the others, and everything on a GPU where ``N`` or ``P`` is no multiple
    of 8, and everywhere where ``N`` is more than 256.
    """
    where = "flexops.mamba2_scan"
    shape = _check_mamba2(where, x, dt, A, B, C, D, dt_bias, dt_limit)
    if initial_states is not None:
        check_tensor(where, "initial_states", initial_states, ANY_FLOAT)
        check_device(where, "initial_states", initial_states, "x", x)
        check_shape(where, "initial_states", initial_states, shape)
    if seq_idx is not None:
        check_sequences(where, seq_idx, "x", x)
    arguments = _of_mamba2(x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit, seq_idx)
    if _differentiates(where, *arguments, initial_states):
        before = None if initial_states is None else initial_states.mT
        out, final = _differentiable(before, *arguments)
        return (out, final.mT) if return_final_states else out
    state = _state(initial_states, shape, x)
    out = _run(state.mT, *arguments)
    return (out, state) if return_final_states else out


def mamba2_scan_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """The next steps of :func:`mamba2_scan`, for decoding: **writes the state in place**.

    Args:
        state: float32 ``[batch, heads, P, N]``.
        x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit: as there.

    Returns:
        ``[batch, length, heads, P]`` of x's dtype. Not differentiable.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes are not as above.
    """
    where = "flexops.mamba2_scan_update"
    check_tensor(where, "state", state, _STATES)
    shape = _check_mamba2(where, x, dt, A, B, C, D, dt_bias, dt_limit)
    check_device(where, "state", state, "x", x)
    check_shape(where, "state", state, shape)
    with torch.no_grad():
        out = _run(state.mT, *_of_mamba2(x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit))
    increment_versions([state])
    return out


def _check_mamba2(
    where: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    limit: tuple[float, float],
) -> list[int]:
    """The shape of the states."""
    named = {"x": x, "dt": dt, "A": a, "B": b, "C": c}
    named |= {name: one for name, one in (("D", d), ("dt_bias", bias)) if one is not None}
    for name, tensor in named.items():
        check_tensor(where, name, tensor, ANY_FLOAT)
        check_device(where, name, tensor, "x", x)
    batch, heads = _check_heads(where, ("x", x, "P"), ("B", b), ("C", c), ("groups", "N"))
    check_shape(where, "dt", dt, [*x.shape[:2], heads])
    for name in named.keys() & {"A", "D", "dt_bias"}:
        check_shape(where, name, named[name], [heads])
    if not limit[0] <= limit[1]:
        raise ValueError(f"{where}: dt_limit must be two numbers, the lesser first, got {limit}")
    return [batch, heads, x.shape[3], b.shape[3]]


def _of_mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
    seq_idx: Tensor | None = None,
) -> tuple[Any, ...]:
    """The operator's arguments behind the state."""
    low, high = map(float, limit)
    if softplus and seq_idx is None:
        return (c, b, x, None, dt, a, bias, d, SOFTPLUS, False, False, 1.0, low, high)
    rate = wide(dt) if bias is None else wide(dt) + bias
    rate = (torch.nn.functional.softplus(rate) if softplus else rate).clamp(low, high)
    decay = a * rate if seq_idx is None else forget(a * rate, seq_idx)
    return (c, b, x, decay, rate, None, None, d, GIVEN, False, False, 1.0, low, high)


def forget(logarithms: Tensor, seq_idx: Tensor) -> Tensor:
    """Of decays ``[batch, length, heads]``, such that nothing is left of a state where the next
    sequence begins."""
    begins = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    return logarithms.masked_fill(begins.unsqueeze(-1), -math.inf)


def _beginnings(
    where: str, cu_seqlens: Tensor, v: Tensor, initial_state: Tensor | None, final: bool
) -> Tensor:
    """``[1, length]``: whether a sequence begins."""
    check_tensor(where, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64), dims=1)
    check_device(where, "cu_seqlens", cu_seqlens, "v", v)
    if v.shape[0] != 1:
        raise ValueError(f"{where}: cu_seqlens needs a batch of 1, got {v.shape[0]}")
    if initial_state is not None or final:
        raise ValueError(
            f"{where}: cu_seqlens says that several sequences are packed: there are no initial"
            " and final states of them; leave these out"
        )
    begins = torch.zeros(1, v.shape[1] + 1, dtype=torch.bool, device=v.device)
    return begins.index_fill(1, cu_seqlens.long(), True)[:, :-1]


def _state(initial: Tensor | None, shape: list[int], like: Tensor) -> Tensor:
    """A state of its own to begin with."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    if initial is None:
        return torch.zeros(shape, dtype=kind, device=like.device)
    return initial.to(kind, copy=True, memory_format=torch.contiguous_format)


def _check_heads(
    where: str,
    values: tuple[str, Tensor, str],
    first: tuple[str, Tensor],
    second: tuple[str, Tensor],
    words: tuple[str, str],
) -> tuple[int, int]:
    """Batch and heads."""
    name, v, columns = values
    for other, tensor in (first, second):
        if tensor.dtype != v.dtype:
            raise TypeError(
                f"{where}: {other} must have {name}'s dtype {v.dtype}, got {tensor.dtype}"
            )
    check_shape(where, name, v, ["batch", "length", "heads", columns])
    batch, length, heads, _ = v.shape
    check_shape(where, first[0], first[1], [batch, length, *words])
    check_shape(where, second[0], second[1], list(first[1].shape))
    groups = first[1].shape[2]
    if not groups or heads % groups:
        raise ValueError(f"{where}: {name} must have a multiple of {groups} heads, got {heads}")
    return batch, heads


def delta_steps(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """:func:`gated_delta_rule_update` of normalized ``q`` and ``k``, with the gates as layers have
    them: ``g = -exp(a_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``. It checks
    nothing."""
    return _run(
        state, q, k, v, a, b, a_log, dt_bias, None, DELTA, True, True, q.shape[-1] ** -0.5,
        0.0, 1.0,
    )  # fmt: skip


def _check(
    where: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None
) -> tuple[list[int], float]:
    """The shape of the states, and the scale."""
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name, tensor in named.items():
        check_tensor(where, name, tensor, ANY_FLOAT)
        check_device(where, name, tensor, "q", q)
    batch, heads = _check_heads(where, ("v", v, "V"), ("q", q), ("k", k), ("key_heads", "K"))
    for name in ("g", "beta"):
        check_shape(where, name, named[name], [*v.shape[:2], heads])
    shape = [batch, heads, q.shape[3], v.shape[3]]
    if scale is None:
        return shape, max(q.shape[3], 1) ** -0.5
    return shape, number(f"{where}: scale", scale)


def _differentiates(where: str, *arguments: Any) -> bool:
    """Whether a call is differentiated, or transformed by ``torch.func``."""
    if not is_tracing() and forward_mode._current_level >= 0:
        no_forward_mode(where)
    if is_transforming():
        return True
    tensors = (one for one in arguments if isinstance(one, Tensor))
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def _differentiable(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
    """The results and the last state."""
    delta = arguments[6]  # behind decay, rate, a, bias, skip and gates
    chunked = not is_transforming() and has_gradients(k.shape[-1], v, delta)
    return (differentiable if chunked else scanned)(state, q, k, v, *arguments)


def has_kernels(rows: int, columns: int, is_cuda: bool) -> bool:
    """Whether kernels compute with states of so many rows and columns."""
    return rows <= _MOST_ROWS and not (is_cuda and (rows % _VECTOR or columns % _VECTOR))


def _run(state: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    if not has_kernels(k.shape[-1], v.shape[-1], v.is_cuda):
        return reference(state, q, k, v, *arguments)
    lies_well = is_tracing() or not state.is_cuda or _lies_well(state)
    kept = state if lies_well else state.clone(memory_format=torch.contiguous_format)
    delta = arguments[6]  # behind decay, rate, a, bias, skip and gates
    call = CHUNKS if is_chunked(q.shape[3], v, delta) else _CALL
    out: Tensor = call(kept, q, k, v, *arguments)
    if kept is not state:
        state.copy_(kept)
    return out


def _lies_well(state: Tensor) -> bool:
    """Whether a GPU reads and writes it by vectors of 16 bytes."""
    whole = state.is_contiguous() or state.mT.is_contiguous()
    return whole and state.data_ptr() % 16 == 0


define("state_scan_", reference, function="gated_delta_rule")
_CALL = caller(torch.ops.flexops.state_scan_.default)


@checking()
def self_check(make: Make) -> Any:
    """Two steps of heads that share q and k, and a longer sequence without the delta rule."""
    results = []
    for length, delta, gates in (
        (2, True, GIVEN),
        (37, False, SOFTPLUS),
        (20, True, DELTA),
    ):
        state = make(2, 4, 16, 24, dtype=torch.float32)
        q, k = make(2, length, 2, 16), make(2, length, 2, 16)
        v, rate = make(2, length, 4, 24), make.uniform(2, length, 4)
        decay = None if gates == SOFTPLUS else -make.uniform(2, length, 4)
        a, bias = (None, None) if gates == GIVEN else (-make.uniform(4), make(4))
        said = (gates, delta, delta, 0.25, 0.0, 1.0)
        out = _CALL(state, q, k, v, decay, rate, a, bias, make(4), *said)
        results += [out, state]
    return results
