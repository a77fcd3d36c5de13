"""attention_with_kvcache: one token of each sequence, appended, rotated and attended."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import flexops

from .case import Case, Functions, Setup, contenders, forward_and_backward

FAMILY = "kvcache_attention"
HEADS, KEY_HEADS = 32, 8


def kvcache_attention(setup: Setup) -> Iterator[Case]:
    functions: Functions = contenders(setup, _ours, _torchs)
    for batch, length, width in ((1, 8192, 128), (32, 8192, 128), (16, 4096, 64)):
        length = setup.rows(length)
        q = setup.randn(batch, 1, HEADS, width)
        caches = [setup.randn(batch, length, KEY_HEADS, width) for _ in range(2)]
        yield from forward_and_backward(
            FAMILY,
            "attention_with_kvcache",
            f"attention_with_kvcache bf16 {batch}x{length}, {HEADS}/{KEY_HEADS} heads of {width}",
            functions,
            (q, *caches),
            (sum(x.nbytes for x in caches) + 2 * q.nbytes, "reads the cache"),
            None,
        )


def _ours(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    length, heads = k_cache.shape[1:3]
    new = q[:, :, :heads]
    found = flexops.attention_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=length - 1)
    assert isinstance(found, Tensor)
    return found


def _torchs(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    length, heads = k_cache.shape[1:3]
    with torch.no_grad():
        for cache in (k_cache, v_cache):
            cache[:, length - 1 : length].copy_(q[:, :, :heads])
    q, k, v = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
