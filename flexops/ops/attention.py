"""Attention: ``softmax(score(scale q k^T)) v`` per sequence and head, without the matrix of scores in memory.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022) and what followed it; the kernels' own pages
(``csrc/attention/attention.cuh``) say which. With ``offset = keys - queries`` of a sequence, query ``i`` and key ``j``::

    s = scale q_i k_j;  s = softcap tanh(s / softcap);  s = s - slope |i + offset - j| + bias;  s = -inf where the query does not see the key
    lse_i = log(sum_j e^s + e^sink);  p = e^(s - lse_i);  o_i = sum_j p v_j

    dp = do_i v_j;  delta_i = do_i o_i - dlse_i;  ds = p (dp - delta_i);  dv_j = sum_i p do_i;  dbias = ds;  dsink = -sum_i e^(sink - lse_i) delta_i
    ds = ds (1 - tanh^2(s / softcap));  dq_i = scale sum_j ds k_j;  dk_j = scale sum_i ds q_i

A query that sees no key has zeros as its output and gradients, and ``-inf`` as its ``lse`` (without sinks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..op_builder import loader
from ._difference import difference
from ._register import caller, check_places, define, has_native
from ._score_mod import ScoreMod as ScoreMod
from ._score_mod import known as score_mods
from ._score_mod import number_of
from ._torch import register_flops

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_MOST_COLUMNS = 256
_PIECE = 2**25  # scores that the reference holds at once


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(score(scale q k^T)) v``. Formulas: see the module.

    Args:
        q: ``[batch, length, heads, head_dim]`` or, packed, ``[tokens, heads, head_dim]``; float32, bfloat16 or float16, any strides: a slice of a
            packed projection goes in as it is.
        k: like ``q``, with a length of its own and a number of heads that divides ``q``'s: ``heads / key heads`` neighbours share one.
        v: like ``k``; its ``head_dim`` may be another.
        causal: query ``i`` sees keys up to ``i + keys - queries`` (aligned bottom right): the last query sees all of them.
        scale: of the product; None is ``head_dim ** -0.5``.
        window: ``(left, right)``: query ``i`` sees only the keys from ``i + keys - queries - left`` to ``i + keys - queries + right``; None or -1 on a
            side is no limit there.
        bias: broadcastable to ``[batch, heads, queries, keys]`` (packed: of the longest), never expanded in memory. A bool one is True where a key
            takes part; a float32, bfloat16 or float16 one is added. Its gradient, if it wants one, is computed by plain PyTorch, in pieces.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, float32 or what is cast to it; no gradient.
        softcap: ``score = softcap tanh(score / softcap)`` before bias and slopes; 0 leaves it out.
        sinks: ``[heads]``, one more score of each row, that has no value. Differentiable.
        cu_seqlens_q: int32, ``[sequences + 1]``: where each sequence of ``q`` begins, and the end, for packed tensors; else None.
        cu_seqlens_k: the same of ``k`` and ``v``.
        max_seqlen_q: the longest of ``q``'s; None asks ``cu_seqlens_q``, which waits for the GPU.
        max_seqlen_k: the same of ``k``'s.
        return_lse: give ``lse`` too, which is differentiable.
        deterministic: the same bits every time, backward too, where a GPU adds up ``q``'s gradient in any order otherwise. On by itself under
            ``torch.use_deterministic_algorithms(True)``.
        score_mod: a function ``(score, b, h, q, k) -> score`` of arithmetic on numbers (:class:`flexops.ScoreMod` says which), in place of ``softcap``,
            ``alibi_slopes`` and ``bias``; ``-inf`` leaves a key out. It is compiled into the kernels when it is first seen, with its derivative. Under
            ``torch.compile`` it must be a :class:`flexops.ScoreMod`, made outside.

    Returns:
        the output, ``q``'s shape with ``v``'s ``head_dim``, contiguous; with ``return_lse`` also the log of the sum of ``e^score``, float32, ``[batch,
        heads, queries]`` or, packed, ``[heads, tokens]``. Under autocast ``q``, ``k`` and ``v`` are cast as for torch's attention.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: a shape is not as above, or ``alibi_slopes`` requires a gradient.

    Arithmetic is float32, weights are rounded to the dtype of ``v`` before they are multiplied with it. On a GPU, kernels take bfloat16 and float16, and
    a ``head_dim`` that is a multiple of 8, up to 256; all else is plain PyTorch, in pieces, as :func:`flexops.status` then says.
    """
    q, k, v = _autocast(q, k, v)
    left, right = (-1, -1) if window is None else _window(window)
    if alibi_slopes is not None and isinstance(alibi_slopes, Tensor) and alibi_slopes.dtype in _HALVES:
        alibi_slopes = alibi_slopes.float()
    if sinks is not None and isinstance(sinks, Tensor) and sinks.dtype in _HALVES:
        sinks = sinks.float()
    longest = (0, 0)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        longest = _longest(cu_seqlens_q, max_seqlen_q), _longest(cu_seqlens_k, max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        _fail("max_seqlen_q and max_seqlen_k must come with cu_seqlens_q and cu_seqlens_k, got none")
    number = score_mod.number if isinstance(score_mod, ScoreMod) else 0 if score_mod is None else number_of(score_mod)
    call = _composed if _declined(q, v, number) else _native
    out, lse = call(
        q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, *longest, scale, left, 0 if causal else right, float(softcap),
        deterministic or torch.are_deterministic_algorithms_enabled(), number,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, by :func:`attention` where that has kernels, else by torch's own.

    Args:
        query: ``[batch, heads, length, head_dim]``, as ``key`` and ``value``; transposed views are not copied.
        key, value: see :func:`attention`.
        attn_mask: as ``bias`` of :func:`attention`.
        dropout_p: anything but 0 is torch's.
        is_causal: query ``i`` sees keys up to ``i`` (aligned top left, which is torch's way, and not that of :func:`attention`).
        scale: None is ``head_dim ** -0.5``.
        enable_gqa: whether ``key`` and ``value`` may have fewer heads.

    Returns:
        ``[batch, heads, length, head_dim]``, a transposed view as torch's flash backend gives.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"flexops.scaled_dot_product_attention: {name} must be a tensor, got {type(x).__name__}")
    if why := _torchs(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        if not torch.compiler.is_compiling() and why != "meant":
            loader.decline("attention", query.device.type, f"{why}: torch's scaled_dot_product_attention")
        arguments: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **arguments)
    queries, keys = query.shape[2], key.shape[2]
    window = None
    if is_causal and queries < keys:
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif is_causal and queries != keys:
        window = (None, queries - keys)
    result = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=is_causal and window is None, window=window, bias=attn_mask, scale=scale
    )
    assert isinstance(result, Tensor)
    return result.transpose(1, 2)


# ---- who computes ------------------------------------------------------------------------------------------------------------------------


def _declined(q: Any, v: Any, score_mod: int = 0) -> str:
    """Why kernels do not take such tensors; "" if they do."""
    if not isinstance(q, Tensor) or not isinstance(v, Tensor):
        return ""
    if not q.is_cuda:
        return "a score_mod on a CPU" if score_mod else ""
    if q.dtype not in _HALVES:
        return f"{str(q.dtype).removeprefix('torch.')} on a GPU (kernels take bfloat16 and float16)"
    columns, columns_v = q.shape[-1:], v.shape[-1:]
    for number in (*columns, *columns_v):
        if number % 8 or number > _MOST_COLUMNS or number == 0:
            return f"a head_dim of {number} (kernels take multiples of 8 up to {_MOST_COLUMNS})"
    return ""


def _declined_backward(q: Tensor, v: Tensor) -> str:
    """The same of the backward kernels, for what forward ones take."""
    if q.is_cuda and max(q.shape[-1], v.shape[-1]) > 128 and torch.cuda.get_device_capability(q.device) in ((8, 6), (8, 9), (12, 0), (12, 1)):
        return "the gradients of a head_dim above 128 (a multiprocessor of this GPU has too little shared memory)"
    return ""


def _torchs(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool) -> str:
    """Why torch's own attention is called; "" if it is not, "meant" if that is nothing to report."""
    of_q, of_k, of_v, dtype = query.shape, key.shape, value.shape, query.dtype
    if dropout_p != 0.0 or not len(of_q) == len(of_k) == len(of_v) == 4 or (mask is not None and is_causal):
        return "meant"  # torch's to compute, or to refuse
    if of_q[1] != of_k[1] and (not enable_gqa or of_k[1] == 0 or of_q[1] % of_k[1]):
        return "meant"
    if dtype != key.dtype or dtype != value.dtype or dtype not in _FLOATS:
        return "meant"
    if of_q[0] != of_k[0] or of_k[:3] != of_v[:3] or of_q[3] != of_k[3]:
        return "meant"
    if mask is not None and (mask.dtype not in (torch.bool, dtype) or (mask.requires_grad and torch.is_grad_enabled())):
        return "meant"
    if why := _declined(query, value):
        return why
    if torch.compiler.is_compiling() or query.device.type == "meta" or has_native("attention", query.device.type):
        return ""
    return "meant"  # the family's own status says why


def _autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    device = q.device.type if isinstance(q, Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in _FLOATS else x for x in (q, k, v))
    return q, k, v


# ---- checks --------------------------------------------------------------------------------------------------------------------------------


def _fail(message: str, error: type[Exception] = ValueError) -> None:
    raise error(f"flexops.attention: {message}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _window(window: tuple[int | None, int | None]) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2 or any(x is not None and (not isinstance(x, int) or x < -1) for x in window):
        _fail(f"window must be two numbers of keys, left and right, each None or -1 for no limit, got {window!r}")
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


def _longest(cumulative: Any, given: int | None) -> int:
    if given is not None:
        return given
    if not isinstance(cumulative, Tensor) or cumulative.dim() != 1 or cumulative.numel() < 2:
        return 0
    return int((cumulative[1:] - cumulative[:-1]).max())


def _check(
    q: Any, k: Any, v: Any, bias: Any, alibi_slopes: Any, sinks: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, *rest: Any
) -> None:
    named = {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_places("flexops.attention", named)
    if not isinstance(q, Tensor) or q.dtype not in _FLOATS:
        _fail(f"q must be a float32, bfloat16 or float16 tensor, got {_kind(q)}", TypeError)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype != q.dtype:
            _fail(f"{name} must be a {q.dtype} tensor, as q, got {_kind(x)}", TypeError)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        _fail("cu_seqlens_q and cu_seqlens_k must both be given, or neither")
    packed = cu_seqlens_q is not None
    form = "[tokens, heads, head_dim], packed" if packed else "[batch, length, heads, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if packed else 4):
            _fail(f"{name} must have shape {form}, got {list(x.shape)}")
    heads, key_heads = q.shape[-2], k.shape[-2]
    if k.shape[-1] != q.shape[-1] or (not packed and k.shape[0] != q.shape[0]):
        batch = "" if packed else f"{q.shape[0]}, "
        _fail(f"k must have shape [{batch}any, key heads, {q.shape[-1]}], as q, got {list(k.shape)}")
    if heads and (key_heads == 0 or heads % key_heads):
        _fail(f"k must have a number of heads that divides q's {heads}, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        _fail(f"v must have k's shape {list(k.shape)}, head_dim excepted, got {list(v.shape)}")
    batch = q.shape[0]
    if packed:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if not isinstance(x, Tensor) or x.dtype != torch.int32:
                _fail(f"{name} must be an int32 tensor, got {_kind(x)}", TypeError)
            if x.dim() != 1 or x.shape[0] < 1 or x.shape != cu_seqlens_q.shape:
                _fail(f"{name} must have shape [sequences + 1], both the same, got {list(x.shape)}")
        batch = cu_seqlens_q.shape[0] - 1
        for name, number in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if not isinstance(number, int) or number < 0:
                _fail(f"{name} must be a number of tokens, got {number!r}")
    softcap, score_mod = (rest[3], rest[5]) if len(rest) > 5 else (0.0, 0)  # torch leaves out what is the default
    if score_mod and (softcap or bias is not None or alibi_slopes is not None):
        _fail("score_mod must come without softcap, bias and alibi_slopes, which it can compute itself")
    lengths = (max_seqlen_q, max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    _check_bias(bias, (batch, heads, *lengths))
    _check_of_heads("alibi_slopes", alibi_slopes, ((heads,), (batch, heads)))
    _check_of_heads("sinks", sinks, ((heads,),))
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        _fail("alibi_slopes must not require a gradient: there is none for them")


def _check_bias(bias: Any, target: tuple[int, ...]) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.dtype not in (torch.bool, *_FLOATS):
        _fail(f"bias must be a bool, float32, bfloat16 or float16 tensor, got {_kind(bias)}", TypeError)
    missing = 4 - bias.dim()
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(bias.shape, target[missing:], strict=True)):
        _fail(f"bias must be broadcastable to [batch, heads, queries, keys], {list(target)}, got {list(bias.shape)}")


def _check_of_heads(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        _fail(f"{name} must be a float32 tensor (or bfloat16 or float16), got {_kind(x)}", TypeError)
    if tuple(x.shape) not in shapes:
        _fail(f"{name} must have shape {' or '.join(str(list(shape)) for shape in shapes)}, got {list(x.shape)}")


# ---- the reference: plain PyTorch ------------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The ops' arguments behind q, k and v."""

    bias: Tensor | None
    alibi: Tensor | None
    sinks: Tensor | None
    cumulative_q: Tensor | None
    cumulative_k: Tensor | None
    max_q: int
    max_k: int
    scale: float | None
    left: int
    right: int
    softcap: float
    deterministic: bool
    score_mod: int = 0


class _Piece(NamedTuple):
    """Some queries of a sequence (of all, if they are not packed) with its keys: indices of ``[batch, length, ...]`` tensors."""

    batch: slice  # of bias and slopes
    first: int  # query, within the sequence
    offset: int
    queries: slice
    keys: slice


def _pieces(q: Tensor, k: Tensor, o: _Options) -> Iterator[_Piece]:
    if o.cumulative_q is None or o.cumulative_k is None:
        sequences = [(slice(None), 0, q.shape[1], 0, k.shape[1])]
    else:
        at_q, at_k = o.cumulative_q.tolist(), o.cumulative_k.tolist()
        sequences = [(slice(i, i + 1), at_q[i], at_q[i + 1], at_k[i], at_k[i + 1]) for i in range(len(at_q) - 1)]
    for batch, begin, end, first_key, last_key in sequences:
        rows = max(1, _PIECE // max(1, q.shape[0] * q.shape[2] * (last_key - first_key)))
        for first in range(begin, end, rows):
            offset = (last_key - first_key) - (end - begin)
            yield _Piece(batch, first - begin, offset, slice(first, min(end, first + rows)), slice(first_key, last_key))


def _scale(q: Tensor, o: _Options) -> float:
    return float(q.shape[-1] ** -0.5) if o.scale is None else o.scale


def _scores(q: Tensor, k: Tensor, piece: _Piece, o: _Options) -> tuple[Tensor, Tensor | None]:
    """``[batch, heads, queries, keys]``, and by what a gradient is multiplied on its way to ``scale q k``."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * _scale(q, o)
    slope = None
    if o.softcap:
        tanh = torch.tanh(s / o.softcap)
        s, slope = o.softcap * tanh, 1 - tanh.square()
    rows, columns = s.shape[2:]
    if o.score_mod:
        batches = range(s.shape[0])[piece.batch] if o.cumulative_q is None else range(piece.batch.start, piece.batch.stop)
        sizes = (batches, range(s.shape[1]), range(piece.first, piece.first + rows), range(columns))
        at = [torch.tensor(size, device=q.device).view([-1 if d == dim else 1 for d in range(4)]) for dim, size in enumerate(sizes)]
        s, slope = score_mods[o.score_mod](s, *at)
    distance = torch.arange(columns, device=q.device) - (torch.arange(rows, device=q.device)[:, None] + piece.first + piece.offset)
    if o.alibi is not None:
        slopes = o.alibi[piece.batch] if o.alibi.dim() == 2 else o.alibi[None]
        s = s - slopes.to(s.dtype)[:, :, None, None] * distance.abs()
    if o.bias is not None:
        part = _bias_part(o.bias, piece, rows, columns)
        s = s.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else s + part.to(s.dtype)
    if o.left >= 0:
        s = s.masked_fill(distance < -o.left, -torch.inf)
    if o.right >= 0:
        s = s.masked_fill(distance > o.right, -torch.inf)
    return s, slope


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


def _reference(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    o, heads = _Options(*options), q.shape[-2]
    wide_q, wide_k, wide_v = _wide(q), _for_all_heads(_wide(k), heads), _for_all_heads(_wide(v), heads)
    out = wide_q.new_zeros(*wide_q.shape[:3], v.shape[-1])
    lse = wide_q.new_full((wide_q.shape[0], heads, wide_q.shape[1]), -torch.inf)
    for piece in _pieces(wide_q, wide_k, o):
        s, _ = _scores(wide_q[:, piece.queries], wide_k[:, piece.keys], piece, o)
        part = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
        if o.sinks is not None:
            part = torch.logaddexp(part, o.sinks.to(s.dtype)[:, None])
        lse[..., piece.queries] = part
        out[:, piece.queries] = torch.einsum("bhqk,bkhd->bqhd", _weights(s, part), wide_v[:, piece.keys])
    out = out.to(q.dtype)
    return (out, lse) if q.dim() == 4 else (out[0], lse[0])


def _delta(grad: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    """``[batch, heads, queries]``."""
    delta = (_wide(grad) * _wide(out)).sum(-1).transpose(1, 2)
    return delta if grad_lse is None else delta - grad_lse.reshape(delta.shape)


def _score_gradients(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, o: _Options
) -> Iterator[tuple[_Piece, Tensor, Tensor, Tensor | None]]:
    """Piece after piece its weights, their scores' gradients, and the latter's way to ``scale q k``. Takes wide tensors."""
    delta = _delta(grad, grad_lse, out)
    lse = lse if lse.dim() == 3 else lse[None]
    for piece in _pieces(q, k, o):
        s, slope = _scores(q[:, piece.queries], k[:, piece.keys], piece, o)
        weights = _weights(s, lse[..., piece.queries])
        dp = torch.einsum("bqhd,bkhd->bhqk", grad[:, piece.queries], v[:, piece.keys])
        yield piece, weights, weights * (dp - delta[..., piece.queries, None]), slope


def _backward_reference(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    o, heads = _Options(*options), q.shape[-2]
    wide_grad, wide_q = _wide(grad), _wide(q)
    wide_k, wide_v = _for_all_heads(_wide(k), heads), _for_all_heads(_wide(v), heads)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for piece, weights, ds, slope in _score_gradients(wide_grad, grad_lse, wide_q, wide_k, wide_v, _wide(out), lse, o):
        dv[:, piece.keys] += torch.einsum("bhqk,bqhd->bkhd", weights, wide_grad[:, piece.queries])
        ds = (ds if slope is None else ds * slope) * _scale(q, o)
        dq[:, piece.queries] = torch.einsum("bhqk,bkhd->bqhd", ds, wide_k[:, piece.keys])
        dk[:, piece.keys] += torch.einsum("bhqk,bqhd->bkhd", ds, wide_q[:, piece.queries])
    pairs = ((dq, q), (_summed_over_groups(dk, _wide(k)), k), (_summed_over_groups(dv, _wide(v)), v))
    dq, dk, dv = (gradient.reshape(x.shape).to(x.dtype).contiguous() for gradient, x in pairs)
    return dq, dk, dv


def _bias_reference(grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any) -> Tensor:
    """The gradient of bias."""
    o, heads = _Options(*options), q.shape[-2]
    assert o.bias is not None
    wide_q = _wide(q)
    total = wide_q.new_zeros(o.bias.shape)
    arguments = (_wide(grad), grad_lse, wide_q, _for_all_heads(_wide(k), heads), _for_all_heads(_wide(v), heads), _wide(out), lse, o)
    for piece, _, ds, _ in _score_gradients(*arguments):
        part = _bias_part(total, piece, *ds.shape[2:])
        part += ds.sum_to_size(part.shape)
    return total.to(o.bias.dtype)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def _fake(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(_lse_shape(q), dtype=lse)


def _backward_fake(_grad: Tensor, _grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _bias_fake(*args: Any) -> Tensor:
    bias: Tensor = args[7]
    return bias.new_empty(bias.shape)


def _check_backward(grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any) -> None:
    _check(q, k, v, *options)
    shape_out, shape_lse = (*q.shape[:-1], v.shape[-1]), _lse_shape(q)
    for name, x, dtype, shape in (
        ("grad", grad, q.dtype, shape_out),
        ("out", out, q.dtype, shape_out),
        ("lse", lse, torch.float32, shape_lse),
        ("grad_lse", lse if grad_lse is None else grad_lse, torch.float32, shape_lse),
    ):
        if not isinstance(x, Tensor) or x.dtype != dtype or tuple(x.shape) != tuple(shape):
            _fail(f"{name} must be a {dtype} tensor of shape {list(shape)}, got {_kind(x)} {list(getattr(x, 'shape', ()))}")


def _noting(reference: Any, why: Any, tensors: tuple[int, int], score_mod: int) -> Any:
    """A reference that stands in for kernels, and says so. The numbers are positions of arguments."""

    @functools.wraps(reference)
    def call(*args: Any) -> Any:
        q, v = (args[position] for position in tensors)
        if reason := why(q, v, *args[score_mod:]):
            loader.decline("attention", q.device.type, f"{reason}: plain PyTorch, in pieces")
        return reference(*args)

    return call


# ---- autograd ------------------------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, alibi, sinks, cu_q, cu_k, *options = args
    if ctx.needs_input_grad[4]:
        _fail("alibi_slopes must not require a gradient: there is none for them")
    ctx.save_for_backward(q, k, v, *results, bias, alibi, sinks, cu_q, cu_k)
    ctx.options = options


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bias, alibi, sinks, *cumulative = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad = torch.zeros_like(out) if grad is None else grad
    arguments = (grad, grad_lse, q, k, v, out, lse, bias, alibi, sinks, *cumulative, *ctx.options)
    gradients: list[Tensor | None] = [None] * len(needs)
    if any(needs[:3]):
        composed = _declined(q, v, *ctx.options[7:]) or _declined_backward(q, v)
        op = torch.ops.flexops.attention_composed_backward if composed else torch.ops.flexops.attention_backward
        gradients[:3] = (gradient if need else None for gradient, need in zip(op(*arguments), needs[:3], strict=True))
    if needs[3]:
        gradients[3] = torch.ops.flexops.attention_bias_backward(*arguments)
    if needs[5]:
        lse = lse if lse.dim() == 3 else lse[None]
        of_rows = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * _delta(grad, grad_lse, out)
        gradients[5] = -of_rows.sum((0, 2)).to(sinks.dtype)
    return tuple(gradients)


_OPTIONS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float? scale, "
    "int window_left, int window_right, float softcap, bool deterministic, int score_mod=0"
)
_RESULTS = "Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"

for _name, _instead, _is_native in (("attention", _reference, True), ("attention_composed", _noting(_reference, _declined, (0, 2), 15), False)):
    define(
        "attention",
        f"{_name}(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
        _instead,
        _fake,
        check=_check,
        setup_context=_keep,
        backward=_backward,
        native=_is_native,
        function="attention",
    )
define(
    "attention",
    f"attention_backward({_RESULTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
    check=_check_backward,
    function="attention",
)
define(
    "attention",
    f"attention_composed_backward({_RESULTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _noting(_backward_reference, lambda q, v, *mod: _declined(q, v, *mod) or _declined_backward(q, v), (2, 4), 19),
    _backward_fake,
    check=_check_backward,
    native=False,
    function="attention",
)
define(
    "attention",
    f"attention_bias_backward({_RESULTS}, {_OPTIONS}) -> Tensor",
    _bias_reference,
    _bias_fake,
    check=_check_backward,
    native=False,
    function="attention",
)

_native = caller(torch.ops.flexops.attention.default)
_composed = caller(torch.ops.flexops.attention_composed.default)


# ---- operations, for torch's counter -------------------------------------------------------------------------------------------------------


def _flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, **_: Any) -> int:
    """Two products, as torch counts its own: what a mask leaves out is not taken off. Of packed sequences as if all were as long as the longest."""
    packed, batch = q.dim() == 3, q.shape[0]
    queries, keys = q.shape[-3], k.shape[-3]
    if packed and options[3] is not None:
        batch, queries, keys = options[3].shape[0] - 1, options[5], options[6]
    count: int = 2 * batch * q.shape[-2] * queries * keys * (q.shape[-1] + v.shape[-1])
    return count


def _flops_backward(*args: Any, **_: Any) -> int:
    """Five products, scores once more among them."""
    q, _k, v = args[2:5]
    forward = _flops(*args[2:5], *args[7:])
    return forward * 5 // 2 if q.shape[-1] == v.shape[-1] else forward // (q.shape[-1] + v.shape[-1]) * (3 * q.shape[-1] + 2 * v.shape[-1])


register_flops(
    {
        torch.ops.flexops.attention: _flops,
        torch.ops.flexops.attention_composed: _flops,
        torch.ops.flexops.attention_backward: _flops_backward,
        torch.ops.flexops.attention_composed_backward: _flops_backward,
    }
)


def self_check(device: str) -> float:
    """Grouped heads, unequal lengths, a window and a soft cap on random numbers of size 1, by whatever kernels calls reach on ``device`` and by the
    reference.

    For ``flexops doctor``. Returns the largest difference; a 32nd of it on a GPU, whose kernels take 16 bits: there results of this size round by 2^-7.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, grad = (torch.randn(2, length, heads, 64, generator=generator).to(device, dtype) for length, heads in ((37, 4), (65, 2), (65, 2), (37, 4)))
    actual: list[Tensor] = []
    expected: list[Tensor] = []
    with torch.no_grad():
        for left, right, softcap in ((-1, -1, 0.0), (20, 0, 15.0)):
            options = (None, None, None, None, None, 0, 0, None, left, right, softcap, True)
            out, lse = _reference(q, k, v, *options)
            expected += [out, lse, *_backward_reference(grad, None, q, k, v, out, lse, *options)]
            actual += [*_native(q, k, v, *options), *torch.ops.flexops.attention_backward(grad, None, q, k, v, out, lse, *options)]
    return difference(actual, expected) / (1 if dtype == torch.float32 else 32)
