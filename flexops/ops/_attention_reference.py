"""Attention in plain PyTorch, in pieces, so that memory stays linear in length: the tests' oracle,
and what runs where kernels do not. Formulas: see :mod:`flexops.ops.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._attention_checks import Options, check, fail, kind_of, scale_of

_PIECE = 2**25  # scores that are held at once


class _Piece(NamedTuple):
    """Some queries of a sequence (of all, if they are not packed) with its keys: indices of
    ``[batch, length, ...]`` tensors."""

    batch: slice  # of bias and slopes
    first: int  # query, within the sequence
    offset: int
    queries: slice
    keys: slice


def _pieces(q: Tensor, k: Tensor, o: Options) -> Iterator[_Piece]:
    if o.cu_seqlens_q is None or o.cu_seqlens_k is None:
        sequences = [(slice(None), 0, q.shape[1], 0, k.shape[1])]
    else:
        at_q, at_k = o.cu_seqlens_q.tolist(), o.cu_seqlens_k.tolist()
        sequences = [
            (slice(i, i + 1), at_q[i], at_q[i + 1], at_k[i], at_k[i + 1])
            for i in range(len(at_q) - 1)
        ]
    for batch, begin, end, first_key, last_key in sequences:
        rows = max(1, _PIECE // max(1, q.shape[0] * q.shape[2] * (last_key - first_key)))
        for first in range(begin, end, rows):
            offset = (last_key - first_key) - (end - begin)
            yield _Piece(
                batch,
                first - begin,
                offset,
                slice(first, min(end, first + rows)),
                slice(first_key, last_key),
            )


def _scores(q: Tensor, k: Tensor, piece: _Piece, o: Options) -> tuple[Tensor, Tensor | None]:
    """``[batch, heads, queries, keys]``, and by what a gradient is multiplied on its way to ``scale
    q k``."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale_of(q, o.scale)
    slope = None
    if o.softcap:
        tanh = torch.tanh(s / o.softcap)
        s, slope = o.softcap * tanh, 1 - tanh.square()
    rows, columns = s.shape[2:]
    if o.score_mod:
        at = _places(s, piece, o)
        from ._score_mod import known  # who has no such function needs none of it

        s, slope = known[o.score_mod](s, *at, words=o.bias)
    distance = torch.arange(columns, device=q.device) - (
        torch.arange(rows, device=q.device)[:, None] + piece.first + piece.offset
    )
    if o.alibi_slopes is not None:
        slopes = o.alibi_slopes[piece.batch] if o.alibi_slopes.dim() == 2 else o.alibi_slopes[None]
        s = s - slopes.to(s.dtype)[:, :, None, None] * distance.abs()
    if o.bias is not None and not o.score_mod:
        part = _bias_part(o.bias, piece, rows, columns)
        s = s.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else s + part.to(s.dtype)
    if o.window_left >= 0:
        s = s.masked_fill(distance < -o.window_left, -torch.inf)
    if o.window_right >= 0:
        s = s.masked_fill(distance > o.window_right, -torch.inf)
    return s, slope


def _places(s: Tensor, piece: _Piece, o: Options) -> list[Tensor]:
    """The numbers of sequences, heads, queries and keys of scores, broadcastable to them."""
    packed, rows, columns = o.cu_seqlens_q is not None, *s.shape[2:]
    batches = (
        range(piece.batch.start, piece.batch.stop) if packed else range(s.shape[0])[piece.batch]
    )
    sizes = (batches, range(s.shape[1]), range(piece.first, piece.first + rows), range(columns))
    shapes = ([-1 if d == dim else 1 for d in range(4)] for dim in range(4))
    pairs = zip(sizes, shapes, strict=True)
    return [torch.tensor(size, device=s.device).view(shape) for size, shape in pairs]


def _bias_part(bias: Tensor, piece: _Piece, rows: int, columns: int) -> Tensor:
    bias = bias[(None,) * (4 - bias.dim())]
    bias = bias[piece.batch] if bias.shape[0] > 1 else bias
    bias = bias[:, :, piece.first : piece.first + rows] if bias.shape[2] > 1 else bias
    return bias[..., :columns] if bias.shape[3] > 1 else bias


def _wide(x: Tensor) -> Tensor:
    """In at least float32, with a batch dimension."""
    x = x if x.dtype == torch.float64 else x.float()
    return x[None] if x.dim() == 3 else x


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // max(1, x.shape[2]), 2)


def _summed_over_groups(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[2] == like.shape[2] else x.unflatten(2, (like.shape[2], -1)).sum(3)


def _weights(s: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def reference(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    o, heads = Options(*options), q.shape[-2]
    if o.heads_first:
        out, lse = reference(*rows_first(q, k, v), *o._replace(heads_first=False))
        return out.transpose(1, 2), lse
    wide_q, wide_k, wide_v = (
        _wide(q),
        _for_all_heads(_wide(k), heads),
        _for_all_heads(_wide(v), heads),
    )
    out = wide_q.new_zeros(*wide_q.shape[:3], v.shape[-1])
    lse = wide_q.new_full((wide_q.shape[0], heads, wide_q.shape[1]), -torch.inf)
    for piece in _pieces(wide_q, wide_k, o):
        s, _ = _scores(wide_q[:, piece.queries], wide_k[:, piece.keys], piece, o)
        part = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
        if o.sinks is not None:
            part = torch.logaddexp(part, o.sinks.to(s.dtype)[:, None])
        lse[..., piece.queries] = part
        out[:, piece.queries] = torch.einsum(
            "bhqk,bkhd->bqhd", _weights(s, part), wide_v[:, piece.keys]
        )
    out = out.to(q.dtype)
    return (out, lse) if q.dim() == 4 else (out[0], lse[0])


def delta_of(grad: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    """``[batch, heads, queries]``."""
    delta = (_wide(grad) * _wide(out)).sum(-1).transpose(1, 2)
    return delta if grad_lse is None else delta - grad_lse.reshape(delta.shape)


def _score_gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    o: Options,
) -> Iterator[tuple[_Piece, Tensor, Tensor, Tensor | None]]:
    """Piece after piece its weights, their scores' gradients, and the latter's way to ``scale q
    k``. Takes wide tensors."""
    delta = delta_of(grad, grad_lse, out)
    lse = lse if lse.dim() == 3 else lse[None]
    for piece in _pieces(q, k, o):
        s, slope = _scores(q[:, piece.queries], k[:, piece.keys], piece, o)
        weights = _weights(s, lse[..., piece.queries])
        dp = torch.einsum("bqhd,bkhd->bhqk", grad[:, piece.queries], v[:, piece.keys])
        yield piece, weights, weights * (dp - delta[..., piece.queries, None]), slope


def backward_reference(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    o, heads = Options(*options), q.shape[-2]
    if o.heads_first:
        grad, q, k, v, out = rows_first(grad, q, k, v, out)
        dq, dk, dv = rows_first(
            *backward_reference(grad, grad_lse, q, k, v, out, lse, *o._replace(heads_first=False))
        )
        return dq, dk, dv
    wide_grad, wide_q = _wide(grad), _wide(q)
    wide_k, wide_v = _for_all_heads(_wide(k), heads), _for_all_heads(_wide(v), heads)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for piece, weights, ds, slope in _score_gradients(
        wide_grad, grad_lse, wide_q, wide_k, wide_v, _wide(out), lse, o
    ):
        dv[:, piece.keys] += torch.einsum("bhqk,bqhd->bkhd", weights, wide_grad[:, piece.queries])
        ds = (ds if slope is None else ds * slope) * scale_of(q, o.scale)
        dq[:, piece.queries] = torch.einsum("bhqk,bkhd->bqhd", ds, wide_k[:, piece.keys])
        dk[:, piece.keys] += torch.einsum("bhqk,bqhd->bkhd", ds, wide_q[:, piece.queries])
    pairs = (
        (dq, q),
        (_summed_over_groups(dk, _wide(k)), k),
        (_summed_over_groups(dv, _wide(v)), v),
    )
    dq, dk, dv = (gradient.reshape(x.shape).to(x.dtype).contiguous() for gradient, x in pairs)
    return dq, dk, dv


def bias_reference(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> Tensor:
    """The gradient of bias."""
    o = Options(*options)
    if o.heads_first:
        grad, q, k, v, out = rows_first(grad, q, k, v, out)
    heads = q.shape[-2]
    assert o.bias is not None
    wide_q = _wide(q)
    total = wide_q.new_zeros(o.bias.shape)
    arguments = (
        _wide(grad),
        grad_lse,
        wide_q,
        _for_all_heads(_wide(k), heads),
        _for_all_heads(_wide(v), heads),
        _wide(out),
        lse,
        o,
    )
    for piece, _, ds, _ in _score_gradients(*arguments):
        part = _bias_part(total, piece, *ds.shape[2:])
        part += ds.sum_to_size(part.shape)
    return total.to(o.bias.dtype)


def tables_reference(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    o: Options,
    score_mod: Any,
    tables: dict[int, Tensor],
) -> dict[int, Tensor]:
    """The gradients of some of a score modifier's tables, by their numbers."""
    heads = q.shape[-2]
    wide_q = _wide(q)
    wide_k, wide_v = _for_all_heads(_wide(k), heads), _for_all_heads(_wide(v), heads)
    dtype = wide_q.dtype
    leaves = {i: table.detach().to(dtype).requires_grad_() for i, table in tables.items()}
    totals = {number: torch.zeros_like(leaf) for number, leaf in leaves.items()}
    pieces = _score_gradients(_wide(grad), grad_lse, wide_q, wide_k, wide_v, _wide(out), lse, o)
    for piece, _, ds, _ in pieces:
        with torch.enable_grad():
            part_q, part_k = wide_q[:, piece.queries], wide_k[:, piece.keys]
            s = torch.einsum("bqhd,bkhd->bhqk", part_q, part_k) * scale_of(q, o.scale)
            s, _ = score_mod(s, *_places(s, piece, o), words=o.bias, tables=leaves)
        if not s.requires_grad:
            continue
        found = torch.autograd.grad(s, list(leaves.values()), ds, allow_unused=True)
        for total, part in zip(totals.values(), found, strict=True):
            total += 0 if part is None else part
    return {number: total.to(tables[number].dtype) for number, total in totals.items()}


def rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[batch, length, heads, head_dim]`` of ``[batch, heads, length, head_dim]``, and the other
    way round."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _lse_shape(q: Tensor, heads_first: bool) -> tuple[int, ...]:
    return (
        tuple(q.shape[:3])
        if heads_first
        else (q.shape[0], q.shape[2], q.shape[1])
        if q.dim() == 4
        else (q.shape[1], q.shape[0])
    )


def _empty_rows(like: Tensor, columns: int, heads_first: bool) -> Tensor:
    """In memory a row's heads are neighbours, however dimensions are named."""
    if not heads_first:
        return like.new_empty(*like.shape[:-1], columns)
    return like.new_empty(like.shape[0], like.shape[2], like.shape[1], columns).transpose(1, 2)


def fake(
    q: Tensor, _k: Tensor, v: Tensor, heads_first: bool = False, *_: Any
) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_rows(q, v.shape[-1], heads_first), q.new_empty(
        _lse_shape(q, heads_first), dtype=lse
    )


def backward_fake(
    _grad: Tensor,
    _grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    heads_first: bool = False,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_rows(x, x.shape[-1], heads_first) for x in (q, k, v))
    return dq, dk, dv


def bias_fake(*args: Any) -> Tensor:
    bias = Options(*args[7:]).bias
    assert bias is not None
    return bias.new_empty(bias.shape)


def check_backward(
    grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any
) -> None:
    check(q, k, v, *options)
    shape_out, shape_lse = (
        (*q.shape[:-1], v.shape[-1]),
        _lse_shape(q, Options(*options).heads_first),
    )
    for name, x, dtype, shape in (
        ("grad", grad, q.dtype, shape_out),
        ("out", out, q.dtype, shape_out),
        ("lse", lse, torch.float32, shape_lse),
        ("grad_lse", lse if grad_lse is None else grad_lse, torch.float32, shape_lse),
    ):
        if not isinstance(x, Tensor) or x.dtype != dtype or tuple(x.shape) != tuple(shape):
            fail(
                f"{name} must be a {dtype} tensor of shape {list(shape)}, got {kind_of(x)}"
                f" {list(getattr(x, 'shape', ()))}"
            )


def noting(
    reference: Any, why: Callable[[Tensor, Tensor, int], str], q_at: int, options_at: int
) -> Any:
    """A reference that stands in for kernels, and says so. The numbers are positions of
    arguments."""

    @functools.wraps(reference)
    def call(*args: Any) -> Any:
        q = args[q_at]
        if reason := why(q, args[q_at + 2], Options(*args[options_at:]).score_mod):
            from ..build.load import loader

            loader.decline("attention", q.device.type, f"{reason}: plain PyTorch, in pieces")
        return reference(*args)

    return call
