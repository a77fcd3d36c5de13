"""Which models generate with our cache, and one CUDA graph for each step."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from .._torch import is_unheard, modules_of
from ..generation import step
from ..generation.model import columns, forward, layers, prepare, register
from ..nn.linears import function_of
from ..ops._attention_checks import MOST_COLUMNS
from ..report import Row
from . import attention as attending
from . import rope
from .forwards import OfModel


def switch(model: Any, reason: str) -> Row | None:
    """Have a model of transformers that generates use our cache; None if it is none. A model whose
    steps cannot be captured uses it where it is asked for by name."""
    if not hasattr(model, step.HOOK) or not hasattr(model, "base_model"):
        return None
    if getattr(model, "generation_config", None) is None:
        return None
    register()
    reason = reason or refusal(model)
    if not reason and not is_switched(model):
        inner = model.__dict__.get("forward")
        model.__dict__["forward"] = OfModel(forward, model, inner=inner)
    refuse = functools.partial(refusal_now, before=reason)
    of_length = "".join(filter(None, map(rope.refusal, decoder_of(model).modules())))
    hook = functools.partial(prepare, model, refuse=refuse, of_length=of_length)
    model.__dict__[step.HOOK] = hook
    return Row(type(model).__name__, 1, "generation: one graph per token", not reason, reason)


def refusal(model: Any, *, again: bool = False) -> str:
    """Why a model's decode step cannot keep its lengths on the device; "" if it can.
    ``again``: only what may have changed since the patch."""
    base = getattr(model, "base_model", None)
    config = getattr(model, "config", None)
    if base is None or config is None:
        return "it is no model of transformers that generates"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    parts = modules_of(model)
    if any(hasattr(type(part), step.HOOK) for part in parts[1:]):
        return "a part of it generates"
    words = decoder_of(model)
    if not attending.is_switched(words):
        return "its attention is not flexops'"
    if not again and any(map(_attends_apart, words.modules())):
        return "its attention to pictures is apart from that to words"
    changing = "" if again else attending.changes_cache(words)
    if changing:
        return f"{changing} changes what it reads from a cache, or its mask"
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    from ..generation import recurrent

    if not model._supports_default_dynamic_cache():
        return "it has a cache of its own"
    if kinds - {"full_attention", "sliding_attention", *recurrent.KINDS}:
        return f"it has layers of {', '.join(sorted(kinds))}"
    window = getattr(text, "sliding_window", None)
    if window is not None and not attending.passes_window(text, window):
        return "its attention does not pass on its window"
    tensors = (one for part in parts for one in part._parameters.values())
    if len({one.device for one in tensors if one is not None}) != 1:
        return "it is on several devices"
    if model.device.type == "cuda" and model.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {str(model.dtype)[6:]}; steps have bfloat16 or float16"
    if model.device.type == "cuda" and (widest := max(map(columns, layers(text)))) > MOST_COLUMNS:
        return f"it has heads of {widest} columns; steps have at most {MOST_COLUMNS}"
    return ""


def decoder_of(model: Any) -> Any:
    """What computes with the tokens: a part of the base model if that reads pictures, too."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    return found if attending.is_switched(found) else model.base_model


def _attends_apart(part: nn.Module) -> bool:
    return "cross_attention_states" in inspect.signature(type(part).forward).parameters


def heard(model: Any) -> str:
    """Which part of a model that a step runs has hooks, which a graph would not call; "" if none.
    A model that reads pictures has parts that it does not run."""
    base, words = model.base_model, decoder_of(model)
    apart = set() if words is base else {*base.modules()} - {base, *words.modules()}
    for module in modules_of(model)[1:]:
        if is_unheard(module, attending.hide_nothing):
            continue
        if module not in apart or any(part is words for part in module.modules()):
            (name,) = (name for name, one in model.named_modules() if one is module)
            return f"{name} has hooks"
    return ""


def refusal_now(model: Any, before: str) -> str:
    """The same, with what may change after the patch; ``before``: why it could not be patched."""
    return before or refusal(model, again=True) or heard(model)


def is_switched(model: Any) -> bool:
    return function_of(model) is forward


def switch_back(model: Any) -> None:
    """The replaced ``forward`` is taken away by who takes away all of them."""
    if model.__dict__.pop(step.HOOK, None) is not None:
        from ..generation import decoder

        decoder.forget(model)
