"""Products of a few rows one after another in one kernel: what lies between two attentions of a
decode step. Each is a product of :mod:`.few_rows`, and may read what earlier ones wrote; their
weights are read ahead across the borders.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import int4_few_rows
from ._declared import define
from ._register import caller
from ._self_check import Make, checking
from .int4_linear import GROUP_SIZES, TILE_K, Int4Weight, quantize_int4

MOST_PHASES, MOST_ROWS, MOST_COLUMNS, WORKSPACE = 6, 2, 16384, 64
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


def common(phase: Phase) -> tuple[Any, ...]:
    """What all phases of a launch have in common."""
    small = phase.weights[0].group_size == GROUP_SIZES[0]
    return phase.x.numel() // phase.x.shape[-1], phase.x.dtype, small


def few_rows_chain_(
    phases: Sequence[Phase], workspace: Tensor, *, eps: float = 1e-6, offset: float = 0.0
) -> None:
    """Compute up to :data:`MOST_PHASES` products, one after another.

    Args:
        phases: with the same of :func:`common`, all contiguous; each writes its ``out``, which
            shares memory with nothing that it reads.
        workspace: int32 ``[WORKSPACE]`` on the same device, zeros before its first use. No two
            launches that may run at once have the same.
        eps, offset: of all norms.
    """
    call = _CALL if workspace.is_cuda else _reference
    call(*_arguments(phases, workspace, eps, offset))


def _arguments(
    phases: Sequence[Phase], workspace: Tensor, eps: float, offset: float
) -> tuple[Any, ...]:
    """The operator's."""
    kinds, lists = 0, _Lists([], [], [], [], [], [])
    for at, phase in enumerate(phases):
        zeros = phase.weights[0].zeros is not None
        for weight in phase.weights:
            lists.weights.append(weight.packed)
            lists.scales.append(weight.scales)
            lists.zeros.extend([weight.zeros] if zeros else [])
        lists.biases.extend(phase.biases)
        lists.norms.extend([] if phase.norm is None else [phase.norm])
        lists.residuals.extend([] if phase.residual is None else [phase.residual])
        there = (
            True, zeros, bool(phase.biases), phase.norm is not None, phase.residual is not None,
        )  # fmt: skip
        kind = len(phase.weights) | phase.activation << 2
        kind |= sum(flag << 4 + i for i, flag in enumerate(there))
        kinds |= kind << _BITS * at
    xs, outs = [phase.x for phase in phases], [phase.out for phase in phases]
    return xs[0], xs[1:], *lists, outs, workspace, eps, offset, kinds


_BITS = 10
"""Of ``kinds`` for each phase, the first one's lowest: two for the number of weights, two for the
activation, and one each for: weights of 4 bits (all are), zero points, biases, norm, residual."""


class _Lists(NamedTuple):
    """Of all phases, in their order, what is there."""

    weights: Any
    scales: Any
    zeros: Any
    biases: Any
    norms: Any
    residuals: Any


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


def _given(
    x: Tensor, xs: list[Tensor], lists: _Lists, outs: list[Tensor], kinds: int
) -> list[_Given]:
    if not 1 <= len(outs) <= MOST_PHASES or len(xs) != len(outs) - 1:
        _fail(f"outs must be 1 to {MOST_PHASES} tensors, one more than xs, got {len(outs)}")
    rest, found = _Lists(*map(list, lists)), []
    for at, (one, out) in enumerate(zip([x, *xs], outs, strict=True)):
        kind = kinds >> _BITS * at
        count = kind & 3
        zeros, biases, norm, residual = (kind >> 5 + i & 1 for i in range(4))
        counts = _Lists(count, count, zeros * count, biases * count, norm, residual)
        taken = []
        for part, many, name in zip(rest, counts, _Lists._fields, strict=True):
            if len(part) < many:
                _fail(f"{name} must hold as many tensors as kinds={kinds} says")
            taken.append(part[:many])
            del part[:many]
        own = _Lists(*taken)
        single = [[*part, None][0] for part in (own.norms, own.residuals)]
        found.append(_Given(*(out, one, *own[:4], *single, kind >> 2 & 3)))
    if any(rest) or kinds >> _BITS * len(outs):
        _fail(f"there are more tensors, or fewer phases, than kinds={kinds} says")
    return found


def _fail(text: str) -> None:
    raise ValueError(f"flexops.ops.few_rows_chain_: {text}")


def _alone(one: _Given, eps: float, offset: float) -> tuple[Any, ...]:
    """What computes it as one product."""
    rest = one.biases, one.norm, eps, offset, one.residual, one.activation, one.width
    return one.x, one.weights, one.scales, one.zeros, *rest, one.group_size, 0


def _check(
    x: Tensor, xs: list[Tensor], weights: list[Tensor], scales: list[Tensor], zeros: list[Tensor],
    biases: list[Tensor], norms: list[Tensor], residuals: list[Tensor], outs: list[Tensor],
    workspace: Tensor, eps: float, offset: float, kinds: int,
) -> None:  # fmt: skip
    lists = _Lists(weights, scales, zeros, biases, norms, residuals)
    for one in _given(x, xs, lists, outs, kinds):
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
    biases: list[Tensor], norms: list[Tensor], residuals: list[Tensor], outs: list[Tensor],
    workspace: Tensor, eps: float, offset: float, kinds: int,
) -> None:  # fmt: skip
    del workspace
    lists = _Lists(weights, scales, zeros, biases, norms, residuals)
    for one in _given(x, xs, lists, outs, kinds):
        one.out.copy_(int4_few_rows.reference(*_alone(one, eps, offset)))


define("few_rows_chain_", _reference, check=_check)
_CALL = caller(torch.ops.flexops.few_rows_chain_.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """A residual, a norm with a gate, and a product of three weights."""
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
    return outs
