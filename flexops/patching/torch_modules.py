"""Replacements of ``forward`` for modules of torch's own that hold others: Sequential,
MultiheadAttention."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_unheard
from ..nn.linears import DTYPES, is_bare, is_plain
from ..ops.scaled_dot_product_attention import scaled_dot_product_attention
from .forwards import activated, plain, replacement

ACTIVATIONS = (nn.GELU, nn.SiLU)


def fusible(first: Any, second: Any) -> bool:
    """Whether the bias of the first is added where the second, an activation, reads it."""
    unchanged = is_unheard(second) and "forward" not in second.__dict__
    return type(second) in ACTIVATIONS and unchanged and is_bare(first) and first.bias is not None


def fused(module: Any) -> list[nn.Module]:
    """A Sequential's activations that come right behind a linear layer with a bias."""
    parts = list(module)
    return [then for part, then in itertools.pairwise(parts) if fusible(part, then)]


@replacement
def sequential(module: Any, x: Any) -> Any:
    """Each after the other; a linear layer's bias together with the gelu or silu behind it."""
    parts = list(module)
    while parts:
        part = parts.pop(0)
        if parts and isinstance(x, Tensor) and x.dtype in DTYPES and fusible(part, parts[0]):
            x = activated(part, getattr(parts.pop(0), "approximate", "silu"), x)
        else:
            x = part(x)
    return x


@replacement
def multihead_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's, if the weights of attention are not requested."""
    usual = (
        not need_weights
        and query.dim() == 3
        and query.dtype in DTYPES
        and (attn_mask is not None or not is_causal)
    )
    if not usual or not is_plain(module.in_proj_weight) or not is_plain(module.out_proj.weight):
        rest = need_weights, attn_mask, average_attn_weights, is_causal
        result: tuple[Tensor, Tensor | None] = plain(
            module, query, key, value, key_padding_mask, *rest
        )
        return result
    q, k, v = _projected(module, query, key, value)
    causal = is_causal and key_padding_mask is None
    mask = None if causal else _allowed(attn_mask, key_padding_mask, q)
    dropout = module.dropout if module.training else 0.0
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
    y = F.linear(y.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return (y if module.batch_first else y.transpose(0, 1)), None


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """``[batch, heads, length, head_dim]`` of each."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key and key is value:
        parts = F.linear(query, weight, bias).chunk(3, -1)
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        parts = tuple(
            F.linear(x, w, b)
            for x, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)
        )
    parts = parts if module.batch_first else tuple(part.transpose(0, 1) for part in parts)
    return [part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in parts]


def _allowed(mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """torch's masks of MultiheadAttention, in which True stands for what takes no part, as those of
    its attention function."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (like.shape[0], -1))
    padding = None if padding is None else padding[:, None, None]
    masks = [each for each in (mask, padding) if each is not None]
    if all(each.dtype == torch.bool for each in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1] if masks else None
        return None if hidden is None else ~hidden
    total = like.new_zeros(())
    for each in masks:
        total = total + (
            like.new_zeros(each.shape).masked_fill(each, float("-inf"))
            if each.dtype == torch.bool
            else each.to(like.dtype)
        )
    return total
