"""Recurrences whose state is a matrix (:mod:`.state_scan`), by chunks of steps: in plain PyTorch,
and on tensor cores.

Within a chunk, the changes ``u`` of the delta rule solve a triangular system (Yang, Kautz and
Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3). The formulas:
csrc/state_chunks/state_chunks.cuh.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

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
_LEAST_CAPABILITY = (8, 0)
_LARGE_BLOCKS = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0))
"""Capabilities of GPUs whose blocks have the shared memory for gradients of more than 128 rows."""
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
        and _has_kernels(v.device, False)
    )


def has_gradients(rows: int, v: Tensor, delta: bool) -> bool:
    """Whether tensor cores compute the gradients of values of ``[batch, length, heads, columns]``,
    with states of so many rows."""
    if not v.is_cuda or v.dtype != torch.bfloat16 or not v.numel():
        return False
    if rows % 8 or v.shape[3] % 8 or rows > (_MOST_DELTA_ROWS if delta else _MOST_ROWS):
        return False
    return _has_kernels(v.device, rows > _MOST_DELTA_ROWS)


def _has_kernels(device: torch.device, with_large_blocks: bool) -> bool:
    capability = _capability(device)
    return capability in _LARGE_BLOCKS if with_large_blocks else capability >= _LEAST_CAPABILITY


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU that has kernels; of others (0, 0)."""
    capability = torch.cuda.get_device_capability(device)
    enough = capability >= _LEAST_CAPABILITY and has_native("state_chunks", "cuda")
    return capability if enough else (0, 0)


# torch.compile asks and goes on with the answer, which has to be a plain one;
# torch.compiler.assume_constant_result does nothing else, but imports the compiler
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


class _Chunk(NamedTuple):
    """Of some steps, wide, ``[batch, heads, steps, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    between: Tensor
    """What the decays leave from each step to each later one."""
    before: Tensor
    """What they leave from before the chunk to each step."""
    left: Tensor
    """What they leave from each step to the chunk's end."""

    @property
    def scores(self) -> Tensor:
        return self.q @ self.k.mT * self.between * self.rate.mT

    @property
    def system(self) -> Tensor:
        """Strictly lower triangular."""
        return (self.k @ self.k.mT * self.between * self.rate.mT).tril(-1)

    def values(self, state: Tensor, delta: bool) -> Tensor:
        """``z``: what is added to the state along k, but for the rate."""
        if not delta:
            return self.v
        wanted = self.v - self.before * (self.k @ state)
        z: Tensor = torch.linalg.solve_triangular(
            self.system, wanted, upper=False, unitriangular=True
        )
        return z

    def after(self, state: Tensor, values: Tensor) -> Tensor:
        return self.kept * state + (self.left * self.rate * self.k).mT @ values

    @property
    def kept(self) -> Tensor:
        return self.before[:, :, -1:]


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logarithms: Tensor,
    rates: Tensor,
    normalize: bool,
    scale: float,
) -> Iterator[_Chunk]:
    """Of tensors as operators have them."""
    logarithms = logarithms.clamp(min=_LEAST_LOGARITHM).transpose(1, 2).unsqueeze(-1)
    heads, rates = v.shape[2], rates.transpose(1, 2).unsqueeze(-1)
    q, k, v = (wide(one).transpose(1, 2) for one in (q, k, v))
    if normalize:
        q, k = (one * _norm(one) for one in (q, k))
    q, k = (one.repeat_interleave(heads // one.shape[1], 1) for one in (q * scale, k))
    for at in range(0, v.shape[2], _CHUNK):
        part = slice(at, at + _CHUNK)
        sums = logarithms[:, :, part].cumsum(2)
        between = (sums - sums.mT).tril().exp().tril()
        left = (sums[:, :, -1:] - sums).exp()
        of_q, of_k, of_v, of_rate = (one[:, :, part] for one in (q, k, v, rates))
        yield _Chunk(of_q, of_k, of_v, of_rate, between, sums.exp(), left)


def _norm(rows: Tensor) -> Tensor:
    return (rows.square().sum(-1, True) + _EPSILON).rsqrt()


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
    """The results and the last state."""
    gate = _gates(decay, rate, a, bias, gates, low, high)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    now = state.to(wide(v).dtype)
    results = []
    for chunk in _chunks(q, k, v, *gate, normalize, scale):
        values = chunk.values(now, delta)
        results.append(chunk.before * (chunk.q @ now) + chunk.scores @ values)
        now = chunk.after(now, values)
    out = torch.cat(results, 2).transpose(1, 2) if results else wide(v)
    if skip is not None:
        out = out + wide(skip)[:, None] * wide(v)
    return out.to(v.dtype).contiguous(), now


def reference(state: Tensor, *arguments: Any) -> Tensor:
    out, final = scanned(state, *arguments)
    state.copy_(final)
    return out


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    delta: bool,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    said = (GIVEN, delta, normalize, scale, 0.0, 1.0)
    out, last = scanned(state, q, k, v, decay, rate, None, None, skip, *said)
    return out, last.contiguous()


def _backward_reference(
    grad: Tensor,
    last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    delta: bool,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Those of q and k, of each head; of v, decays and rates; of skip, for each step; of the
    state. Formulas: csrc/state_chunks/chunk_gradients.cuh."""
    chunks = [*_chunks(q, k, v, wide(decay), wide(rate), normalize, scale)]
    now = torch.zeros_like(last) if state is None else state
    kept = []
    for chunk in chunks:
        kept.append((now, chunk.values(now, delta)))
        now = chunk.after(now, kept[-1][1])
    of_state, parts = last, []
    for number, (chunk, (now, values)) in reversed([*enumerate(zip(chunks, kept, strict=True))]):
        part = wide(grad[:, number * _CHUNK :][:, :_CHUNK]).transpose(1, 2)
        of_v = chunk.scores.mT @ part + chunk.left * chunk.rate * (chunk.k @ of_state)
        if delta:
            system = chunk.system.mT
            of_v = torch.linalg.solve_triangular(system, of_v, upper=True, unitriangular=True)
        x = part @ values.mT * chunk.between
        of_q = chunk.before * (part @ now.mT) + (x * chunk.rate.mT) @ chunk.k
        changed = chunk.left * (values @ of_state.mT)
        change = changed + x.mT @ chunk.q
        of_k = torch.zeros_like(of_q)
        if delta:
            y = -(of_v @ values.mT * chunk.between).tril(-1)
            of_k = (y * chunk.rate.mT) @ chunk.k - chunk.before * (of_v @ now.mT)
            change = change + y.mT @ chunk.k
        of_rate = (chunk.k * change).sum(-1, True)
        of_sums = (chunk.q * of_q + chunk.k * of_k).sum(-1, True) - chunk.rate * of_rate
        of_end = (chunk.kept * now * of_state).sum((2, 3), True)
        of_end = of_end + (chunk.rate * chunk.k * changed).sum((2, 3), True)
        of_decay = of_sums.flip(2).cumsum(2).flip(2) + of_end
        of_k = of_k + chunk.rate * change
        of_state = chunk.kept * of_state + (chunk.before * chunk.q).mT @ part
        if delta:
            of_state = of_state - (chunk.before * chunk.k).mT @ of_v
        parts.append((of_q, of_k, of_v, of_decay, of_rate))
    found = [torch.cat(one[::-1], 2).transpose(1, 2) for one in zip(*parts, strict=True)]
    for number, one in enumerate((q, k)):
        rows = wide(one).repeat_interleave(v.shape[2] // one.shape[2], 2)
        norm = _norm(rows) if normalize else torch.ones_like(rows[..., :1])
        along = (rows * found[number]).sum(-1, True) if normalize else 0.0
        factor = (scale, 1.0)[number]
        found[number] = factor * norm * (found[number] - norm.square() * along * rows)
    of_q, of_k, of_v, of_decay, of_rate = found
    none = v.new_empty(0, dtype=torch.float32)
    if skip is not None:
        of_v = of_v + wide(skip)[:, None] * wide(grad)
    return (
        *(one.to(v.dtype).contiguous() for one in (of_q, of_k, of_v)),
        *(one.squeeze(-1).contiguous() for one in (of_decay, of_rate)),
        none if skip is None else (wide(grad) * wide(v)).sum(-1),
        none if state is None else of_state,
    )


def _backward(ctx: Any, grad: Tensor | None, last: Tensor | None) -> tuple[Tensor | None, ...]:
    q, _, v, _, _, skip, state = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(v, memory_format=torch.contiguous_format)
    if last is None:
        shape = (*v.shape[:1], v.shape[2], q.shape[3], v.shape[3])
        last = torch.zeros(shape, device=v.device)
    of_q, of_k, *others, of_skip, of_state = torch.ops.flexops.state_chunks_backward.default(
        grad, last, *ctx.saved_tensors, ctx.delta, ctx.normalize, ctx.scale
    )
    groups = q.shape[2]
    if groups < v.shape[2]:
        of_q, of_k = (one.unflatten(2, (groups, -1)).sum(3) for one in (of_q, of_k))
    return (
        of_q,
        of_k,
        *others,
        None if skip is None else of_skip.sum((0, 1)),
        None if state is None else of_state,
    )


def differentiable(
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
    """:func:`scanned`, by kernels; :func:`has_gradients` says when."""
    logarithms, rates = _gates(decay, rate, a, bias, gates, low, high)
    skip = None if skip is None else wide(skip)
    state = None if state is None else wide(state).contiguous()
    found: tuple[Tensor, Tensor] = _WHOLE(
        q, k, v, logarithms, rates, skip, state, delta, normalize, scale
    )
    return found


define("state_chunks_", reference, function="gated_delta_rule")
define(
    "state_chunks",
    _whole,
    saves=("q", "k", "v", "decay", "rate", "skip", "state"),
    backward=_backward,
    function="gated_delta_rule",
)
define("state_chunks_backward", _backward_reference, function="gated_delta_rule")
_WHOLE = caller(torch.ops.flexops.state_chunks.default)
CHUNKS = caller(torch.ops.flexops.state_chunks_.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """Two chunks and a part of one, with the delta rule and without; and gradients."""
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
        if gates != DELTA:
            given = -make.uniform(1, 150, 4), rate, None if delta else make(4), state
            grads = make(1, 150, 4, 40, dtype=torch.bfloat16), make(1, 4, rows, 40)
            found = torch.ops.flexops.state_chunks_backward(
                grads[0], grads[1].float(), q, k, v, *given, delta, True, 0.2
            )
            results += [one.to(out.dtype) for one in found if one.numel()]
    return results
