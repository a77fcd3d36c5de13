"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..op_builder import loader
from ._attention_checks import FLOATS, autocast, declined
from ._register import has_native
from .attention import by_kernels


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
    """``torch.nn.functional.scaled_dot_product_attention``, by :func:`flexops.attention` where that has kernels, else by torch's own.

    Args:
        query: ``[batch, heads, length, head_dim]``, as ``key`` and ``value``; transposed views are not copied.
        key, value: see :func:`flexops.attention`.
        attn_mask: as ``bias`` of :func:`flexops.attention`.
        dropout_p: anything but 0 is torch's.
        is_causal: query ``i`` sees keys up to ``i`` (aligned top left, which is torch's way, and not that of :func:`flexops.attention`).
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
    query, key, value = autocast(query, key, value)
    right = -1
    if is_causal:
        queries, keys = query.shape[2], key.shape[2]
        if queries < keys:
            key, value = key[:, :, :queries], value[:, :, :queries]
        right = max(queries - keys, 0)
    tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask
    out: Tensor = by_kernels(*tensors, None, None, None, None, 0, 0, scale, -1, right, 0.0, torch.are_deterministic_algorithms_enabled(), 0)[0]
    return out.transpose(1, 2)


def _torchs(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool) -> str:
    """Why torch's own attention is called; "" if it is not, "meant" if that is nothing to report."""
    of_q, of_k, of_v, dtype = query.shape, key.shape, value.shape, query.dtype
    if dropout_p != 0.0 or not len(of_q) == len(of_k) == len(of_v) == 4 or (mask is not None and is_causal):
        return "meant"  # torch's to compute, or to refuse
    (batch, heads, _, columns), (batch_k, key_heads, keys, columns_k) = of_q, of_k
    if heads != key_heads and (not enable_gqa or key_heads == 0 or heads % key_heads):
        return "meant"
    if dtype != key.dtype or dtype != value.dtype or dtype not in FLOATS:
        return "meant"
    if batch != batch_k or columns != columns_k or batch_k != of_v[0] or key_heads != of_v[1] or keys != of_v[2]:
        return "meant"
    if mask is not None and (mask.dtype not in (torch.bool, dtype) or (mask.requires_grad and torch.is_grad_enabled())):
        return "meant"
    if why := declined(query, value):
        return why
    device = query.device.type
    if torch.compiler.is_compiling() or device == "meta" or has_native("attention", device):
        return ""
    return "meant"  # the family's own status says why
