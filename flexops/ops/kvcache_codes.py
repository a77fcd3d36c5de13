"""A key-value cache of 8-bit or 4-bit codes, and attention over it.

Keys are quantized per channel in groups of ``group_size`` tokens, values per token in groups of
``group_size`` columns (or of all, if there are fewer), as in Liu et al., "KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache" (2024). The newest tokens stay in 16 bits. Of a group's
elements, in float32, with ``B = 2**bits - 1``::

    minimum = fp16(lowest);  step = fp16((highest - lowest) / B);  inverse = 1 / step, or 0 for 0
    code = clamp(round((x - minimum) * inverse), 0, B);  value = code * step + minimum

Of ``length`` tokens the first ``coded(length) = max(0, length - residual) // group_size *
group_size`` are codes, the others are in a ring: so lengths on the device alone say where a token
is, and a step that appends one token and quantizes the group that leaves the ring can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._attention_checks import HALVES, Options, scale_of
from ._attention_reference import reference as attention_reference
from ._declared import define
from ._register import caller
from .rope import rotated_reference

_BLOCK = 32
"""Tokens whose values' steps lie together."""
_KEY_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The half-byte of a word that has column i of 8 of a key."""


class CompressedKVCache(NamedTuple):
    """One layer's keys and values. Functions of this module change its tensors in place.

    Attributes:
        k_codes, v_codes: uint8 ``[batch, heads, capacity, columns * bits / 8]``.
        k_steps: float16 ``[batch, heads, capacity / group_size, 2, columns]``: step and minimum.
        v_steps: float16 ``[batch, heads, capacity / 32, groups of columns, 2, 32]``.
        recent_k, recent_v: ``[batch, residual + group_size, heads, columns]``, the ring: token
            ``t`` is at ``t % (residual + group_size)``.
        bits: 8 or 4.
        group_size: 32, 64 or 128.
    """

    k_codes: Tensor
    k_steps: Tensor
    v_codes: Tensor
    v_steps: Tensor
    recent_k: Tensor
    recent_v: Tensor
    bits: int
    group_size: int

    @property
    def residual(self) -> int:
        """Tokens that are never codes."""
        return self.recent_k.shape[1] - self.group_size

    @property
    def capacity(self) -> int:
        """Tokens that it has room for."""
        return self.k_codes.shape[2]

    def coded(self, length: int) -> int:
        """How many of ``length`` tokens are codes."""
        return max(0, length - self.residual) // self.group_size * self.group_size

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(x.nbytes for x in self if isinstance(x, Tensor))


def make_compressed_cache(
    batch: int,
    capacity: int,
    heads: int,
    head_dim: int,
    *,
    bits: int,
    group_size: int = 64,
    residual_length: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> CompressedKVCache:
    """An empty cache for ``capacity`` tokens of each sequence, rounded up to whole groups.

    Args:
        head_dim: columns of keys and of values: a multiple of ``min(group_size, head_dim)`` and of
            8.
        residual_length: at least so many of the newest tokens stay in ``dtype``.
        dtype: float32, bfloat16 or float16.

    Raises:
        ValueError: a number is not as above.
    """
    if bits not in (8, 4):
        raise ValueError(f"flexops: bits of a compressed KV cache must be 8 or 4, got {bits}")
    if group_size not in (32, 64, 128):
        raise ValueError(
            f"flexops: group_size of a compressed KV cache must be 32, 64 or 128, got {group_size}"
        )
    if residual_length < 1 or residual_length % _BLOCK:
        raise ValueError(
            "flexops: residual_length of a compressed KV cache must be a multiple of 32, at least"
            f" 32, got {residual_length}"
        )
    columns = min(group_size, head_dim)
    if head_dim % columns or head_dim % 8:
        raise ValueError(
            f"flexops: head_dim of a compressed KV cache must be a multiple of 8 and of {columns},"
            f" its group of columns, got {head_dim}"
        )
    capacity = -(-capacity // group_size) * group_size

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device=device)

    codes = (heads, capacity, head_dim * bits // 8)
    steps = (heads, capacity // group_size, 2, head_dim)
    of_values = (heads, capacity // _BLOCK, head_dim // columns, 2, _BLOCK)
    ring = (residual_length + group_size, heads, head_dim)
    return CompressedKVCache(
        zeros(*codes),
        zeros(*steps, dtype=torch.float16),
        zeros(*codes),
        zeros(*of_values, dtype=torch.float16),
        zeros(*ring, dtype=dtype),
        zeros(*ring, dtype=dtype),
        bits,
        group_size,
    )


def changed(cache: CompressedKVCache, change: Callable[[Tensor], Tensor]) -> CompressedKVCache:
    """The cache with another tensor in place of each; their first dimension is the batch."""
    codes = (change(cache.k_codes), change(cache.k_steps), change(cache.v_codes))
    rest = (change(cache.v_steps), change(cache.recent_k), change(cache.recent_v))
    return CompressedKVCache(*codes, *rest, cache.bits, cache.group_size)


def append_compressed_(cache: CompressedKVCache, k: Tensor, v: Tensor, length: int) -> None:
    """Append ``k`` and ``v``, ``[batch, new, heads, head_dim]``, as tokens from ``length`` on, and
    quantize the groups that leave the ring.

    Args:
        length: tokens that the cache holds, the same of every sequence.

    Raises:
        ValueError: they do not fit.
    """
    end = length + k.shape[1]
    if end > cache.capacity:
        raise ValueError(
            f"flexops: a compressed KV cache of {cache.capacity} tokens has no room for {end}"
        )
    first, last = cache.coded(length), cache.coded(end)
    pairs = (cache.recent_k, k), (cache.recent_v, v)
    if last > first:
        sources = (
            torch.cat((*_of_ring(ring, first, min(last, length)), x[:, : max(0, last - length)]), 1)
            if first < length
            else x[:, : last - length]
            for ring, x in pairs
        )
        _compress(*sources, *cache[:4], first, *cache[6:])
    kept = max(last, length)
    for ring, x in pairs:
        for slots, tokens in _spans(ring, kept, end):
            ring[:, slots] = x[:, kept - length :][:, tokens]


def slots_of(cache: CompressedKVCache, length: Tensor) -> Tensor:
    """The token of each slot of a ring, int64 ``[residual + group_size]``, behind ``length`` of
    them, int64 ``[1]``; of a slot that stays empty any that is behind."""
    ring = cache.recent_k.shape[1]
    coded = (length - cache.residual).clamp(min=0) // cache.group_size * cache.group_size
    return coded + (torch.arange(ring, device=length.device) - coded) % ring


def fill_compressed_(cache: CompressedKVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """What :func:`append_compressed_` does with the first tokens of ``k`` and ``v``, ``[batch,
    tokens, heads, head_dim]``, and an empty cache, where only the device knows how many they are
    (``slots``: :func:`slots_of`). Behind them there are codes that nothing reads."""
    tokens = k.shape[1]
    coded = cache.coded(tokens)
    if coded:
        _compress(k[:, :coded], v[:, :coded], *cache[:4], 0, *cache[6:])
    slots = slots.clamp(max=tokens - 1)
    cache.recent_k.copy_(k[:, slots])
    cache.recent_v.copy_(v[:, slots])


def _spans(ring: Tensor, first: int, end: int) -> list[tuple[slice, slice]]:
    """Where tokens lie in a ring that has room for them, in one or two pieces: slots, and tokens
    counted from ``first``."""
    size = ring.shape[1]
    slot, count = first % size, end - first
    ahead = min(count, size - slot)
    found = [(slice(slot, slot + ahead), slice(ahead))]
    if count > ahead:
        found.append((slice(count - ahead), slice(ahead, count)))
    return found


def _of_ring(ring: Tensor, first: int, end: int) -> list[Tensor]:
    """Those tokens, in their order, in pieces."""
    return [ring[:, slots] for slots, _ in _spans(ring, first, end)]


def decompress(cache: CompressedKVCache, length: int) -> tuple[Tensor, Tensor]:
    """The keys and values of ``length`` tokens, ``[batch, length, heads, head_dim]``, in the dtype
    of the ring."""
    coded = cache.coded(length)
    parts = _values_of(*cache[:4], cache.bits, coded)
    keys, values = (
        torch.cat((part.to(ring.dtype), *_of_ring(ring, coded, length)), 1)
        for part, ring in zip(parts, (cache.recent_k, cache.recent_v), strict=True)
    )
    return keys, values


def attention_with_compressed_kvcache(
    q: Tensor,
    cache: CompressedKVCache,
    k: Tensor,
    v: Tensor,
    cache_seqlens: int | Tensor,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = False,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    rotary_from_leftpad: bool = False,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """A decode step: append one token of each sequence, attend, and quantize the group that leaves
    the ring. It can be captured, as :func:`flexops.attention_with_kvcache`, whose arguments it has.

    Args:
        q: ``[batch, queries, heads, head_dim]``; they see everything, within the window.
        k, v: ``[batch, 1, key heads, head_dim]``.
        cache_seqlens: tokens before this call: a number, or int32 ``[batch]``.

    Returns:
        the output, ``[batch, queries, heads, head_dim]``, and float32 ``lse``, ``[batch, heads,
        queries]``.

    Kernels take bfloat16 and float16 on a GPU, and head dimensions of 64, 128 and 256; everything
    else is plain PyTorch, which dequantizes the cache and waits for the GPU.
    """
    seqlens = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    length = -1 if seqlens is not None else int(cache_seqlens)
    of_heads = [x.float() if isinstance(x, Tensor) else None for x in (alibi_slopes, sinks)]
    run = _by_kernels if _takes_kernels(q) else _composed
    found: tuple[Tensor, Tensor] = run(
        q, k, v, *cache[:6], rotary_cos, rotary_sin, seqlens, length, cache_leftpad, cache.bits,
        cache.group_size, softmax_scale, *window_size, float(softcap), rotary_interleaved,
        of_heads[0], num_splits, of_heads[1], rotary_from_leftpad, early,
    )  # fmt: skip
    return found


def _takes_kernels(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALVES and q.shape[-1] in (64, 128, 256)


# ---- the references: plain PyTorch ----


def _quantized(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and steps and minima, of whole groups along ``dim``."""
    lowest, highest = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    most = 2**bits - 1
    # dividing by a plain number, torch multiplies by its reciprocal on a GPU
    step = ((highest - lowest) / torch.full_like(lowest, most)).half()
    minimum = lowest.half()
    wide = step.float()
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    codes = ((x - minimum.float()) * inverse).round().clamp(0, most).to(torch.uint8)
    return codes, step.squeeze(dim), minimum.squeeze(dim)


def _packed(codes: Tensor, bits: int, key: bool) -> Tensor:
    if bits == 8:
        return codes
    eight = codes.unflatten(-1, (-1, 8))
    order = [_KEY_ORDER.index(i) for i in range(8)] if key else range(8)
    halves = [eight[..., i] for i in order]
    return torch.stack([halves[i] | halves[i + 1] << 4 for i in range(0, 8, 2)], -1).flatten(-2)


def _unpacked(codes: Tensor, bits: int, key: bool) -> Tensor:
    if bits == 8:
        return codes.float()
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).unflatten(-1, (-1, 8))
    order = _KEY_ORDER if key else tuple(range(8))
    return torch.stack([halves[..., order[i]] for i in range(8)], -1).flatten(-2).float()


def _compress_reference(
    k: Tensor, v: Tensor, k_codes: Tensor, k_steps: Tensor, v_codes: Tensor, v_steps: Tensor,
    first: int, bits: int, group_size: int,
) -> None:  # fmt: skip
    k, v = (x.float().transpose(1, 2) for x in (k, v))
    tokens = slice(first, first + k.shape[2])
    codes, step, minimum = _quantized(k.unflatten(2, (-1, group_size)), 3, bits)
    k_codes[:, :, tokens] = _packed(codes.flatten(2, 3), bits, True)
    groups = slice(first // group_size, tokens.stop // group_size)
    k_steps[:, :, groups] = torch.stack((step, minimum), 3)
    columns = min(group_size, v.shape[-1])
    codes, step, minimum = _quantized(v.unflatten(3, (-1, columns)), 4, bits)
    v_codes[:, :, tokens] = _packed(codes.flatten(3), bits, False)
    both = torch.stack((step, minimum), -1).unflatten(2, (-1, _BLOCK))  # b h blocks 32 g 2
    blocks = slice(first // _BLOCK, tokens.stop // _BLOCK)
    v_steps[:, :, blocks] = both.permute(0, 1, 2, 4, 5, 3)


def _values_of(
    k_codes: Tensor, k_steps: Tensor, v_codes: Tensor, v_steps: Tensor, bits: int, length: int
) -> tuple[Tensor, Tensor]:
    """Of the first tokens, float32 ``[batch, length, heads, head_dim]``; ``length``: whole
    groups."""
    size = k_codes.shape[2] // k_steps.shape[2]
    codes = _unpacked(k_codes[:, :, :length], bits, True).unflatten(2, (-1, size))
    steps = k_steps[:, :, : length // size].float()
    keys = (codes * steps[:, :, :, :1] + steps[:, :, :, 1:]).flatten(2, 3)
    codes = _unpacked(v_codes[:, :, :length], bits, False)
    steps = v_steps[:, :, : length // _BLOCK].float().permute(0, 1, 2, 5, 3, 4).flatten(2, 3)
    codes = codes.unflatten(3, (steps.shape[3], -1))
    values = (codes * steps[..., :1] + steps[..., 1:]).flatten(3)
    return keys.transpose(1, 2), values.transpose(1, 2)


def _attend_reference(
    q: Tensor, k: Tensor, v: Tensor, k_codes: Tensor, k_steps: Tensor, v_codes: Tensor,
    v_steps: Tensor, recent_k: Tensor, recent_v: Tensor, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, cache_seqlens: Tensor | None, length: int,
    cache_leftpad: Tensor | None, bits: int, group_size: int, scale: float | None, left: int,
    right: int, softcap: float, interleaved: bool, alibi_slopes: Tensor | None,
    num_splits: int,  # noqa: ARG001
    sinks: Tensor | None, from_leftpad: bool,
    early: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, queries, heads = q.shape[:3]
    if cache_seqlens is None:
        lengths = q.new_full((batch,), length, dtype=torch.int64)
    else:
        lengths = cache_seqlens.long().clamp(min=0)
    if rotary_cos is not None and rotary_sin is not None:
        steps = torch.arange(queries, device=q.device) * (left >= 0 or right >= 0)
        first = lengths[:, None]
        if from_leftpad and cache_leftpad is not None:
            first = (first - cache_leftpad[:, None].clamp(min=0)).clamp(min=0)
        q = rotated_reference(q, rotary_cos, rotary_sin, first + steps, interleaved)
        k = rotated_reference(k, rotary_cos, rotary_sin, first, interleaved)
    out = q.new_empty(batch, queries, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    begins = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    size = recent_k.shape[1]
    for b, (begin, cached) in enumerate(zip(begins, lengths.tolist(), strict=True)):
        end = min(cached + 1, k_codes.shape[2])
        coded, leaves = (max(0, n - size + group_size) // group_size * group_size
                         for n in (min(cached, end), end))  # fmt: skip
        if end > cached:
            recent_k[b, cached % size], recent_v[b, cached % size] = k[b, 0], v[b, 0]
        slots = torch.arange(coded, end, device=q.device) % size
        one = slice(b, b + 1)
        codes = (k_codes[one], k_steps[one], v_codes[one], v_steps[one])
        parts = _values_of(*codes, bits, coded)
        keys, values = (
            torch.cat((x, ring[one, slots].float()), 1)[:, min(max(begin, 0), end) :]
            for x, ring in zip(parts, (recent_k, recent_v), strict=True)
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
        found, sums = attention_reference(q[one].float(), keys, values, *o)
        out[b], lse[b] = found[0].to(out.dtype), sums[0]
        if leaves > coded:
            slots = torch.arange(coded, leaves, device=q.device) % size
            _compress_reference(
                recent_k[one, slots], recent_v[one, slots], *codes, coded, bits, group_size
            )
    return out, lse


def _attend_fake(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32
    )


def _compress_fake(*_: Any, **__: Any) -> None:
    return None


for _name, _reference, _fake in (
    ("codes_attention_", _attend_reference, _attend_fake),
    ("compress_", _compress_reference, _compress_fake),
):
    for _prefix in ("kvcache_", "kvcache_composed_"):
        define(_prefix + _name, _reference, _fake, function="attention_with_compressed_kvcache")
_by_kernels = caller(torch.ops.flexops.kvcache_codes_attention_.default)
_composed = caller(torch.ops.flexops.kvcache_composed_codes_attention_.default)


def _compress(k: Tensor, v: Tensor, *rest: Any) -> None:
    ops = torch.ops.flexops
    run = ops.kvcache_compress_ if _takes_kernels(k) else ops.kvcache_composed_compress_
    run(k, v, *rest)
