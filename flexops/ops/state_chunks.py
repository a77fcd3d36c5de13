"""Recurrences whose state is a matrix (:mod:`.state_scan`), by chunks of steps: in plain PyTorch,
and on tensor cores.

Within a chunk, the changes ``u`` of the delta rule solve a triangular system (Yang, Kautz and
Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3). The formulas:
csrc/state_chunks/state_chunks.cuh.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._arguments import wide
from ._declared import define
from ._register import caller, has_native
from ._self_check import Make, checking

GIVEN, SOFTPLUS, DELTA = range(3)
"""How decays and rates are said: kGatesGiven ... of csrc/state_scan."""
_CHUNK = 64
_LEAST_LOGARITHM = -200.0
"""Of a decay: its exponential is 0 in float32, and differences of sums stay numbers."""
_EPSILON = 1e-6
_MOST_DELTA_ROWS, _MOST_ROWS = 128, 256
_LEAST_STEPS = 64
"""Of a sequence, from which on tensor cores take less time."""


def is_chunked(rows: int, v: Tensor, delta: bool) -> bool:
    """Whether tensor cores compute values of ``[batch, length, ...]`` with states of so many
    rows."""
    return (
        v.is_cuda
        and v.dtype == torch.bfloat16
        and v.shape[1] >= _LEAST_STEPS
        and rows <= (_MOST_DELTA_ROWS if delta else _MOST_ROWS)
        and _has_chunks(v.device)
    )


@functools.cache
def _has_chunks(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 8 and has_native("state_chunks", "cuda")


def _gates(
    decay: Tensor | None,
    rate: Tensor,
    a: Tensor | None,
    bias: Tensor | None,
    gates: int,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Logarithms of decays, and rates, wide: ``[batch, length, heads]``."""
    rate = wide(rate)
    if gates == GIVEN:
        assert decay is not None
        return wide(decay), rate
    assert a is not None
    offset = 0.0 if bias is None else wide(bias)
    if gates == SOFTPLUS:
        rate = torch.nn.functional.softplus(rate + offset).clamp(low, high)
        return wide(a) * rate, rate
    assert decay is not None
    decay = torch.nn.functional.softplus(wide(decay) + offset)
    return -wide(a).exp() * decay, high * rate.sigmoid()


def scanned(
    state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    rate: Tensor,
    a: Tensor | None,
    bias: Tensor | None,
    skip: Tensor | None,
    gates: int,
    delta: bool,
    normalize: bool,
    scale: float,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """The results and the last state. Steps are computed by chunks: within one, the changes ``u``
    of the delta rule solve a triangular system (section 3 of the paper)."""
    logarithms, rates = _gates(decay, rate, a, bias, gates, low, high)
    logarithms = logarithms.clamp(min=_LEAST_LOGARITHM)
    heads, dtype = v.shape[2], v.dtype
    q, k, v = (wide(one).transpose(1, 2) for one in (q, k, v))
    logarithms, rates = logarithms.transpose(1, 2), rates.transpose(1, 2)
    if normalize:
        q, k = (one * (one.square().sum(-1, True) + _EPSILON).rsqrt() for one in (q, k))
    q, k = (one.repeat_interleave(heads // one.shape[1], 1) for one in (q * scale, k))
    if state is None:
        state = v.new_zeros(*v.shape[:2], q.shape[3], v.shape[3])
    now = state.to(v.dtype)
    results = []
    for at in range(0, v.shape[2], _CHUNK):
        part = slice(at, at + _CHUNK)
        of_q, of_k, of_v, rates_now = (one[:, :, part] for one in (q, k, v, rates))
        sums = logarithms[:, :, part].cumsum(-1)
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
        before = sums.exp().unsqueeze(-1)
        if delta:
            system = (rates_now.unsqueeze(-1) * (of_k @ of_k.mT) * between).tril(-1)
            wanted = rates_now.unsqueeze(-1) * (of_v - before * (of_k @ now))
            change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        else:
            change = rates_now.unsqueeze(-1) * of_v
        results.append(before * (of_q @ now) + ((of_q @ of_k.mT) * between) @ change)
        left = (sums[:, :, -1:] - sums).exp().unsqueeze(-1)
        now = before[:, :, -1:] * now + (left * of_k).mT @ change
    out = torch.cat(results, 2) if results else v
    if skip is not None:
        out = out + wide(skip)[:, None, None] * v
    return out.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format), now


def reference(state: Tensor, *arguments: Any) -> Tensor:
    out, final = scanned(state, *arguments)
    state.copy_(final)
    return out


define("state_chunks_", reference, function="gated_delta_rule")
CHUNKS = caller(torch.ops.flexops.state_chunks_.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """Two chunks and a part of one, with the delta rule and without."""
    results = []
    for delta, gates, rows in ((True, GIVEN, 24), (True, DELTA, 72), (False, SOFTPLUS, 64)):
        state = make(1, 4, rows, 40, dtype=torch.float32)
        q, k = (make(1, 150, 2, rows, dtype=torch.bfloat16) for _ in range(2))
        v, rate = make(1, 150, 4, 40, dtype=torch.bfloat16), make.uniform(1, 150, 4)
        decay = None if gates == SOFTPLUS else -make.uniform(1, 150, 4)
        a, bias = (None, None) if gates == GIVEN else (-make.uniform(4), make(4))
        said = (gates, delta, True, rows**-0.5, 0.0, 1.0)
        out = CHUNKS(state, q, k, v, decay, rate, a, bias, make(4), *said)
        results += [out, state.to(out.dtype)]  # operands of products are rounded
    return results
