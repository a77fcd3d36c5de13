"""Attention for transformers, registered as ``attn_implementation="flexops"``: causality and windows are known to it, and no mask of ``length**2`` is made for
a batch without padding, compiled or not."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import remove_pre_hook
from ..op_builder import loader
from ..ops import attention as _ops
from ..ops import scaled_dot_product_attention as _drop_in
from .probe import LENGTH, WIDTH, bare, disagreement
from .report import Row

NAME = "flexops"


def register_attention() -> None:
    """Make transformers know ``attn_implementation="flexops"``; more than once does no harm."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def nothing_hidden(like: Tensor) -> Tensor:
    """A mask without elements, of four dimensions: transformers hands it on as it is, and :func:`attention` takes it for "the model's own pattern, no
    padding". So nothing has to be looked at to know that, which would wait for the GPU, and under ``torch.compile`` make the whole mask."""
    return like.new_empty((0, 0, 0, 0), dtype=torch.bool)


def _windows_are_cheap(device: torch.device) -> bool:
    """Whether there are kernels of ours, which pass over what lies outside of a window; torch's need a mask for it."""
    return device.type == "cuda" and loader.ensure("attention", "cuda")


def hide_nothing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of the base model: without mask, positions and cache there are neither padding nor packed sequences."""
    if len(args) > 1 or any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", "past_key_values", "encoder_hidden_states")):
        return None
    inputs = next((x for x in (*args, *(kwargs.get(name) for name in ("input_ids", "inputs_embeds", "pixel_values"))) if x is not None), None)
    if inputs is None or module.config._attn_implementation != NAME:
        return None
    window = getattr(module.config, "sliding_window", None)
    if window is not None and inputs.shape[1] > window and not _windows_are_cheap(inputs.device):
        return None
    return args, {**kwargs, "attention_mask": nothing_hidden(inputs)}


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, *, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """None where :func:`attention` knows the pattern by itself, else what transformers makes for torch's attention (True where a key takes part)."""
    from transformers.masking_utils import sdpa_mask

    whole = attention_mask is None and allow_is_causal_skip and isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
    if whole and local_size is not None and _windows_are_cheap(torch.device(kwargs.get("device", "cpu"))):
        return None
    made: Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, attention_mask=attention_mask,
        local_size=local_size, allow_is_causal_skip=allow_is_causal_skip, **kwargs,
    )  # fmt: skip
    return made


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function: ``query`` is ``[batch, heads, length, head_dim]``, the result ``[batch, length, heads, head_dim]``; no weights."""
    causal = (is_causal if is_causal is not None else getattr(module, "is_causal", True)) and query.shape[2] > 1
    if attention_mask is not None and attention_mask.shape[0] == 0:  # see nothing_hidden
        attention_mask = None
    if attention_mask is not None:
        causal, sliding_window = False, None  # they are in the mask
    elif causal and key.shape[2] > query.shape[2]:  # the first part of an empty cache of a fixed length
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if softcap is None and (sliding_window is None or not causal or sliding_window >= query.shape[2]):
        return _torchs_way(query, key, value, attention_mask, dropout, causal, scaling), None
    if dropout:
        return _in_the_open(query, key, value, attention_mask, dropout, causal, scaling, sliding_window, softcap), None
    result = _ops.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, scale=scaling, bias=attention_mask, softcap=softcap or 0.0,
        window=(sliding_window - 1, 0) if sliding_window is not None and causal else None,
    )  # fmt: skip
    assert isinstance(result, Tensor)
    return result, None


def _torchs_way(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scaling: float | None) -> Tensor:
    result = _drop_in.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return result.transpose(1, 2).contiguous()


def _in_the_open(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scaling: float | None, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """All the weights at once, for what no fused attention has: dropout together with a window or a soft cap."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        i = torch.arange(query.shape[2], device=query.device)
        seen = i[:, None] >= i
        bias = seen if window is None else seen & (i[:, None] - i < window)
    if bias is not None:
        scores = scores.masked_fill(~bias, torch.finfo(scores.dtype).min) if bias.dtype == torch.bool else scores + bias
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous()


# ---- switching a model over ------------------------------------------------------------------------------------------------------------------

_BEFORE = "_flexops_attention_before"
MODELS = frozenset(
    f"transformers.models.{model}.modeling_{model}.{name}"
    for model, name in (
        ("llama", "LlamaModel"), ("mistral", "MistralModel"), ("qwen2", "Qwen2Model"), ("qwen3", "Qwen3Model"), ("gemma2", "Gemma2Model"),
        ("gemma3", "Gemma3TextModel"), ("phi", "PhiModel"), ("phi3", "Phi3Model"), ("gpt_neox", "GPTNeoXModel"), ("bert", "BertModel"), ("vit", "ViTModel"),
    )
)  # fmt: skip
"""Base models whose masks and attention go through transformers' interfaces, and nowhere else."""
_REPLACEABLE = ("sdpa", "eager", NAME)
_verdicts: dict[type, str] = {}


def switch(module: nn.Module, reason: str) -> Row | None:
    """Have one of transformers' base models use :func:`attention`; None if it is none that has attention of its own. ``reason`` keeps it from that."""
    model: Any = module
    part = _attention_of(model)
    if part is None:
        return None
    cls = type(part)
    reason = reason or _refusal(model, part)
    if not reason:
        register_attention()
        if _BEFORE not in model.__dict__:
            model.__dict__[_BEFORE] = model.config._attn_implementation
            model.register_forward_pre_hook(hide_nothing, with_kwargs=True)
        model.config._attn_implementation_internal = NAME
    return Row(cls.__name__, sum(type(one) is cls for one in module.modules()), "attention", not reason, reason)


def switch_back(model: Any) -> bool:
    before = model.__dict__.pop(_BEFORE, None)
    if before is None:
        return False
    model.config._attn_implementation_internal = before
    remove_pre_hook(model, hide_nothing)
    return True


def _attention_of(model: Any) -> Any:
    """A base model's first attention module: one whose code asks transformers' interface which function to call."""
    if not hasattr(getattr(model, "config", None), "_attn_implementation") or id(getattr(model, "base_model", None)) != id(model):
        return None
    return next((part for part in model.modules() if eager_of(type(part)) is not None), None)


def eager_of(cls: Any) -> Any:
    """The plain function that a class's ``forward`` falls back to."""
    forward = cls.forward
    known = isinstance(forward, types.FunctionType) and "eager_attention_forward" in forward.__code__.co_names
    return forward.__globals__.get("eager_attention_forward") if known else None


def _refusal(model: Any, part: Any) -> str:
    if f"{type(model).__module__}.{type(model).__qualname__}" not in MODELS:
        return "flexops does not know this model's attention"
    if model.config._attn_implementation not in _REPLACEABLE:
        return f"the model was told to use {model.config._attn_implementation}"
    if getattr(model.config, "use_bidirectional_attention", None):
        return "the config asks for attention in both directions"
    cls = type(part)
    if cls not in _verdicts:
        _verdicts[cls] = disagreement(lambda: _miniature(part), lambda tiny: [(tiny, functools.partial(tiny.forward, ours=True))])
    return _verdicts[cls]


class _Attending(nn.Module):
    """A call of a class's plain attention function, or of ours, without padding: what is probed."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part, self.eager = bare(part), eager_of(type(part))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, ours: bool = False) -> Tensor:
        causal = getattr(self.part, "is_causal", False)
        hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None] if causal else None
        options: dict[str, Any] = {"softcap": 0.7} if "softcap" in inspect.signature(self.eager).parameters else {}
        function, given = (attention, None) if ours else (self.eager, mask)
        result: Tensor = function(self.part, query, key, value, given, scaling=0.3, dropout=0.0, **options)[0]
        return result


def _miniature(part: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    groups = min(getattr(part, "num_key_value_groups", 1), 2)
    tiny = _Attending(part)
    if hasattr(part, "num_key_value_groups"):
        tiny.part.num_key_value_groups = groups
    return tiny, (torch.randn(2, 2 * groups, LENGTH, WIDTH), torch.randn(2, 2, LENGTH, WIDTH), torch.randn(2, 2, LENGTH, WIDTH)), {}
