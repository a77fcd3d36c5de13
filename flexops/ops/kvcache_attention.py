"""Attention of new queries over a key-value cache that the call itself extends.

The meaning is that of ``flash_attn_with_kvcache`` (Dao et al., FlashAttention). For sequence ``b``
with ``length = cache_seqlens[b]`` cached keys and ``new`` appended ones::

    k_cache[b, length + i] = rotated(k[b, i], position length + i);  v_cache likewise, not rotated
    q_i is rotated at position length + i if causal or windowed, else at position length
    keys = leftpad[b] .. length + new - 1;  offset = length + new - queries
    score(i, j) = scale q_i k_j, then softcap, ALiBi and sinks as in flexops.attention

Query ``i`` sees keys up to ``i + offset`` if causal, and within a window around ``i + offset``. A
query that sees no key has zeros as its output and ``-inf`` as its ``lse`` (without sinks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._arguments import check_shape, check_tensor, soft_cap, whole
from ._attention_checks import FLOATS, Options, Window, declined, scale_of, window_of
from ._attention_reference import reference as attention_reference
from ._declared import define
from ._multi_tensor import increment_versions
from ._register import caller
from ._self_check import difference
from .attention import by_kernels
from .rope import rotated_reference


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    rotary_from_leftpad: bool = False,
    early: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append ``k`` and ``v`` to the cache in place, and attend ``q`` to it. Formulas: see the
    module. Nothing waits for the GPU, and the call can be captured in a CUDA graph: lengths, tables
    and indices are read on the device.

    Args:
        q: ``[batch, queries, heads, head_dim]``; bfloat16, float16 or float32, any strides.
        k_cache: ``[cache batch, capacity, key heads, head_dim]`` or, with ``block_table``,
            ``[blocks, page, key heads, head_dim]``; any strides. ``heads`` is a multiple of ``key
            heads``. A page may have any number of tokens; multiples of 32 are fastest.
        v_cache: like ``k_cache``; its ``head_dim`` may be another.
        k: ``[batch, new, key heads, head_dim]``, appended at ``cache_seqlens``; None appends
            nothing.
        v: the values of ``k``; given if and only if ``k`` is.
        rotary_cos: ``[positions, rotary_dim / 2]``: rotates ``q`` and ``k``; requires ``k``. A
            position past the table gives NaN.
        rotary_sin: like ``rotary_cos``.
        cache_seqlens: tokens that the cache holds before this call: a number, or int32 ``[batch]``.
            None: the cache is full (then ``k`` must be None). Tokens past the capacity are dropped.
        cache_batch_idx: int32 ``[batch]``: which row of the cache a sequence has; None: its own
            number. Not with ``block_table``. A sequence whose row does not exist sees no keys.
        cache_leftpad: int32 ``[batch]``: the first token of each sequence; None: 0.
        block_table: int32 ``[batch, most blocks]``: the pages of each sequence, in order. Pages
            behind a sequence's end may have any number. A page that does not exist has zeros.
        softmax_scale: None is ``head_dim ** -0.5``.
        causal: query ``i`` sees keys up to ``i + length + new - queries``.
        window_size: ``(left, right)`` keys around that position; None or -1: no limit on a side.
            Of a tensor, as flash-attn's callers have it, both are read.
        softcap: ``score = softcap tanh(score / softcap)``; 0 leaves it out.
        rotary_interleaved: rotate neighbours (``2 i``, ``2 i + 1``), else halves (``i``,
            ``i + rotary_dim / 2``).
        alibi_slopes: float32 ``[heads]`` or ``[batch, heads]``.
        num_splits: into how many parts the kernel cuts the keys; 0 chooses.
        return_softmax_lse: return ``lse`` too.
        sinks: float32 ``[heads]`` (or bfloat16 or float16), one more score of each row, without a
            value.
        rotary_from_leftpad: positions of the rotary embedding count from ``cache_leftpad``, as
            those of left-padded prompts do, not from the cache's first token.
        early: in a captured graph on GPUs from 9.0 on, cached tokens, ``cache_seqlens``,
            ``cache_leftpad`` and tables may be read while the kernel before this one still runs.
            Only where that kernel writes none of them.

    Returns:
        the output, ``[batch, queries, heads, v's head_dim]``, contiguous; with
        ``return_softmax_lse`` also the log of the sum of ``e^score``, float32
        ``[batch, heads, queries]``. Not differentiable.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: a shape is not as above, or arguments do not go together.

    Kernels take bfloat16 and float16 on a GPU and head dimensions that are multiples of 8 up to
    256. On a CPU, :func:`flexops.attention` attends to each sequence. Everything else is plain
    PyTorch, which waits for the GPU.
    """
    seqlens = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    length = -1 if cache_seqlens is None or seqlens is not None else cache_seqlens
    left, right = _window_of(window_size)
    run = _by_kernels if _takes_kernels(q, k_cache, v_cache) else _composed
    out, lse = run(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        seqlens,
        length,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        left,
        0 if causal else right,
        soft_cap("flexops.attention_with_kvcache: softcap", softcap),
        rotary_interleaved,
        _in_float32(alibi_slopes),
        whole("flexops.attention_with_kvcache: num_splits", num_splits),
        _in_float32(sinks),
        rotary_from_leftpad,
        early,
    )
    if k is not None:
        increment_versions([k_cache, v_cache])
    return (out, lse) if return_softmax_lse else out


def _in_float32(of_heads: Tensor | None) -> Tensor | None:
    halves = isinstance(of_heads, Tensor) and of_heads.dtype in FLOATS
    return of_heads.float() if halves else of_heads  # type: ignore[union-attr]


def _window_of(window: Window) -> tuple[int, int]:
    try:
        return window_of(window)
    except ValueError:
        _fail(
            "window_size must be two numbers of keys, left and right, each None or -1 for no limit,"
            f" got {window!r}"
        )
        raise


# ---- checks ----


_NAME = "flexops.attention_with_kvcache"


def _fail(message: str) -> None:
    raise ValueError(f"{_NAME}: {message}")


def check(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, rotary_cos: Any, rotary_sin: Any,
    cache_seqlens: Any, length: int, cache_batch_idx: Any, cache_leftpad: Any, block_table: Any,
    *numbers: Any,
) -> None:  # fmt: skip
    *_, alibi_slopes, num_splits, sinks, _, _ = numbers
    check_tensor(_NAME, "q", q, FLOATS)
    check_shape(_NAME, "q", q, ("batch", "queries", "heads", "head_dim"))
    batch, _, heads, _ = q.shape
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is not None or "cache" in name:
            check_tensor(_NAME, name, x, (q.dtype,), dims=4)
    _check_cache(q, k_cache, v_cache)
    _check_new(q, k_cache, v_cache, k, v)
    _check_rotary(q, k, rotary_cos, rotary_sin)
    for name, x, *shape in (
        ("cache_seqlens", cache_seqlens, batch),
        ("cache_batch_idx", cache_batch_idx, batch),
        ("cache_leftpad", cache_leftpad, batch),
        ("block_table", block_table, batch, "pages"),
    ):
        if x is not None:
            check_tensor(_NAME, name, x, (torch.int32,))
            check_shape(_NAME, name, x, shape)
    if not isinstance(length, int) or length < -1:
        _fail(
            f"cache_seqlens must be a number of tokens, 0 or more, or int32 [batch], got {length!r}"
        )
    if cache_seqlens is None and length < 0 and k is not None:
        _fail("cache_seqlens must be given with k: it says where k is appended")
    if block_table is not None and cache_batch_idx is not None:
        _fail("cache_batch_idx must be None with block_table, which names the pages itself")
    if block_table is not None and k_cache.shape[1] == 0:
        _fail(f"k_cache must have pages of at least one token, got shape {list(k_cache.shape)}")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None:
            check_tensor(_NAME, name, x, (torch.float32,))
            of_batch = name == "alibi_slopes" and x.dim() == 2
            check_shape(_NAME, name, x, (batch, heads) if of_batch else (heads,))
    if num_splits < 0:
        _fail(f"num_splits must be 0 (choose) or more, got {num_splits}")


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.shape[-1] != q.shape[-1]:
        _fail(f"k_cache must have q's head_dim {q.shape[-1]}, got shape {list(k_cache.shape)}")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        _fail(
            f"v_cache must have k_cache's shape {list(k_cache.shape)}, head_dim excepted, got"
            f" {list(v_cache.shape)}"
        )
    heads, key_heads = q.shape[2], k_cache.shape[2]
    if heads and (key_heads == 0 or heads % key_heads):
        _fail(
            f"k_cache must have a number of heads that divides q's {heads}, got shape"
            f" {list(k_cache.shape)}"
        )


def _check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any) -> None:
    if (k is None) != (v is None):
        _fail("k and v must both be given, or neither")
    if k is not None:
        wanted = [q.shape[0], k.shape[1], k_cache.shape[2]]
        check_shape(_NAME, "k", k, [*wanted, k_cache.shape[3]])
        check_shape(_NAME, "v", v, [*wanted, v_cache.shape[3]])


def _check_rotary(q: Tensor, k: Any, cos: Any, sin: Any) -> None:
    if (cos is None) != (sin is None):
        _fail("rotary_cos and rotary_sin must both be given, or neither")
    if cos is None:
        return
    if k is None:
        _fail("rotary_cos must be None without k, which it rotates on its way into the cache")
    check_tensor(_NAME, "rotary_cos", cos, FLOATS)
    check_tensor(_NAME, "rotary_sin", sin, (cos.dtype,))
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dim() != 2 or x.shape != cos.shape or 2 * x.shape[1] > q.shape[-1]:
            _fail(
                f"{name} must have shape [positions, rotary_dim / 2], with rotary_dim at most"
                f" {q.shape[-1]}, got {list(x.shape)}"
            )


# ---- the reference: plain PyTorch ----


def _reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, cache_seqlens: Tensor | None,
    length: int, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None,
    block_table: Tensor | None, scale: float | None, left: int, right: int, softcap: float,
    interleaved: bool, alibi_slopes: Tensor | None, _splits: int, sinks: Tensor | None,
    from_leftpad: bool, _early: bool, *, attend: Callable[..., Any] = attention_reference,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, queries, heads = q.shape[:3]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None:
        lengths = q.new_full((batch,), capacity if length < 0 else length, dtype=torch.int64)
    else:
        lengths = cache_seqlens.long().clamp(min=0)
    new = 0 if k is None else k.shape[1]
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        # Without a mask all queries stand at one position.
        step = 1 if left >= 0 or right >= 0 else 0
        steps = torch.arange(max(queries, new), device=q.device)
        first = lengths[:, None]
        if from_leftpad and cache_leftpad is not None:
            first = first - cache_leftpad[:, None].clamp(min=0)
        of_q, of_k = ((first + one).clamp(min=0) for one in (step * steps[:queries], steps[:new]))
        q = rotated_reference(q, rotary_cos, rotary_sin, of_q, interleaved)
        k = rotated_reference(k, rotary_cos, rotary_sin, of_k, interleaved)
    out = q.new_empty(batch, queries, heads, v_cache.shape[-1])
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    rows = range(batch) if cache_batch_idx is None else cache_batch_idx.tolist()
    begins = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    for b, (row, begin, cached) in enumerate(zip(rows, begins, lengths.tolist(), strict=True)):
        end = min(cached + new, capacity)
        tokens = torch.arange(end, device=q.device)
        if block_table is not None:
            page = k_cache.shape[1]
            pages = block_table[b].long()[tokens // page]
            there = (pages >= 0) & (pages < k_cache.shape[0])
            pages, tokens = torch.where(there, pages, 0), tokens % page
        else:
            tokens = tokens if 0 <= row < k_cache.shape[0] else tokens[:0]
            pages, there = torch.full_like(tokens, row), torch.ones_like(tokens, dtype=torch.bool)
        if k is not None and v is not None and cached < tokens.shape[0]:
            fresh = torch.arange(tokens.shape[0] - cached, device=q.device)[there[cached:]]
            at = pages[cached:][fresh], tokens[cached:][fresh]
            k_cache[at], v_cache[at] = k[b, fresh], v[b, fresh]
        seen = slice(min(max(begin, 0), tokens.shape[0]), None)
        keys, values = (
            torch.where(there[:, None, None], cache[pages, tokens], 0)[seen]
            for cache in (k_cache, v_cache)
        )
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else None
        o = Options(
            window_right=right,
            window_left=left,
            scale=scale_of(q, scale),
            softcap=softcap,
            alibi_slopes=alibi_slopes if slopes is None else slopes,
            sinks=sinks,
        )
        found, sums = attend(q[b : b + 1], keys[None], values[None], *o)
        out[b], lse[b] = found[0], sums[0]
    return out, lse


def _fake(q: Tensor, _k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads = q.shape[:3]
    return (
        q.new_empty(batch, queries, heads, v_cache.shape[-1]),
        q.new_empty(batch, heads, queries, dtype=torch.float32),
    )


define("kvcache_attention_", _reference, _fake, check=check, function="attention_with_kvcache")


def composed(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The same, on a CPU by attention's own kernels."""
    return _reference(q, *rest, attend=attention_reference if q.is_cuda else by_kernels)


define(
    "kvcache_attention_composed_",
    composed,
    _fake,
    check=check,
    function="attention_with_kvcache",
)
_by_kernels = caller(torch.ops.flexops.kvcache_attention_.default)
_composed = caller(torch.ops.flexops.kvcache_attention_composed_.default)


def _takes_kernels(q: Any, *caches: Any) -> bool:
    """Whether kernels take these tensors: a GPU's load 16 bytes at once."""
    if not isinstance(q, Tensor) or not q.is_cuda or declined(q, caches[1]):
        return False
    return all(
        isinstance(x, Tensor)
        and x.dim() == 4
        and x.shape[-1] % 8 == 0
        and x.stride(-1) == 1
        and (x.storage_offset() | x.stride(0) | x.stride(1) | x.stride(2)) % 8 == 0
        for x in caches
    )


def self_check(device: str) -> float:
    """A paged cache with grouped heads, rotary embedding and unequal lengths on random numbers of
    size 1, by whatever kernels calls reach on ``device`` and by the reference.

    For ``flexops doctor``. Returns the largest difference; a 32nd of it on a GPU, whose kernels
    take 16 bits: there results of this size round by 2^-7.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    q, k, v = make(2, 1, 8, 64), make(2, 1, 2, 64), make(2, 1, 2, 64)
    caches = make(12, 64, 2, 64), make(12, 64, 2, 64)
    angle = (torch.rand(400, 32, generator=generator) * 6.3).to(device)
    table = torch.randperm(12, generator=generator).int().view(2, 6).to(device)
    lengths = torch.tensor([100, 333], dtype=torch.int32, device=device)
    options = (angle.cos(), angle.sin(), lengths, -1, None, None, table, None, -1, 0, 0.0, True)
    functions: tuple[Any, ...] = (_by_kernels if device == "cuda" else _composed, _reference)
    results = []
    for function in functions:
        copies = [cache.clone() for cache in caches]
        with torch.no_grad():
            found = function(q, *copies, k, v, *options, None, 0, None, False, False)
        results.append([*found, *copies])
    return difference(*results) / (1 if dtype == torch.float32 else 32)
