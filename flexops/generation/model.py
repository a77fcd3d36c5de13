"""What runs in ``model.generate`` of a patched model: its own loop, with our cache, and one CUDA
graph for each step of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from .names import CACHES, cache_name, cache_of

NAME = "flexops"
_INPUTS = frozenset(("input_ids", "attention_mask", "position_ids", *CACHES))
_NO_EFFECT = frozenset(("use_cache", "return_dict", "logits_to_keep", "inputs_embeds"))
_OF_PICTURES = frozenset(
    (
        "image_grid_thw",
        "image_sizes",
        "mm_token_type_ids",
        "second_per_grid_ts",
        "video_grid_thw",
    )
)
"""What says how pictures lie in a prompt: behind it, positions and the cache say so."""
_KINDS = frozenset(("mm_token_type_ids", "token_type_ids"))
"""What says which tokens are pictures: 0 is a word."""


def register() -> None:
    """Make ``cache_implementation="flexops"`` valid."""
    from transformers.generation import configuration_utils

    module: Any = configuration_utils
    if NAME not in module.ALL_CACHE_IMPLEMENTATIONS:
        module.ALL_CACHE_IMPLEMENTATIONS = (*module.ALL_CACHE_IMPLEMENTATIONS, NAME)


def prepare(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
    *more: Any,
    refuse: Any = None,
    of_length: Any = None,
    **named: Any,
) -> Any:
    """transformers' method: puts the cache for a call of ``generate`` among its arguments."""
    from .cache import KVCache, states_of
    from .decoder import captures, decoder_of

    del refuse, of_length  # for step.refusal and step.depends_on_length
    asked = generation_config.cache_implementation
    given, helps = cache_of(model_kwargs), bool(generation_config.is_assistant)
    length = max(max_cache_length, 1)
    if isinstance(given, KVCache) and given.grows:
        if length > given.max_length:
            given.store.grow(_grown(model, given.store.batch, length), given.length)
        return None
    automatic = asked is None and captures(model.device) and not (helps and states_of(model.config))
    if given is None and generation_config.use_cache is not False and (asked == NAME or automatic):
        decoder = decoder_of(model)
        batch = batch_size * max(
            generation_config.num_beams or 1, generation_config.num_return_sequences or 1
        )
        refused = decoder.refusal(model)
        if asked == NAME and model.config.is_encoder_decoder:
            raise GenerationError(
                "a flexops.KVCache has no keys and values of an encoder",
                found=type(model).__name__,
                required="a model without one",
                fix="model.generate(..., cache_implementation='dynamic')",
            )
        if asked == NAME or (not refused and _fits(model, batch, length)):
            length = _grown(model, batch, length) if helps else length
            cache = decoder.borrow(model, batch, length)
            cache.grows = helps
            if refused or not captures(model.device):
                cache.decoder = None
            model_kwargs[cache_name()] = cache
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


def _grown(model: Any, batch: int, length: int) -> int:
    """How many tokens a growing cache gets room for that needs so much. What tries candidates calls
    ``generate`` for a few at a time, always with the cache of the first call."""
    return 2 * length if _fits(model, batch, 2 * length) else length


def layers(text: Any) -> list[Any]:
    """A config for each layer; Gemma 4's differ."""
    return list(getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers)


def columns(config: Any) -> int:
    """Of a head of a layer."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _width(config: Any) -> int:
    """Of a layer's keys."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads * columns(config))


def _fits(model: Any, batch: int, length: int) -> bool:
    """Whether a cache is small beside the memory that is free."""
    text = model.config.get_text_config(decoder=True)
    size = 2 * batch * length * model.dtype.itemsize * sum(map(_width, layers(text)))
    if model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    return bool(size < free // 4)


def forward(module: Any, *args: Any, inner: Any = None, **kwargs: Any) -> Any:
    """The model's forward pass; prompts and decode steps of ``generate`` by graphs."""
    cache = cache_of(kwargs)
    served = getattr(cache, "decoder", None) is not None and not cache.store.busy
    if served and not args:
        result = _by_graph(module, inner, cache, kwargs)
        if result is not None:
            return result
    own = inner if inner is not None else functools.partial(type(module).forward, module)
    return own(*args, **kwargs)


def _by_graph(module: Any, inner: Any, cache: Any, kwargs: dict[str, Any]) -> Any:
    """A prompt or a step by a graph; None if this call is none."""
    from . import prompt, replay, step
    from .decoder import captures

    tokens = kwargs.get("input_ids")
    known = _INPUTS | _NO_EFFECT
    if cache.length:
        known |= _OF_PICTURES
    elif step.reads_pictures(module) and not _has_pictures(kwargs):
        known |= _KINDS
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not _is_plain(module, kwargs, known):
        return None
    keep = kwargs.get("logits_to_keep", 0)
    if type(keep) is not int or not captures(module.device):
        return None
    own = inner if inner is not None else functools.partial(type(module).forward, module)
    compute: Any = replay.replay if cache.length else prompt.logits_of
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    logits = compute(module, own, cache, tokens, mask, positions, keep)
    if logits is None:
        return None
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(**{"logits": logits, cache_name(): cache})


def _has_pictures(kwargs: dict[str, Any]) -> bool:
    kinds = (kwargs.get(name) for name in _KINDS)
    return any(bool(one.any()) for one in kinds if isinstance(one, Tensor))


def _is_plain(module: Any, kwargs: dict[str, Any], known: frozenset[str]) -> bool:
    """Whether a call asks for logits only, with arguments of these names."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    config = module.config
    return bool(
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and kwargs.get("return_dict", True)
        and kwargs.get("use_cache", True)
        and not config.output_attentions
        and not config.output_hidden_states
        and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2))
        and (positions is None or positions.dim() in (2, 3))
        and all(
            value is None or value is False or (isinstance(value, dict) and not value)
            for name, value in kwargs.items()
            if name not in known
        )
        and kwargs.get("inputs_embeds") is None
    )
