"""Attention for continuous batching in transformers (``model.generate_batch``), registered as
``paged|flexops``.

A batch is one row of packed tokens. Where some request has several new tokens, transformers gathers
keys by its indices, and the kernels for packed sequences attend. Where each has one,
:func:`flexops.attention_with_kvcache` appends to and reads the cache by block tables.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..errors import PatchError
from ..ops.attention import attention as _packed
from ..ops.kvcache_attention import attention_with_kvcache
from .sources import keywords_read

NAME = "paged|flexops"
_OURS = ("flexops", NAME)


def register_paged() -> None:
    """Make transformers know ``paged|flexops``; more than once does no harm."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    _prepare_batches()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001
    *,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: Any = 0,
    block_table: Tensor | None = None,
    read_index: Any = None,
    write_index: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,  # noqa: ARG001
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for its ``PagedAttentionCache``.

    Args:
        module: the attention module.
        query: ``[1, heads, tokens, head_dim]``; ``key`` and ``value`` likewise.
        cache: the cache; the arguments behind it are as transformers defines them, but
            ``sliding_window``, which is the cache's.
        others: without effect.

    Returns:
        ``[tokens, heads, head_dim]``, and None.

    Raises:
        PatchError: the call is not one of continuous batching, or has a keyword that changes
            results and is not one of these.
    """
    if cache is None or cu_seq_lens_q is None:
        raise PatchError(
            f"{NAME} was called without a paged cache",
            found=f"{type(module).__name__} outside of model.generate_batch",
            required="model.generate_batch, which prepares the cache",
            fix='model.set_attn_implementation("flexops")',
        )
    _check_keywords(module, others)
    # The cache keeps and gathers keys by it. A module may have one that it does not use.
    width = cache.sliding_windows[module.layer_idx]
    width = None if width == 1 else width
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if width else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    window = (width - 1, 0) if width else (-1, -1)
    options: dict[str, Any] = {"causal": True, "softcap": softcap or 0.0, "sinks": s_aux}
    if block_table is not None:
        options |= {"softmax_scale": scaling, "window_size": window}
        return _by_tables(
            module, (query, key, value), cache, cu_seq_lens_k, block_table, options
        ), None
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    result = _packed(
        query[0].transpose(0, 1),
        keys,
        values,
        scale=scaling,
        window=window,
        cu_seqlens_q=cu_seq_lens_q.int(),
        cu_seqlens_k=cu_seq_lens_k.int(),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **options,
    )
    assert isinstance(result, Tensor)
    return result, None


def _check_keywords(module: Any, others: dict[str, Any]) -> None:
    if read := keywords_read(module, others):
        raise PatchError(
            f"{NAME} does not support a keyword of {type(module).__name__}",
            found=", ".join(read),
            required="keywords that do not change attention",
            fix='model.set_attn_implementation("sdpa")',
        )


def gathered(
    module: Any, new: tuple[Tensor, ...], named: dict[str, Any], window: int | None, **options: Any
) -> Tensor:
    """Attention of continuous batching from transformers 5.23 on: the model has updated the cache,
    and ``new``, its query, key and value, has all keys of each sequence."""
    _check_keywords(module, named)
    kinds = getattr(module.config, "layer_types", None) or {}
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        window = None  # a module may have one that it does not use
    result = _packed(
        *(x[0].transpose(0, 1) for x in new),
        causal=True,
        window=(window - 1, 0) if window else (-1, -1),
        cu_seqlens_q=named["cu_seq_lens_q"].int(),
        cu_seqlens_k=named["cu_seq_lens_k"].int(),
        max_seqlen_q=named["max_length_q"],
        max_seqlen_k=named["max_length_k"],
        **options,
    )
    assert isinstance(result, Tensor)
    return result


def _by_tables(
    module: Any,
    new: tuple[Tensor, ...],
    cache: Any,
    cu_seq_lens_k: Tensor,
    block_table: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """One new token of each sequence: ``new`` is its query, key and value."""
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    query, key, value = (x.permute(2, 0, 1, 3) for x in new)
    sequences = query.shape[0]
    keys, values = (
        x[layer].view(-1, cache.block_size, *x[layer].shape[-2:])
        for x in (cache.key_cache, cache.value_cache)
    )
    lengths = cu_seq_lens_k[1 : sequences + 1] - cu_seq_lens_k[:sequences] - 1
    result = attention_with_kvcache(
        query,
        keys,
        values,
        key,
        value,
        cache_seqlens=lengths.int(),
        block_table=block_table[group],
        **options,
    )
    assert isinstance(result, Tensor)
    return result[:, 0]


def _prepare_batches() -> None:
    """Let continuous batching prepare for our attention what it prepares for flash-attn: lengths
    and block tables, and no masks. It asks for flash-attn by name."""
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    for module in (cache, continuous_api, initialization):
        _wrap(module, "is_flash_attention_requested", _is_requested)
    _wrap(initialization, "ensure_decode_fast_path_is_available", _has_block_tables)


def _wrap(module: Any, name: str, wrapper: Any) -> None:
    function = getattr(module, name, None)
    if function is not None and getattr(function, "func", None) is not wrapper:
        setattr(module, name, functools.partial(wrapper, function))


def _is_requested(
    function: Any,
    config: Any = None,
    requested_attention_implementation: str | None = None,
    version: Any = None,
) -> bool:
    name = requested_attention_implementation or getattr(config, "_attn_implementation", None)
    if name in _OURS:
        return version is None
    return bool(function(config, requested_attention_implementation, version))


def _has_block_tables(function: Any, config: Any, *given: Any, **named: Any) -> None:
    if config._attn_implementation != NAME:
        function(config, *given, **named)
