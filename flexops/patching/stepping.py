"""Layers in one decode step: products normalize what they read, and
add the residual."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .._torch import is_unheard
from ..generation import products
from ..generation.state import state
from ..nn.linears import FP8, function_of
from . import forwards, projections, residuals
from .forwards import plain
from .probe import by, disagreement, once

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def prepare(model: nn.Module) -> None:
    """Have layers of a model compute steps so: a norm, attention, an addition, a norm, a gated
    block, an addition, as the probe of residuals has found (:mod:`.residuals`)."""
    for module in model.modules():
        if set(module._modules) != _PARTS or module._parameters:
            continue
        sites = [_site(module._modules[name]) for name in ("self_attn", "mlp")]
        known = all(one is not None and one.skip == 0 and not one.stream for one in sites)
        after = known and sites[0].norm is module._modules["post_attention_layernorm"]
        gated = bool(_names(module._modules["mlp"]))
        known = after and gated and sites[1].owner is module
        known = known and _only_projects(module._modules["self_attn"])
        if known and "forward" not in module.__dict__ and _adds_plainly(module):
            module.__dict__["forward"] = functools.partial(layer, module)


def _only_projects(attention: Any) -> bool:
    """Whether no other part of attention, such as a gate, reads what a product has to normalize."""
    readers = (*projections.NAMES, "o_proj")
    others = (one for name, one in attention._modules.items() if name not in readers)
    return all(one.dim() < 2 for part in others for one in part.parameters())


def _adds_plainly(module: Any) -> bool:
    """Whether a layer's code computes no more than that (Granite scales what it adds)."""
    makes = (functools.partial(residuals.miniature, module, (n, 0), "first") for n in (2, 3))
    key = "step", residuals.key(module)
    return once(key, lambda: any(not disagreement(make, by(_in_words)) for make in makes))


def _in_words(module: Any, x: Any, *_: Any, **kwargs: Any) -> Any:
    """What a step of a layer computes."""
    x = x + module.self_attn(hidden_states=module.input_layernorm(x), **kwargs)[0]
    return x + module.mlp(module.post_attention_layernorm(x))


def _site(part: Any) -> Any:
    added = function_of(part) is forwards.added
    return part.__dict__["forward"].keywords["site"] if added else None


def layer(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer: its own code but in a step."""
    if not state.active or args:
        return plain(module, hidden_states, *args, **kwargs)
    x, attention, block = hidden_states, module.self_attn, module.mlp
    linears = [getattr(attention, name, None) for name in projections.NAMES]
    known = _runs(attention, "rebinding") and all(_runs(one, "projection") for one in linears)
    known = known and products.takes(x, *linears)
    ends = _runs(getattr(attention, "o_proj", None), "output")
    normed = products.without_norm(x, module.input_layernorm, known)
    with products.leaving(x, ends) as add:
        x = add(_inner(attention)(hidden_states=normed, **kwargs)[0])
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
