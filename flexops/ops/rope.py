"""Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
Embedding", 2021).

With ``c = cos[p]`` and ``s = sin[p]`` at position ``p``, and pairs ``(x, y)`` of elements of a
head::

    x' = x c - y s        y' = y c + x s

The i-th pair is elements ``(i, i + rotary_dim / 2)`` in the half layout (GPT-NeoX, Llama in
transformers), ``(2 i, 2 i + 1)`` in the interleaved one (RoFormer, GPT-J, Llama as released).
Elements from ``rotary_dim`` on stay as they are. The arithmetic is float32, rounded once.

The backward pass is the rotation by the negative angle, of the gradients: no activation is kept for
it.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from .._torch import below_autograd, forward_mode, is_transforming
from ._declared import checks_of, define, empty_in_order
from ._register import (
    caller,
    is_dense,
    no_forward_mode,
    once_differentiable,
)
from ._self_check import Make, checking


@overload
def rotary_embedding(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def rotary_embedding(
    query: Tensor,
    key: None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, None]: ...
def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate ``query`` and ``key`` by their positions, in one launch. Formulas: see the module.

    Args:
        query: float32, bfloat16 or float16, ``[batch, heads, length, head_dim]``, any strides: a
            ``[batch, length, heads, head_dim]`` projection goes in as ``.transpose(1, 2)``, a slice
            of a packed one as it is, and neither is copied.
        key: like ``query``, with any number of heads; or None.
        cos: float32, bfloat16 or float16, whatever query's dtype, with ``rotary_dim <= head_dim``;
            one of two:

            - a table ``[max_positions, rotary_dim / 2]``. Where a model holds each number twice,
              pass ``cos[:, : rotary_dim // 2]`` (half layout) or ``cos[:, ::2]`` (interleaved);
            - what was looked up already, ``[batch, length, rotary_dim]``, or ``[1, length,
              rotary_dim]`` for all of the batch, with each number twice: as the models of
              transformers hand it on. In the half layout it is read where it is, with its strides,
              and only its first half; interleaved, where every second number is read, the call
              makes a copy first.
        sin: like ``cos``.
        positions: int64 or int32, ``[length]`` or ``[batch, length]``: the rows of a table. None
            stands for 0, 1, 2, ... A position outside the table gives NaN. None if ``cos`` was
            looked up already.
        interleaved: pairs are neighbours; else they are half of ``rotary_dim`` apart.
        inplace: write the results over ``query`` and ``key``, and return these. Elements from
            ``rotary_dim`` on are then not touched at all. If they require gradients, torch's rules
            for operations in place hold: no leaves, no views that come from ``split``, ``chunk`` or
            ``unbind``.

    Returns:
        the rotated ``(query, key)``, key None if it was. Unless in place, they are dense, with
        their dimensions in the order in memory of the input's, head_dim innermost. Differentiable,
        once, with respect to ``query`` and ``key``.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: a shape is not as above, ``cos`` or ``sin`` requires a gradient, or what is to
            be written in place is broadcast.
    """
    if interleaved and isinstance(cos, Tensor) and is_dense(cos) and cos.dim() == 3:
        _checked(query, key, cos, sin, positions)
        cos, sin = (torch.cat([table[..., ::2]] * 2, -1) for table in (cos, sin))
    if not inplace:
        results = _call(query, key, cos, sin, positions, interleaved, False)
        return results[0], None if key is None else results[1]
    _checked(query, key, cos, sin, positions)
    if forward_mode._current_level >= 0:
        no_forward_mode("flexops.rotary_embedding")
    _check_writable(query, key)
    _rotate_in_place(query, key, cos, sin, positions, interleaved)
    return query, key


def _rotate_in_place(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
) -> None:
    wanted = (
        [x for x in (query, key) if x is not None and x.requires_grad]
        if torch.is_grad_enabled()
        else []
    )
    if not wanted:
        with below_autograd() if not torch.compiler.is_compiling() else torch.no_grad():
            _rotate_(query, key, cos, sin, positions, interleaved, False)
    elif torch.compiler.is_compiling():  # the compiler makes it in place, or better
        for x, result in zip(
            (query, key), _rotate(query, key, cos, sin, positions, interleaved, False), strict=True
        ):
            if x is not None:
                x.copy_(result)
    elif is_transforming():
        _fail("inplace must be False under torch.func", RuntimeError)
    else:  # one by one: torch allows a view written in place only as the only result
        for x in (query, key):
            if x is not None:
                _InPlace.apply(x, cos, sin, positions, interleaved)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> Tensor:
        with below_autograd():
            _rotate_(x, None, cos, sin, positions, interleaved, False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        return (
            _rotate(grad, None, cos, sin, positions, ctx.interleaved, True)[0],
            None,
            None,
            None,
            None,
        )


# ---- checks ----


def _fail(message: str, error: type[Exception] = ValueError) -> None:
    raise error(f"flexops.rotary_embedding: {message}")


def _check(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *_: bool
) -> None:
    """What the declaration does not express."""
    shape, table = query.shape, cos.shape
    if len(shape) != 4:
        _fail(f"query must have shape [batch, heads, length, head_dim], got {list(shape)}")
    if len(table) == 3:
        if (
            table[0] not in (1, shape[0])
            or table[1] != shape[2]
            or table[2] % 2
            or table[2] > shape[3]
        ):
            wanted = (
                f"[{shape[0]} or 1, {shape[2]}, rotary_dim], as query's batch and length, with an"
                f" even rotary_dim of at most {shape[3]}"
            )
            _fail(f"cos must have shape {wanted}, got {list(table)}")
        if positions is not None:
            _fail(
                "positions must be None if cos has three dimensions, since those are looked up"
                " already"
            )
    elif len(table) != 2 or 2 * table[1] > shape[3]:
        _fail(
            "cos must have shape [max_positions, rotary_dim / 2], or with each number twice [batch,"
            f" length, rotary_dim], with rotary_dim at most query's head_dim, {shape[3]}, got"
            f" {list(table)}"
        )
    _check_constant(
        cos.requires_grad and torch.is_grad_enabled(), sin.requires_grad and torch.is_grad_enabled()
    )
    if key is not None and (
        key.dim() != 4 or key.shape[0] != shape[0] or key.shape[2:] != shape[2:]
    ):
        wanted = f"[{shape[0]}, any, {shape[2]}, {shape[3]}]"
        _fail(f"key must have shape {wanted}, as query, got {list(key.shape)}")
    if positions is not None:
        if tuple(positions.shape) not in ((shape[2],), (shape[0], shape[2])):
            wanted = f"[{shape[2]}] or [{shape[0]}, {shape[2]}], as query's length and batch"
            _fail(f"positions must have shape {wanted}, got {list(positions.shape)}")
    elif len(table) == 2 and table[0] < shape[2]:
        _fail(
            f"cos must have a row for each of query's {shape[2]} positions if positions is None,"
            f" got {list(table)}"
        )


_checked = checks_of("rotary_embedding", "rotary_embedding", _check)


def _check_constant(cos: bool, sin: bool) -> None:
    if cos or sin:
        _fail(f"{'cos' if cos else 'sin'} must not require a gradient: there is none for it")


def _check_writable(query: Tensor, key: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key)):
        if x is not None and any(
            stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)
        ):
            _fail(
                f"{name} must not be broadcast if inplace is True, since it is written; got strides"
                f" {x.stride()}"
            )


# ---- the reference: plain PyTorch ----


def _pairs(table: Tensor) -> int:
    """That are rotated."""
    return table.shape[1] if table.dim() == 2 else table.shape[2] // 2


def _angles(table: Tensor, query: Tensor, positions: Tensor | None) -> Tensor:
    """``[batch or 1, 1, length, rotary_dim / 2]``, NaN outside the table."""
    wide = table if query.dtype == torch.float64 else table.float()
    if table.dim() == 3:
        return wide[:, None, :, : _pairs(table)]
    if positions is None:
        return wide[None, None, : query.shape[2]]
    known = (positions >= 0) & (positions < table.shape[0])
    if table.shape[0] == 0:
        rows = wide.new_zeros(*positions.shape, table.shape[1])
    else:
        rows = wide[torch.where(known, positions, 0).long()]
    rows = torch.where(known[..., None], rows, torch.nan)
    return rows[:, None] if positions.dim() == 2 else rows[None, None]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The part of ``x`` that is rotated."""
    wide = x[..., : 2 * cos.shape[-1]]
    wide = wide if x.dtype == torch.float64 else wide.float()
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return (torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)).to(x.dtype)


def rotated_reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> Tensor:
    """``[batch, length, heads, head_dim]``, rotated at ``positions``, ``[batch, length]``."""
    return _reference(x.transpose(1, 2), None, cos, sin, positions, interleaved, False)[
        0
    ].transpose(1, 2)


def _reference(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    c, s = _angles(cos, query, positions), _angles(-sin if inverse else sin, query, positions)
    results = []
    for x in (query,) if key is None else (query, key):
        out = empty_in_order(x)
        out[..., : 2 * _pairs(cos)] = _rotated(x, c, s, interleaved)
        out[..., 2 * _pairs(cos) :] = x[..., 2 * _pairs(cos) :]
        results.append(out)
    return results[0], query.new_empty(0) if key is None else results[1]


def _reference_in_place(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> None:
    c, s = _angles(cos, query, positions), _angles(-sin if inverse else sin, query, positions)
    for x in (query,) if key is None else (query, key):
        x[..., : 2 * _pairs(cos)] = _rotated(x, c, s, interleaved)


def _keep(ctx: Any, args: tuple[Any, ...], _: tuple[Tensor, Tensor]) -> None:
    cos, sin, positions, interleaved, inverse = args[2:]
    _check_constant(*ctx.needs_input_grad[2:4])
    ctx.save_for_backward(cos, sin, positions)
    ctx.layout = (interleaved, not inverse)


def _backward(ctx: Any, query: Tensor | None, key: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    query = query if ctx.needs_input_grad[0] else None
    key = key if ctx.needs_input_grad[1] else None
    of_query = of_key = None
    if query is not None and key is not None:
        of_query, of_key = _rotate(query, key, cos, sin, positions, *ctx.layout)
    elif query is not None:
        of_query = _rotate(query, None, cos, sin, positions, *ctx.layout)[0]
    elif key is not None:
        of_key = _rotate(key, None, cos, sin, positions, *ctx.layout)[0]
    return of_query, of_key, None, None, None, None, None


define(
    "rotary_embedding",
    _reference,
    check=_check,
    setup_context=_keep,
    backward=_backward,
)
define("rotary_embedding_", _reference_in_place, function="rotary_embedding")

_rotate = torch.ops.flexops.rotary_embedding.default
_call = caller(_rotate)
_rotate_ = torch.ops.flexops.rotary_embedding_.default


@checking()
def self_check(make: Make) -> Any:
    """Both layouts, a partial rotary dimension and grouped heads."""
    query, key = make(2, 4, 37, 64), make(2, 2, 37, 64)
    angle, positions = make.uniform(50, 24, high=6.3), make.integers(0, 50, 2, 37)
    tables = angle.cos(), angle.sin(), positions
    return [_rotate(query, key, *tables, layout, False) for layout in (False, True)]
