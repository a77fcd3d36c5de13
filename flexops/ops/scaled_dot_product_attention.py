"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import compiler, is_compiling
from ._attention_checks import FLOATS, autocast, declined, is_ragged, padded, scale_of
from ._register import has_native
from .attention import by_kernels, usual_options

_of_torch = torch.nn.functional.scaled_dot_product_attention
"""Bound at import: a program may assign the function below to torch's name."""


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
    """``torch.nn.functional.scaled_dot_product_attention``, by :func:`flexops.attention` where that
    has kernels, else by torch's own.

    Args:
        query: ``[batch, heads, length, head_dim]``, as ``key`` and ``value``; transposed views are
            not copied.
        key, value: see :func:`flexops.attention`.
        attn_mask: as ``bias`` of :func:`flexops.attention`.
        dropout_p: anything but 0 is torch's.
        is_causal: query ``i`` sees keys up to ``i`` (aligned top left, which is torch's way, and
            not that of :func:`flexops.attention`).
        scale: None is ``head_dim ** -0.5``.
        enable_gqa: whether ``key`` and ``value`` may have fewer heads.

    Returns:
        ``[batch, heads, length, head_dim]``, a transposed view as torch's flash backend gives.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        _fail_without_tensors(query=query, key=key, value=value)  # type: ignore[unreachable]
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        _fail_without_tensors(attn_mask=attn_mask)  # type: ignore[unreachable]
    if why := _torchs(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        if not torch.compiler.is_compiling() and why != "meant":
            from ..build.load import loader

            loader.decline(
                "attention", query.device.type, f"{why}: torch's scaled_dot_product_attention"
            )
        arguments: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
        arguments["scale"] = scale
        return _of_torch(query, key, value, attn_mask, dropout_p, is_causal, **arguments)
    query, key, value = autocast(query, key, value)
    right = -1
    if is_causal:
        queries, keys = query.shape[2], key.shape[2]
        if queries < keys:
            key, value = key[:, :, :queries], value[:, :, :queries]
        right = max(queries - keys, 0)
    columns = value.shape[-1]
    if ragged := is_ragged(query, value):
        scale = scale_of(query, scale)
        query, key, value = padded(query, key, value)
    out: Tensor = by_kernels(
        query,
        key,
        value,
        *usual_options(
            True, right, -1, scale, torch.are_deterministic_algorithms_enabled(), attn_mask
        ),
    )[0]
    return out[..., :columns] if ragged else out


def _fail_without_tensors(**arguments: Any) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(
                f"flexops.scaled_dot_product_attention: {name} must be a tensor, got"
                f" {type(x).__name__}"
            )


def _torchs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """Why torch's own attention is called; "" if it is not, "meant" if that is nothing to
    report."""
    of_q, of_k, of_v, dtype = query.shape, key.shape, value.shape, query.dtype
    if (
        dropout_p != 0.0
        or len(of_q) != 4
        or (mask is not None and is_causal)
        or not (of_q == of_k == of_v or _go_together(of_q, of_k, of_v, enable_gqa))
    ):
        return "meant"  # torch's to compute, or to reject
    if dtype != key.dtype or dtype != value.dtype or dtype not in FLOATS:
        return "meant"
    if mask is not None and (
        mask.dtype not in (torch.bool, dtype) or (mask.requires_grad and torch.is_grad_enabled())
    ):
        return "meant"
    if why := declined(query, value):
        return why
    device = "cuda" if query.is_cuda else "cpu" if query.is_cpu else query.device.type
    if (
        is_compiling()
        or compiler._is_compiling_flag
        or device == "meta"
        or has_native("attention", device)
    ):
        return ""
    return "meant"  # the family's own status says why


def _go_together(of_q: torch.Size, of_k: torch.Size, of_v: torch.Size, enable_gqa: bool) -> bool:
    """Whether these are shapes of four dimensions, not all of them the same, that kernels take."""
    if not len(of_k) == len(of_v) == 4:
        return False
    (batch, heads, _, columns), (batch_k, key_heads, _, columns_k) = of_q, of_k
    grouped = enable_gqa and key_heads > 0 and heads % key_heads == 0
    return (
        batch == batch_k
        and columns == columns_k
        and of_k[:3] == of_v[:3]
        and (heads == key_heads or grouped)
    )
