"""``model.generate`` of a patched model: its own loop, with our cache, and one CUDA graph for each
step of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_unheard
from ..generation import step
from ..ops._attention_checks import MOST_COLUMNS
from . import attention as attending
from .forwards import OfModel
from .linears import function_of
from .report import Row

NAME = "flexops"
_INPUTS = frozenset(("input_ids", "attention_mask", "position_ids", "past_key_values"))
_NO_EFFECT = frozenset(("use_cache", "return_dict", "logits_to_keep", "inputs_embeds"))


def switch(model: Any, reason: str) -> Row | None:
    """Have a model of transformers that generates use our cache; None if it is none."""
    if not hasattr(model, step.HOOK) or not hasattr(model, "base_model"):
        return None
    if getattr(model, "generation_config", None) is None:
        return None
    attending.register_cache()
    reason = reason or refusal(model)
    if not reason:
        inner = model.__dict__.get("forward")
        if not is_switched(model):
            model.__dict__["forward"] = OfModel(forward, model, inner=inner)
        model.__dict__[step.HOOK] = functools.partial(prepare, model, refuse=refusal_now)
    return Row(type(model).__name__, 1, "generation: one graph per token", not reason, reason)


def refusal(model: Any) -> str:
    """Why a model's decode step cannot keep its lengths on the device; "" if it can."""
    base = getattr(model, "base_model", None)
    config = getattr(model, "config", None)
    if base is None or config is None:
        return "it is no model of transformers that generates"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if not attending.is_switched(base):
        inside = any(attending.is_switched(part) for part in base.modules())
        return "it reads more than text" if inside else "its attention is not flexops'"
    changing = attending.changes_cache(base)
    if changing:
        return f"{changing} changes what it reads from a cache, or its mask"
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of {', '.join(sorted(kinds))}"
    window = getattr(text, "sliding_window", None)
    if window is not None and not attending.passes_windows(text):
        return "its attention does not pass on its window"
    if len({one.device for one in model.parameters()}) != 1:
        return "it is on several devices"
    if model.device.type == "cuda" and model.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {str(model.dtype)[6:]}; steps have bfloat16 or float16"
    if model.device.type == "cuda" and (widest := max(map(_columns, _layers(text)))) > MOST_COLUMNS:
        return f"it has heads of {widest} columns; steps have at most {MOST_COLUMNS}"
    return ""


def heard(model: nn.Module) -> str:
    """Which part of a model has hooks, which a graph would not call; "" if none."""
    for name, module in model.named_modules():
        if module is not model and not is_unheard(module, attending.hide_nothing):
            return f"{name} has hooks"
    return ""


def refusal_now(model: Any) -> str:
    """The same, with what may change after the patch."""
    return refusal(model) or heard(model)


def is_switched(model: Any) -> bool:
    return function_of(model) is forward


def switch_back(model: Any) -> None:
    """The replaced ``forward`` is taken away by who takes away all of them."""
    if model.__dict__.pop(step.HOOK, None) is not None:
        from ..generation import decoder

        decoder.forget(model)


def prepare(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
    *more: Any,
    refuse: Any = None,
    **named: Any,
) -> Any:
    """transformers' method: puts the cache for a call of ``generate`` among its arguments."""
    from ..generation.cache import KVCache
    from ..generation.decoder import captures, decoder_of

    del refuse  # for step.refusal
    asked = generation_config.cache_implementation
    given = model_kwargs.get("past_key_values")
    automatic = asked is None and captures(model.device) and not generation_config.is_assistant
    if given is None and generation_config.use_cache is not False and (asked == NAME or automatic):
        decoder = decoder_of(model)
        batch = batch_size * max(
            generation_config.num_beams or 1, generation_config.num_return_sequences or 1
        )
        refused = decoder.refusal(model)
        if asked == NAME or (not refused and _fits(model, batch, max_cache_length)):
            cache = decoder.borrow(model, batch, max(max_cache_length, 1))
            if refused or not captures(model.device):
                cache.decoder = None
            model_kwargs["past_key_values"] = cache
            return None
    own = type(model)._prepare_cache_for_generation
    result = own(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length,
        *more, **named,
    )  # fmt: skip
    if isinstance(given, KVCache) and captures(model.device):
        decoder = decoder_of(model)
        if not decoder.refusal(model):
            decoder.serve(model, given)
    return result


def _layers(text: Any) -> list[Any]:
    """A config for each layer; Gemma 4's differ."""
    return list(getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers)


def _columns(config: Any) -> int:
    """Of a head of a layer."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _width(config: Any) -> int:
    """Of a layer's keys."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads * _columns(config))


def _fits(model: Any, batch: int, length: int) -> bool:
    """Whether a cache is small beside the memory that is free."""
    text = model.config.get_text_config(decoder=True)
    size = 2 * batch * length * model.dtype.itemsize * sum(map(_width, _layers(text)))
    if model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    return bool(size < free // 4)


def forward(module: Any, *args: Any, inner: Any = None, **kwargs: Any) -> Any:
    """The model's forward pass; a decode step of ``generate`` by a graph."""
    cache: Any = kwargs.get("past_key_values")
    served = getattr(cache, "decoder", None) is not None and not cache.store.bucket
    if served and not args:
        result = _step(module, inner, cache, kwargs)
        if result is not None:
            return result
    own = inner if inner is not None else functools.partial(type(module).forward, module)
    return own(*args, **kwargs)


def _step(module: Any, inner: Any, cache: Any, kwargs: dict[str, Any]) -> Any:
    """A step by a graph; None if this call is none."""
    tokens, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] != 1:
        return None
    config = module.config
    plain = (
        cache.length > 0
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and kwargs.get("return_dict", True)
        and kwargs.get("use_cache", True)
        and not config.output_attentions
        and not config.output_hidden_states
        and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2))
        and (positions is None or (positions.dim() == 2 and positions.shape[1] == 1))
        and all(
            value is None or value is False
            for name, value in kwargs.items()
            if name not in _INPUTS and name not in _NO_EFFECT
        )
        and kwargs.get("inputs_embeds") is None
        and cache.length < cache.max_length
    )
    if not plain:
        return None
    own = inner if inner is not None else functools.partial(type(module).forward, module)
    from ..generation import replay

    logits: Any = replay.replay(module, own, cache, tokens, mask, positions)
    if logits is None:
        return None
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
