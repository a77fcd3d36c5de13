"""Products of a few rows and attentions, one after another in one kernel: the layers of a decode
step. Each is a product of :mod:`.few_rows` or an attention over a cache
(:mod:`.kvcache_attention`), and may read what earlier ones wrote; weights are read ahead across the
borders.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import int4_few_rows, kvcache_attention
from ._arguments import wide
from ._declared import define
from ._register import caller
from ._self_check import Make, checking
from .int4_linear import GROUP_SIZES, TILE_K, Int4Weight, quantize_int4
from .norm import normalize

MOST_PHASES, MOST_ROWS, MOST_COLUMNS, WORKSPACE = 28, 2, 16384, 1 << 18
MOST_PRODUCTS = 6
"""Phases without an attention among them: a kernel with fewer parameters starts sooner."""
_HEAD_DIMS, _HEADS = (32, 64, 128, 256), 2
"""Of an attention; how many of a key head's queries a block of threads has."""
MOST_CACHED = 16 << 20
"""Bytes of keys and values of an attention, to the end of the cache. On an H200, with 8 heads of
128, the gain was gone with more than 4096 tokens (docs/benchmarks)."""
_HALVES = (torch.bfloat16, torch.float16)


def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs there: its blocks wait for each other."""
    return device.type == "cuda" and (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def fits(x: Tensor, weights: Sequence[Any]) -> bool:
    """Whether it computes this product."""
    return (
        x.dtype in _HALVES
        and x.numel() <= MOST_ROWS * x.shape[-1]
        and x.shape[-1] <= MOST_COLUMNS
        and x.is_contiguous()
        and all(isinstance(one, Int4Weight) and one.scales.dtype in _HALVES for one in weights)
    )


class Phase(NamedTuple):
    """One of them: arguments as of :func:`.few_rows.few_rows_linear`.

    Attributes:
        out: what it writes.
        activation: a number, of :data:`.few_rows.ACTIVATIONS`.
    """

    out: Tensor
    x: Tensor
    weights: Sequence[Int4Weight]
    biases: Sequence[Tensor]
    norm: Tensor | None
    residual: Tensor | None
    activation: int


class Attention(NamedTuple):
    """An attention of one new token of a sequence, which it appends.

    Queries and key are normalized by heads (an RMS norm with ``eps`` and ``offset`` of the launch),
    then rotated, where that is given.

    Attributes:
        out: what it writes, ``[1, heads * head_dim]``.
        x: queries, then keys, then values of all heads, ``[1, (heads + 2 key heads) * head_dim]``.
        keys: the cache's, ``[1, capacity, key heads, head_dim]``, tokens of any stride.
        values: like ``keys``.
        rotary: cosines and sines, ``[positions, rotary_dim / 2]``, for halves of rows.
        seqlens, leftpad: int32 ``[1]``: where the token is appended, and the sequence begins.
        scale: of scores.
        window_left: how many tokens before it the new one sees; below 0: all.
        norms: weights of the norms of queries and of keys, ``[head_dim]``.
    """

    out: Tensor
    x: Tensor
    keys: Tensor
    values: Tensor
    rotary: tuple[Tensor, Tensor] | None
    seqlens: Tensor
    leftpad: Tensor | None
    scale: float
    window_left: int = -1
    norms: tuple[Tensor, Tensor] | None = None


def attends(phase: Attention) -> bool:
    """Whether the kernel computes this attention, and is the faster one: of two sequences, or of
    longer caches, :func:`.kvcache_attention.attention_with_kvcache` is."""
    keys, values, x = phase.keys, phase.values, phase.x
    sequences, tokens, heads_k, dim = keys.shape
    group = phase.out.shape[-1] // (heads_k * dim)
    blocks = heads_k * -(-group // _HEADS)
    return (
        sequences == 1
        and dim in _HEAD_DIMS
        and 2 * tokens * heads_k * dim * x.element_size() <= MOST_CACHED
        and all(_is_read(one, x.dtype) for one in (keys, values))
        and keys.stride() == values.stride()
        and all(_is_read(one, x.dtype) for one in phase.rotary or ())
        and all(one.dtype == x.dtype and one.is_contiguous() for one in phase.norms or ())
        and blocks <= _processors(x.device)
    )


def _is_read(part: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is of this dtype, and its rows are vectors of 16 bytes: a cache's heads, which
    follow each other, or the halves of a rotary embedding."""
    heads = part.dim() == 2 or part.stride(2) == part.shape[3]
    steps = (part.storage_offset(), part.shape[-1], *part.stride()[:2][: part.dim() - 1])
    return (
        part.dtype == dtype
        and heads
        and part.stride(-1) == 1
        and all(step % 8 == 0 for step in steps)
    )


@functools.lru_cache
def _processors(device: torch.device) -> int:
    """That a GPU has; the CPU's reference takes any number."""
    if device.type != "cuda":
        return sys.maxsize
    return torch.cuda.get_device_properties(device).multi_processor_count


def common(phase: Phase | Attention) -> tuple[Any, ...]:
    """What all phases of a launch have in common; None: it fits any."""
    rows = phase.x.numel() // phase.x.shape[-1], phase.x.dtype
    if isinstance(phase, Phase):
        return *rows, phase.weights[0].group_size == GROUP_SIZES[0], None
    tensors = *(phase.rotary or (None, None)), phase.seqlens, phase.leftpad
    where = tuple(one is not None and (one.data_ptr(), one.shape) for one in tensors)
    numbers = phase.scale, phase.window_left
    return *rows, None, (phase.out.shape[-1], phase.keys.shape, numbers, where)


def few_rows_chain_(
    phases: Sequence[Phase | Attention],
    workspace: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> None:
    """Compute up to :data:`MOST_PHASES` phases (without attentions :data:`MOST_PRODUCTS`), one
    after another.

    Args:
        phases: with the same of :func:`common`, all contiguous but caches; each writes its ``out``,
            which shares memory with nothing that it reads.
        workspace: int32 ``[WORKSPACE]`` on the same device, zeros before its first use. No two
            launches that may run at once have the same.
        eps, offset: of all norms; an offset is added to their weights.
    """
    call = _CALL if workspace.is_cuda else _reference
    call(*_arguments(phases, workspace, eps, offset))


def _arguments(
    phases: Sequence[Phase | Attention], workspace: Tensor, eps: float, offset: float
) -> tuple[Any, ...]:
    """The operator's."""
    kinds, lists, attention = [0] * 4, _Lists([], [], [], [], [], [], []), None
    for at, phase in enumerate(phases):
        if isinstance(phase, Attention):
            attention = phase
            lists.caches.extend([phase.keys, phase.values])
            lists.norms.extend(phase.norms or ())
            kinds[at // _KINDS] |= (phase.norms is not None) << 6 + _BITS * (at % _KINDS)
            continue
        zeros = phase.weights[0].zeros is not None
        for weight in phase.weights:
            lists.weights.append(weight.packed)
            lists.scales.append(weight.scales)
            lists.zeros.extend([weight.zeros] if zeros else [])
        lists.biases.extend(phase.biases)
        lists.norms.extend([] if phase.norm is None else [phase.norm])
        lists.residuals.extend([] if phase.residual is None else [phase.residual])
        there = zeros, bool(phase.biases), phase.norm is not None, phase.residual is not None
        kind = len(phase.weights) | phase.activation << 2
        kind |= sum(flag << 4 + i for i, flag in enumerate(there))
        kinds[at // _KINDS] |= kind << _BITS * (at % _KINDS)
    xs, outs = [phase.x for phase in phases], [phase.out for phase in phases]
    shared = _Shared(None, None, None, None, 0.0, -1)
    if attention is not None:
        cos, sin = attention.rotary or (None, None)
        lengths = attention.seqlens, attention.leftpad
        shared = _Shared(cos, sin, *lengths, attention.scale, attention.window_left)
    rest = workspace, eps, offset, *shared[4:], *kinds
    return xs[0], xs[1:], *lists, outs, *shared[:4], *rest


_BITS, _KINDS = 8, 7
"""Of ``kinds`` for each phase, the first one's lowest: two for the number of weights (0: an
attention), two for the activation, and one each for: zero points, biases, norm (of an attention:
both), residual. So many phases' in one number."""


class _Lists(NamedTuple):
    """Of all phases, in their order, what is there."""

    weights: Any
    scales: Any
    zeros: Any
    biases: Any
    norms: Any
    residuals: Any
    caches: Any


class _Given(NamedTuple):
    """What an operator's arguments say of one phase."""

    out: Tensor
    x: Tensor
    weights: list[Tensor]
    scales: list[Tensor]
    zeros: list[Tensor]
    biases: list[Tensor]
    norm: Tensor | None
    residual: Tensor | None
    activation: int

    @property
    def width(self) -> int:
        return self.out.shape[-1]

    @property
    def group_size(self) -> int:
        tiles = -(-self.x.shape[-1] // TILE_K)
        return tiles * TILE_K // max(self.scales[0].shape[1], 1)


class _Shared(NamedTuple):
    """What all attentions of a launch have in common."""

    cos: Tensor | None
    sin: Tensor | None
    seqlens: Tensor | None
    leftpad: Tensor | None
    scale: float
    window_left: int


def _given(
    x: Tensor, xs: list[Tensor], lists: _Lists, outs: list[Tensor], shared: _Shared, *kinds: int
) -> list[_Given | Attention]:
    most = MOST_PHASES if lists.caches else MOST_PRODUCTS
    if not 1 <= len(outs) <= most or len(xs) != len(outs) - 1:
        _fail(f"outs must be 1 to {most} tensors, one more than xs, got {len(outs)}")
    rest, found = _Lists(*map(list, lists)), list[_Given | Attention]()
    for at, (one, out) in enumerate(zip([x, *xs], outs, strict=True)):
        kind = kinds[at // _KINDS] >> _BITS * (at % _KINDS)
        count = kind & 3
        zeros, biases, norm, residual = (kind >> 4 + i & 1 for i in range(4))
        norms, caches = (norm, 0) if count else (2 * norm, 2)
        counts = _Lists(count, count, zeros * count, biases * count, norms, residual, caches)
        taken = []
        for part, many, name in zip(rest, counts, _Lists._fields, strict=True):
            if len(part) < many:
                _fail(f"{name} must hold as many tensors as kinds={kinds} says")
            taken.append(part[:many])
            del part[:many]
        own = _Lists(*taken)
        if count:
            single = [[*part, None][0] for part in (own.norms, own.residuals)]
            found.append(_Given(*(out, one, *own[:4], *single, kind >> 2 & 3)))
        else:
            found.append(_attention(one, out, own, shared))
    whole = sum(kind << _BITS * _KINDS * i for i, kind in enumerate(kinds))
    if any(rest) or whole >> _BITS * len(outs):
        _fail(f"there are more tensors, or fewer phases, than kinds={kinds} says")
    return found


def _attention(x: Tensor, out: Tensor, own: _Lists, shared: _Shared) -> Attention:
    keys, values = caches = own.caches
    if keys.dim() != 4 or keys.shape != values.shape or keys.shape[-1] not in _HEAD_DIMS:
        _fail(
            "caches must be two of [1, capacity, key heads, head_dim], with a head_dim of"
            f" {_HEAD_DIMS}, got {[list(one.shape) for one in caches]}"
        )
    of_keys, dim = keys.shape[2:]
    if out.dim() != 2 or out.shape[1] % (of_keys * dim):
        _fail(f"an attention's out must be of heads of {dim}, got {list(out.shape)}")
    if x.dim() != 2 or x.shape[1] != out.shape[1] + 2 * of_keys * dim:
        wanted = out.shape[1] + 2 * of_keys * dim
        _fail(f"an attention's x must have {wanted} columns, got {list(x.shape)}")
    if shared.seqlens is None:
        _fail("seqlens must be given with an attention")
    for norm in own.norms:
        if list(norm.shape) != [dim]:
            _fail(f"an attention's norm must have shape {[dim]}, got {list(norm.shape)}")
    rotary: Any = None if shared.cos is None else (shared.cos, shared.sin)
    seqlens: Any = shared.seqlens
    norms: Any = tuple(own.norms) or None
    numbers = shared.scale, shared.window_left
    return Attention(out, x, keys, values, rotary, seqlens, shared.leftpad, *numbers, norms)


def _attended(one: Attention, eps: float, offset: float) -> tuple[Any, ...]:
    """The arguments of attention over a cache."""
    _, _, of_keys, dim = one.keys.shape
    q, k, v = one.x.view(len(one.x), 1, -1, dim).split(
        [one.out.shape[1] // dim, of_keys, of_keys], dim=2
    )
    if one.norms is not None:
        q, k = (
            normalize(x, wide(norm) + offset, None, eps, centered=False)[0].to(x.dtype)
            for x, norm in zip((q, k), one.norms, strict=True)
        )
    tables = one.rotary or (None, None)
    lengths = one.seqlens, -1, None, one.leftpad, None
    rest = one.scale, one.window_left, -1, 0.0, False, None, 0, None, True, False
    return q, one.keys, one.values, k, v, *tables, *lengths, *rest


def _fail(text: str) -> None:
    raise ValueError(f"flexops.ops.few_rows_chain_: {text}")


def _alone(one: _Given, eps: float, offset: float) -> tuple[Any, ...]:
    """What computes it as one product."""
    rest = one.biases, one.norm, eps, offset, one.residual, one.activation, one.width
    return one.x, one.weights, one.scales, one.zeros, *rest, one.group_size, 0


def _check(
    x: Tensor, xs: list[Tensor], weights: list[Tensor], scales: list[Tensor], zeros: list[Tensor],
    biases: list[Tensor], norms: list[Tensor], residuals: list[Tensor], caches: list[Tensor],
    outs: list[Tensor], cos: Tensor | None, sin: Tensor | None, seqlens: Tensor | None,
    leftpad: Tensor | None, workspace: Tensor, eps: float, offset: float, scale: float,
    window_left: int, *kinds: int,
) -> None:  # fmt: skip
    lists = _Lists(weights, scales, zeros, biases, norms, residuals, caches)
    shared = _Shared(cos, sin, seqlens, leftpad, scale, window_left)
    for one in _given(x, xs, lists, outs, shared, *kinds):
        if isinstance(one, Attention):
            kvcache_attention.check(*_attended(one, eps, offset))
            continue
        int4_few_rows.check(*_alone(one, eps, offset))
        shapes = [[*one.x.shape[:-1], one.width], list(one.x.shape[-1:])]
        for name, tensor, shape in (
            ("out", one.out, shapes[0]),
            ("residual", one.residual, shapes[0]),
            ("norm", one.norm, shapes[1]),
        ):
            if tensor is not None and list(tensor.shape) != shape:
                _fail(f"a phase's {name} must have shape {shape}, got {list(tensor.shape)}")
    if workspace.numel() < WORKSPACE:
        _fail(f"workspace must have {WORKSPACE} elements, got {workspace.numel()}")


def _reference(
    x: Tensor, xs: list[Tensor], weights: list[Tensor], scales: list[Tensor], zeros: list[Tensor],
    biases: list[Tensor], norms: list[Tensor], residuals: list[Tensor], caches: list[Tensor],
    outs: list[Tensor], cos: Tensor | None, sin: Tensor | None, seqlens: Tensor | None,
    leftpad: Tensor | None, workspace: Tensor, eps: float, offset: float, scale: float,
    window_left: int, *kinds: int,
) -> None:  # fmt: skip
    del workspace
    lists = _Lists(weights, scales, zeros, biases, norms, residuals, caches)
    shared = _Shared(cos, sin, seqlens, leftpad, scale, window_left)
    for one in _given(x, xs, lists, outs, shared, *kinds):
        if isinstance(one, Attention):
            made = kvcache_attention.composed(*_attended(one, eps, offset))[0]
            one.out.copy_(made.view(one.out.shape))
        else:
            one.out.copy_(int4_few_rows.reference(*_alone(one, eps, offset)))


define("few_rows_chain_", _reference, check=_check)
_CALL = caller(torch.ops.flexops.few_rows_chain_.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """A residual, a norm with a gate, and a product of three weights; then attention of its first
    row, as query, key and value."""
    half: Any = functools.partial(make, dtype=torch.bfloat16)
    x, norm, *outs = half(2, 320), half(320), half(2, 320), half(2, 64), half(2, 96)
    one, gate, up, *three = (
        quantize_int4(half(n, k) * k**-0.5)
        for n, k in ((320, 320), (64, 320), (64, 320), (32, 64), (32, 64), (32, 64))
    )
    h, g, out = outs
    phases = [
        Phase(h, x, [one], [], None, x, 0),
        Phase(g, h, [gate, up], [], norm, None, 1),
        Phase(out, g, three, [], None, None, 0),
    ]
    workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=x.device)
    _CALL(*_arguments(phases, workspace, 1e-6, 0.0))
    end, keys, values = half(1, 32), half(1, 40, 1, 32), half(1, 40, 1, 32)
    length = torch.full((1,), 9, dtype=torch.int32, device=x.device)
    norms = half(32), half(32)
    attention = Attention(end, out[:1], keys, values, None, length, None, 1.0, -1, norms)
    _CALL(*_arguments([attention], workspace, 1e-6, 0.0))
    return *outs, end, keys, values
