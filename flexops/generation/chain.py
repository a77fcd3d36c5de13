"""The products and attentions of a decode step, several layers' in one kernel
(:mod:`flexops.ops.few_rows_chain`).

Within a step a product only records what it computes, and gives its result unwritten; so does an
attention whose queries, keys and values are such a result, and a norm of its heads, which attention
then computes. The first operator that is neither a view nor an allocation has what was recorded
computed before itself, so a model's own code between products always reads written tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import TorchDispatchMode, tree_leaves
from ..ops.few_rows_chain import (
    MOST_PHASES,
    MOST_PRODUCTS,
    WORKSPACE,
    Attention,
    Phase,
    attends,
    common,
    few_rows_chain_,
    runs_on,
)
from ..ops.norm import rms_norm
from .state import state

_aten: Any = torch.ops.aten
_PASS = frozenset(
    (
        _aten.alias.default,
        _aten.detach.default,
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.expand.default,
        _aten.new_empty.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    )
)
"""Operators that read nothing."""
_KNOWN = ("flexops", "torch", "transformers")
"""Packages whose modules reach a GPU by torch's operators. Kernels of others, such as Triton's, may
not be seen when they read a result."""


class _Norm(NamedTuple):
    """A norm of heads: what it reads, its weight, ``eps`` and ``offset``, and its result."""

    x: Tensor
    weight: Tensor
    numbers: tuple[float, float]
    out: Tensor


class Queue(TorchDispatchMode):
    """What was recorded, and not computed yet."""

    def __init__(self, workspace: Tensor) -> None:
        super().__init__()
        self._workspace = workspace
        self._phases: list[Phase | Attention] = []
        self._common: list[Any] = []
        self._norms: dict[int, _Norm] = {}  # by their results' memory, which is not written

    def normalize(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor | None:
        """Record an RMS norm of heads, ``[1, 1, heads, head_dim]``, which are a part of what the
        last product gives. Gives its result, which is written if anything but
        :meth:`attend` reads it, or None where it is not recorded."""
        last = self._phases[-1].out if self._phases else None
        of_heads = x.dim() == 4 and x.shape[:2] == (1, 1) and x.is_contiguous()
        if last is None or not of_heads or _memory(x) != _memory(last):
            return None
        if weight.dtype != x.dtype or weight.shape != x.shape[3:]:
            return None
        out = torch.empty_like(x)
        self._norms[_memory(out)] = _Norm(x, weight, (eps, offset), out)
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        lengths: tuple[Tensor, Tensor | None],
        scale: float | None,
        window_left: int,
    ) -> Tensor | None:
        """Record an attention of one token, ``[batch, 1, heads, head_dim]``; the rest: as of
        :class:`Attention`. Gives its result, or None where it is not recorded, because no launch
        computes it or these are not what the last product gives."""
        x = self._phases[-1].out if self._phases else None
        parts, norms = zip(*map(self._before_norm, (query, key, value)), strict=True)
        if x is None or norms[2] is not None or not _side_by_side(x, *parts):
            return None
        found = {None if norm is None else norm.numbers for norm in norms[:2]}
        if len(found) > 1:
            return None
        (numbers,) = found
        weights = None if numbers is None else tuple(norm.weight for norm in norms[:2])
        out = x.new_empty(query.shape)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        rows = out.flatten(1), x.flatten(1)
        phase = Attention(*rows, keys, values, rotary, *lengths, scale, window_left, weights)
        if not attends(phase):
            return None
        self.add(phase, numbers)
        return out

    def _before_norm(self, x: Tensor) -> tuple[Tensor, Any]:
        """What a recorded norm, whose whole result x is, reads, and the norm; else x and None."""
        norm = self._norms.get(_memory(x))
        if norm is None or x.shape != norm.out.shape or x.stride()[2:] != norm.out.stride()[2:]:
            return x, None
        return norm.x, norm

    def add(self, phase: Phase | Attention, norm: tuple[float, float] | None = None) -> Tensor:
        """Record a phase; ``norm``: the ``eps`` and ``offset`` of its norm. Gives its result."""
        if isinstance(phase, Phase):
            self._write_what(phase.x, phase.residual)
            normed = phase.norm is not None
        else:
            normed = phase.norms is not None
        found = [norm if normed else None, *common(phase)]
        pairs = list(zip(found, self._common or found, strict=True))
        differs = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        most = MOST_PRODUCTS if pairs[-1] == (None, None) else MOST_PHASES
        if differs or len(self._phases) == most:
            self.run()
            pairs = list(zip(found, found, strict=True))
        self._common = [one if other is None else other for one, other in pairs]
        self._phases.append(phase)
        return phase.out

    def run(self) -> None:
        """Compute it."""
        phases, self._phases = self._phases, []
        if phases:
            eps, offset = self._common[0] or (0.0, 0.0)
            self._common = []
            few_rows_chain_(phases, self._workspace, eps=eps, offset=offset)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _PASS:
            self.run()
            if self._norms:
                self._write_what(*tree_leaves((args, kwargs)))
        if func is _aten.embedding.default:  # takes some tokens one after another
            return args[0][args[1]]
        return func(*args, **(kwargs or {}))

    def _write_what(self, *read: Any) -> None:
        """Compute the norms whose results are read."""
        for one in read:
            norm = self._norms.pop(_memory(one), None) if isinstance(one, Tensor) else None
            if norm is not None:
                self.run()
                eps, offset = norm.numbers
                norm.out.copy_(rms_norm(norm.x, norm.weight, eps, offset=offset))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _side_by_side(x: Tensor, *parts: Tensor) -> bool:
    """Whether the heads of these, ``[batch, 1, heads, head_dim]``, are the columns of x's first
    row."""
    place, size, dim = x.data_ptr(), x.element_size(), parts[0].shape[-1]
    for one in parts:
        if one.data_ptr() != place or one.stride()[2:] != (dim, 1) or one.shape[-1] != dim:
            return False
        place += one.shape[2] * dim * size
    return place == x.data_ptr() + x.shape[-1] * size


@contextlib.contextmanager
def deferring(model: nn.Module, store: Any, tokens: Tensor) -> Iterator[None]:
    """Inside, products of this thread's step are recorded, where the kernel runs on the device of
    ``tokens``. What has failed in there computes nothing more."""
    if not runs_on(tokens.device) or not all(map(_is_known, model.modules())):
        yield
        return
    if store.workspace is None:
        store.workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=tokens.device)
    with Queue(store.workspace) as state.queue:
        yield
        state.queue.run()


def _is_known(module: nn.Module) -> bool:
    """Whether it is of one of those packages, and runs its code or ours."""
    forward: Any = module.__dict__.get("forward")
    while isinstance(forward, functools.partial) and _package(forward.func) == "flexops":
        forward = forward.keywords.get("inner")
    code = type(module), type(module).forward
    return forward is None and all(_package(one) in _KNOWN for one in code)


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]
