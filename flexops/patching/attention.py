"""Attention for transformers, registered as ``attn_implementation="flexops"``: causality and
windows are known to it, and no mask of ``length**2`` is made for a batch without padding, compiled
or not."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import remove_pre_hook
from ..build.load import loader
from ..errors import PatchError
from ..generation import paged
from ..generation.model import register as register_cache
from ..generation.names import CACHES
from ..generation.sources import (
    code_of,
    eager_of,
    hands_cache_on,
    hands_mask_on,
    keywords_read,
    only_makes_masks,
)
from ..generation.state import CACHE_LAYER, nothing_hidden, take_rotary
from ..ops import attention as _ops
from ..ops import scaled_dot_product_attention as _drop_in
from ..ops._attention_checks import FLOATS, declined
from ..report import Row
from .probe import (
    LENGTH,
    WIDTH,
    bare,
    difference,
    foreign,
    is_transformers,
    once,
    own_class,
)

NAME = "flexops"
PACKED = "flexops_flash"
"""For towers whose attention passes the starts of packed pictures to what has "flash" in its name,
and calls anything else once for each."""


def register_attention() -> None:
    """Make transformers know ``attn_implementation="flexops"``, and ``cache_implementation``, which
    a saved generation config may name; more than once does no harm."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for name, function in ((NAME, attention), (PACKED, packed_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    paged.register_paged()
    register_cache()


def _has_kernels(device: torch.device) -> bool:
    """Whether there are kernels of ours, which pass over what lies outside of a window; torch's
    need a mask for it."""
    return device.type == "cuda" and loader.ensure("attention", "cuda")


WINDOW_KEYWORD = frozenset(
    (
        "afmoe", "cohere2", "cohere2_moe", "cwm", "exaone4", "exaone_moe", "gemma2", "gemma3",
        "gemma4", "gemma4_unified", "gpt_oss", "granite_swa", "granitemoe_swa", "laguna",
        "mellum", "mimo_v2_flash", "ministral", "ministral3", "mistral", "mixtral",
        "modernbert_decoder", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
        "starcoder2", "vaultgemma",
    )
)  # fmt: skip
"""Folders of transformers' models whose attention passes its window as ``sliding_window`` and the
mask on as it is. They need no mask for a window; other models get one."""

_EAGER_MASKS = frozenset(
    (
        "bigbird_pegasus", "decision_transformer", "deepseek_v4", "informer", "nllb_moe",
        "pegasus_x", "videoprism",
    )
)  # fmt: skip
"""Folders of models that always need the mask of eager attention: DeepSeek V4 extends it by numbers
of its own, the others' decoders do not say that they are causal."""


def _folder(config: Any) -> str:
    """The folder in ``transformers.models`` that a config is from; "" for another library's."""
    path = type(config).__module__.split(".")
    return path[2] if path[:2] == ["transformers", "models"] else ""


def _window(config: Any) -> Any:
    """The size of a model's window; None if it has none, or several."""
    try:
        return getattr(config, "sliding_window", None)
    except ValueError:  # layers with different ones
        return None


def passes_window(config: Any, size: int) -> bool:
    """Whether attention receives the window of this size. A chunk has a size, too."""
    is_window = size == _window(config)
    has_chunks = getattr(config, "attention_chunk_size", None) is not None
    return is_window and not has_chunks and _folder(config) in WINDOW_KEYWORD


def hide_nothing(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of the base model: without mask, positions and cache there are neither
    padding nor packed sequences."""
    if len(args) > 1 or any(
        kwargs.get(name) is not None
        for name in ("attention_mask", "position_ids", "encoder_hidden_states", *CACHES)
    ):
        return None
    named = map(kwargs.get, ("input_ids", "inputs_embeds", "pixel_values"))
    inputs: Any = next((x for x in (*args, *named) if x is not None), None)
    if inputs is None or module.config._attn_implementation != NAME:
        return None
    window = _window(module.config)
    if window is not None and inputs.shape[1] > window and not _has_kernels(inputs.device):
        return None
    return args, {**kwargs, "attention_mask": nothing_hidden(inputs)}


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    *, local_size: int | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """None where :func:`attention` supports the pattern itself, else what transformers makes for
    torch's attention (True where a key takes part). ``local_size`` is a window's size,
    or a chunk's."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    config = kwargs.get("config")
    whole = (
        kwargs.get("attention_mask") is None
        and kwargs.get("allow_is_causal_skip", True)
        and isinstance(q_offset, int)
        and q_offset == 0
        and q_length == kv_length
    )
    passed = whole and local_size is not None and passes_window(config, local_size)
    if passed and _has_kernels(torch.device(kwargs.get("device", "cpu"))):
        return None
    make = eager_mask if _folder(config) in _EAGER_MASKS else sdpa_mask
    made: Tensor | None = make(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, local_size=local_size, **kwargs,
    )  # fmt: skip
    return made


# ---- the attention function --------------------------------------------------------------------

REJECTED = ("block_indices", "indices")
"""The keys that a model has selected itself. Its eager attention has them in the mask, which the
model changes only if its implementation is called "eager" or "sdpa"."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function.

    Args:
        module: the attention module.
        query: ``[batch, heads, length, head_dim]``; ``key`` and ``value`` may have fewer heads.
        attention_mask: of :func:`mask` or :func:`nothing_hidden`, or one of transformers' own.
        dropout, scaling, sliding_window, softcap, is_causal: as transformers defines them.
        s_aux: attention sinks, ``[heads]``.
        others: computed by the model's own eager attention where that reads them, else ignored
            as by transformers' own ``sdpa``: all keywords of a model's call arrive here.

    Returns:
        ``[batch, length, heads, head_dim]``, and None. With ``output_attentions=True`` the
        weights, ``[batch, heads, length, keys]``: then transformers' code computes both.

    Raises:
        PatchError: the model selects keys itself, or its class has no eager attention where
            that is needed.
    """
    layer = getattr(key, CACHE_LAYER, None)
    if layer is not None:  # a decode step, which appends to a cache and attends to it
        found: Tensor = layer.attend(
            query, key, value, scale=scaling, window=sliding_window, softcap=softcap or 0.0,
            sinks=s_aux, rotary=take_rotary(),
        )  # fmt: skip
        return found, None
    if others.get("write_index") is not None:
        options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
        new = query, key, value
        return paged.gathered(module, new, others, sliding_window, **options)[None], None
    causal = (
        is_causal if is_causal is not None else getattr(module, "is_causal", True)
    ) and query.shape[2] > 1
    if attention_mask is None:
        passed = _folder(getattr(module, "config", None)) in WINDOW_KEYWORD
        sliding_window = sliding_window if passed else None
    elif attention_mask.shape[0] == 0:  # see nothing_hidden
        attention_mask = None
    if attention_mask is not None:
        causal, sliding_window = False, None  # they are in the mask
    if sliding_window is not None and (not causal or sliding_window >= query.shape[2]):
        sliding_window = None
    pattern = attention_mask, causal, sliding_window
    special = softcap is not None or sliding_window is not None or s_aux is not None
    why = _needs_transformers(module, others)
    if special and (dropout or query.dtype not in FLOATS):
        why = why or "meant"
    if why:
        if why != "meant" and not torch.compiler.is_compiling():
            loader.decline("attention", query.device.type, why)
        given = {"softcap": softcap, "s_aux": s_aux, **others}
        given = {name: x for name, x in given.items() if x is not None}
        return _by_transformers(module, query, key, value, pattern, dropout, scaling, given)
    # the first part of an empty cache of a fixed length
    if causal and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if not special:
        return _drop_in.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal,
            scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2).contiguous(), None  # fmt: skip
    result = _ops.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        scale=scaling,
        bias=attention_mask,
        softcap=softcap or 0.0,
        window=(sliding_window - 1, 0) if sliding_window is not None else None,
        sinks=s_aux,
    )
    assert isinstance(result, Tensor)
    return result, None


_USUAL = ("dropout", "scaling", "is_causal")


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attention` of sequences one behind the other, without padding: a batch of one.
    ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are where each begins, and the end."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return attention(module, query, key, value, attention_mask, **options)
    others = {name: x for name, x in options.items() if name not in _USUAL}
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    usual = not options.get("dropout") and query.dtype in FLOATS and not declined(query, value)
    if usual and not _needs_transformers(module, others) and _has_kernels(query.device):
        result = _ops.attention(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            causal=causal,
            scale=options.get("scaling"),
            cu_seqlens_q=cu_seq_lens_q.int(),
            cu_seqlens_k=cu_seq_lens_k.int(),
            max_seqlen_q=max_length_q,
            max_seqlen_k=max_length_k,
        )
        assert isinstance(result, Tensor)
        return result[None], None
    of_q, of_k = (starts.diff().tolist() for starts in (cu_seq_lens_q, cu_seq_lens_k))
    parts = zip(query.split(of_q, 2), key.split(of_k, 2), value.split(of_k, 2), strict=True)
    return torch.cat([attention(module, *one, None, **options)[0] for one in parts], 1), None


def _needs_transformers(module: Any, others: dict[str, Any]) -> str:
    """Why transformers' code has to compute; "" if it need not, "meant" if it was asked for."""
    name = type(module).__name__
    rejected = [one for one in REJECTED if others.get(one) is not None]
    if rejected:
        raise PatchError(
            f"flexops' attention does not support the keys that {name} selects itself",
            found=f"{', '.join(rejected)} among its arguments",
            required="a model without them",
            fix='model.set_attn_implementation("eager")',
        )
    read = keywords_read(module, others)
    own = sorted({*read} - {"output_attentions", "position_bias"})
    if own:
        return f"{name} was called with {', '.join(own)}: transformers' eager attention"
    return "meant" if read else ""


def _by_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor,
    pattern: tuple[Tensor | None, bool, int | None],
    dropout: float, scaling: float | None, keywords: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' function for torch's attention if that has all of this, else the eager one."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    hidden = _as_numbers(*pattern, query, key)
    found: tuple[Tensor, Tensor | None]
    if keywords_read(module, keywords) == ["position_bias"]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found = sdpa_attention_forward(
            module, query, key, value, hidden, dropout=dropout, scaling=scaling, **keywords
        )
        return found
    eager = eager_of(type(module))
    if eager is None:
        raise PatchError(
            f"flexops leaves this call to the eager attention of {type(module).__name__}",
            found="no eager_attention_forward in its forward",
            required="a class of transformers, or a call without weights and dropout",
            fix='model.set_attn_implementation("eager")',
        )
    found = eager(module, query, key, value, hidden, scaling=scaling, dropout=dropout, **keywords)
    return found


def _as_numbers(
    mask: Tensor | None, causal: bool, window: int | None, query: Tensor, key: Tensor
) -> Tensor:
    """The mask that eager attention adds to its scores."""
    if mask is None:
        i, j = (torch.arange(x.shape[2], device=query.device) for x in (query, key))
        distance = i[:, None] - j
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        mask = mask[None, None] if window is None else (mask & (distance < window))[None, None]
    if mask.dtype != torch.bool:
        return mask
    least = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, least)


# ---- switching a model over ----------------------------------------------------------------------

_BEFORE = "_flexops_attention_before"
_REPLACEABLE = ("sdpa", "eager", NAME, PACKED)


def switch(module: nn.Module, reason: str) -> Row | None:
    """Have one of transformers' base models use :func:`attention`; None if it is none that has
    attention of its own. ``reason`` keeps it from that."""
    model: Any = module
    part = _attention_of(model)
    if part is None or (model.config._attn_implementation == PACKED and not is_switched(model)):
        return None  # or the model around it, which shares its config, has it
    cls = type(part)
    reason = reason or _refusal(model, part)
    if not reason:
        kind: Any = type(model)
        packs = _packs(model)
        register_attention()
        if not is_switched(model):
            model.__dict__[_BEFORE] = model.config._attn_implementation
            if packs:  # other models are made of the config, and their classes reject the name
                model.__dict__[_BEFORE] = model.config
                _share(model, copy.copy(model.config))
            windows = _folder(model.config) in WINDOW_KEYWORD
            if (
                only_makes_masks(kind, windows)
                and all(
                    hands_mask_on(type(one), tuple(one._modules))  # type: ignore[arg-type]
                    for one in [*model.modules()][1:]
                )
            ):
                model.register_forward_pre_hook(hide_nothing, with_kwargs=True)
        model.config._attn_implementation_internal = PACKED if packs else NAME
    return Row(
        cls.__name__,
        sum(type(one) is cls for one in module.modules()),
        "attention",
        not reason,
        reason,
    )


def is_switched(model: Any) -> bool:
    return _BEFORE in getattr(model, "__dict__", ())


def switch_back(model: Any) -> bool:
    before = model.__dict__.pop(_BEFORE, None)
    if before is None:
        return False
    if not isinstance(before, str):
        _share(model, before)
    elif model.config._attn_implementation == NAME:  # nothing was selected since
        model.config._attn_implementation_internal = before
    remove_pre_hook(model, hide_nothing)
    return True


def _share(model: Any, config: Any) -> None:
    """Give a config to a model and those of its parts that have the model's."""
    present = model.config
    for part in model.modules():
        if vars(part).get("config") is present:
            part.config = config


def _attention_of(model: Any) -> Any:
    """A base model's first attention module: one whose code asks transformers' interface which
    function to call."""
    if not hasattr(getattr(model, "config", None), "_attn_implementation") or id(
        getattr(model, "base_model", None)
    ) != id(model):
        return None
    return next((part for part in model.modules() if _is_attention_of(part, model)), None)


def _is_attention_of(part: Any, model: Any) -> bool:
    """Whether it looks its function up in the model's config: a wrapper's models have their own."""
    return getattr(part, "config", None) is model.config and eager_of(type(part)) is not None


def _packs(model: Any) -> bool:
    """Whether all of a model's attention passes the starts of packed sequences."""
    parts = {own_class(one) for one in model.modules() if _is_attention_of(one, model)}
    given = (x.arg for cls in parts for x in ast.walk(code_of(cls)) if isinstance(x, ast.keyword))
    return [*given].count("cu_seq_lens_q") == len(parts)


def changes_cache(model: Any) -> str:
    """The class of a base model whose attention gets something else than what it has appended to
    the cache, or a mask of its own; "" if there is none."""
    parts: list[Any] = [type(one) for one in model.modules() if _is_attention_of(one, model)]
    return next((cls.__name__ for cls in parts if not hands_cache_on(cls)), "")


def _refusal(model: Any, part: Any) -> str:
    if not type(model).__module__.startswith("transformers.models."):
        return foreign(type(model)) or "its code is not transformers' own"
    from transformers import __version__

    if int(__version__.partition(".")[0]) < 5:
        return f"it requires transformers 5, and {__version__} is installed"
    name = model.config._attn_implementation
    if name not in _REPLACEABLE:
        return f"the model was told to use {name}"
    if name == "sdpa" and not _is_transformers_sdpa():
        return "another function was registered as its attention or mask, sdpa"
    if name == "eager" and type(model)._supports_sdpa:
        return 'the model was given attn_implementation="eager"; only the default is replaced'
    both = getattr(model.config, "use_bidirectional_attention", None)
    if both and both != "vision" and _window(model.config):  # pictures are in the masks
        return "its window extends in both directions"
    cls: Any = type(part)
    if any(isinstance(one, ast.keyword) and one.arg in REJECTED for one in ast.walk(code_of(cls))):
        return "it selects keys itself"

    return once((cls, eager_of(cls)), functools.partial(_differs, part))


def _is_transformers_sdpa() -> bool:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    return all(is_transformers(one["sdpa"]) for one in (functions, masks))


def _differs(part: Any) -> str:
    """What a class's plain attention function computes, without padding, that ours does not."""
    made, eager = bare(part), eager_of(type(part))
    groups = min(getattr(part, "num_key_value_groups", 1), 2)
    made.head_dim, made.num_key_value_groups = WIDTH, groups
    causal = getattr(part, "is_causal", False)
    options: dict[str, Any] = {"scaling": WIDTH**-0.5, "dropout": 0.0}
    if "softcap" in inspect.signature(eager).parameters:
        options["softcap"] = 0.7

    def call(function: Any, ours: dict[str, Any], *tensors: Tensor) -> Any:
        q, k, v, *sinks = tensors
        mask = _as_numbers(None, True, None, q, k) if causal and not ours else None
        given = {**options, **ours}
        if sinks:
            made.__dict__["sinks"] = given["s_aux"] = sinks[0]
        return function(made, q, k, v, mask, **given)[0]

    def inputs() -> tuple[Tensor, ...]:
        heads = (2 * groups, 2, 2)
        sinks = part._parameters.get("sinks") is not None
        x = [torch.randn(2, n, LENGTH, WIDTH) for n in heads]
        return (*x, torch.randn(2 * groups)) if sinks else tuple(x)

    theirs = functools.partial(call, eager, {})
    return difference(theirs, functools.partial(call, attention, {"is_causal": causal}), inputs)
