"""Layers in one decode step: products normalize what they read, and add the residual; linear
layers that no other replacement computes are products of few rows."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .._torch import is_unheard
from ..generation import products
from ..generation.names import cache_of
from ..generation.state import state
from ..nn import Int4Linear
from ..nn.linears import FP8, function_of
from . import delta_net, forwards, projections, residuals
from .forwards import plain
from .generation import decoder_of
from .probe import by, disagreement, once

_PARTS = {"mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION, _LINEAR = "self_attn", "linear_attn"
_READERS = (forwards.block, delta_net.layer)
"""What reads the weights of its linear layers itself."""


def prepare(model: nn.Module) -> None:
    """Have layers of a model compute steps so: a norm, attention, an addition, a norm, a gated
    block, an addition, as the probe of residuals has found (:mod:`.residuals`). Other linear layers
    compute their products."""
    for module in model.modules():
        mixers = module._modules.keys() - _PARTS
        if module._parameters or mixers not in ({_ATTENTION}, {_LINEAR}):
            continue
        (mixer,) = mixers
        if len(module._modules) == len(_PARTS) + 1 and _computes_so(module, mixer):
            forward = layer if mixer == _ATTENTION else linear_layer
            module.__dict__["forward"] = functools.partial(forward, module)
    for module in decoder_of(model).modules():
        ours = forwards.below_added(module)
        reads = isinstance(ours, functools.partial) and ours.func in _READERS
        for one in () if reads else module._modules.values():
            if type(one) in (nn.Linear, Int4Linear) and "forward" not in one.__dict__:
                one.__dict__["forward"] = functools.partial(projections.alone, one)


def _computes_so(module: Any, mixer: str) -> bool:
    part = module._modules[mixer]
    sites = [_site(one) for one in (part, module.mlp)]
    known = all(one is not None and one.skip == 0 and not one.stream for one in sites)
    after = known and sites[0].norm is module.post_attention_layernorm
    gated = bool(_names(module.mlp))
    known = after and gated and sites[1].owner is module and "forward" not in module.__dict__
    reads = _only_projects(part) if mixer == _ATTENTION else _function_is(part, delta_net.layer)
    return known and reads and _adds_plainly(module, mixer)


def _only_projects(attention: Any) -> bool:
    """Whether no other part of attention, such as a gate, reads what a product has to normalize."""
    readers = (*projections.NAMES, "o_proj")
    others = (one for name, one in attention._modules.items() if name not in readers)
    return all(one.dim() < 2 for part in others for one in part.parameters())


def _adds_plainly(module: Any, mixer: str) -> bool:
    """Whether a layer's code computes no more than that (Granite scales what it adds)."""
    given = (2, 3) if mixer == _ATTENTION else (0,)  # tuples so long, or a tensor
    makes = (functools.partial(residuals.miniature, module, (n, 0), "first") for n in given)
    words = by(_in_words, mixer=mixer)
    key = "step", residuals.key(module)
    return once(key, lambda: any(not disagreement(make, words) for make in makes))


def _in_words(module: Any, x: Any, *_: Any, mixer: str, **kwargs: Any) -> Any:
    """What a step of a layer computes."""
    out = module._modules[mixer](hidden_states=module.input_layernorm(x), **kwargs)
    x = x + (out[0] if mixer == _ATTENTION else out)
    return x + module.mlp(module.post_attention_layernorm(x))


def _site(part: Any) -> Any:
    added = function_of(part) is forwards.added
    return part.__dict__["forward"].keywords["site"] if added else None


def layer(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer: its own code but in a step."""
    if not state.active or args:
        return plain(module, hidden_states, *args, **kwargs)
    x, attention = hidden_states, module.self_attn
    linears = [getattr(attention, name, None) for name in projections.NAMES]
    known = _runs(attention, "rebinding") and all(_runs(one, "projection") for one in linears)
    known = known and products.takes(x, *linears)
    ends = _runs(getattr(attention, "o_proj", None), "output")
    normed = products.without_norm(x, module.input_layernorm, known)
    with products.leaving(x, ends) as add:
        x = add(_inner(attention)(hidden_states=normed, **kwargs)[0])
    return _with_block(module, x)


def linear_layer(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """The same of linear attention."""
    x, mixer = hidden_states, module.linear_attn
    known = state.active and not args and _function_is(mixer, delta_net.layer)
    cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
    if not known or not delta_net.takes(mixer, x, cache, mask):
        return plain(module, hidden_states, *args, **kwargs)
    normed = products.without_norm(x, module.input_layernorm, True)
    with products.leaving(x, True) as add:
        x = add(delta_net.step(mixer, normed, cache))
    return _with_block(module, x)


def _with_block(module: Any, x: Any) -> Any:
    """The second half of a layer: a norm, a gated block and the addition."""
    block = module.mlp
    parts = [getattr(block, name) for name in _names(block)]
    gated = bool(parts) and products.takes(x, *parts[:2])
    normed = products.without_norm(x, module.post_attention_layernorm, gated)
    with products.leaving(x, gated and products.ends_a_block(parts[2])) as add:
        return add(_inner(block)(normed))


def _inner(part: Any) -> Any:
    """What runs within :func:`.forwards.added`."""
    return forwards.below_added(part) or functools.partial(plain, part)


def _function(module: Any) -> Any:
    ours = None if module is None else forwards.below_added(module)
    if isinstance(ours, functools.partial) and ours.func.__name__ == FP8:
        ours = ours.keywords["step"]
    return ours if isinstance(ours, functools.partial) and is_unheard(module) else None


def _function_is(module: Any, function: Any) -> bool:
    ours = _function(module)
    return ours is not None and ours.func is function


def _runs(module: Any, name: str) -> bool:
    """Whether that function of ours takes the place of the module's code."""
    ours = _function(module)
    return ours is not None and ours.func.__name__ == name


def _names(block: Any) -> tuple[str, ...]:
    """Of the layers of a gated block that computes as it was patched."""
    ours = _function(block)
    if ours is None or ours.func is not forwards.block or ours.keywords["form"] != "gated":
        return ()
    as_it_was = forwards.is_as_it_was(block, ours.keywords["act"])
    return tuple(ours.keywords["names"]) if as_it_was else ()
