"""What runs in place of modules' own ``forward``: each function takes the module first, and gives
what the module's class would.

A replaced ``forward`` is a ``functools.partial`` of one of these in the module's ``__dict__``. So
the class, its name and its parameters stay what they are, copies and pickles of the module are
replaced as well, and to take the entry away is to restore it. What a call brings that operators do
not take (float64, DTensors) goes to the class's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_unheard
from ..generation.state import state
from ..ops.activation import bias_gelu, bias_silu, geglu, swiglu
from ..ops.gated_linear import geglu_linear, swiglu_linear
from ..ops.norm import add_layer_norm, add_rms_norm
from ..ops.norm import layer_norm as _layer_norm
from ..ops.norm import rms_norm as _rms_norm
from . import decoding
from .linears import DTYPES as _DTYPES
from .linears import is_bare, is_plain, pair

_AHEAD = "_flexops_normalized"


def replacement(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Under ``torch.compile`` the module's own code runs, unless ``in_graphs``: inductor fuses it
    with what stands around, residual additions of the whole model included, which no operator of
    ours can."""

    @functools.wraps(forward)
    def entry(module: nn.Module, *args: Any, in_graphs: bool = False, **kwargs: Any) -> Any:
        if not in_graphs and torch.compiler.is_compiling():
            return plain(module, *args, **_without_options(kwargs))
        return forward(module, *args, **kwargs)

    return entry


_OPTIONS = ("eps", "offset", "kind", "act", "names", "ahead", "siblings")


def _without_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _OPTIONS}


def plain(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What the module's class does."""
    return type(module).forward(module, *args, **kwargs)


# ---- norms ---------------------------------------------------------------------------------------


def _gain(module: Any, offset: float) -> Any:
    """The weight, to which Gemma adds 1."""
    return module.weight.float() + offset if offset else module.weight


@replacement
def rms_norm(module: Any, x: Tensor, *, eps: float, offset: float = 0.0) -> Any:
    if not torch.compiler.is_compiling():
        ahead = getattr(x, _AHEAD, None)
        if (
            ahead is not None
            and ahead[0] is module
            and ahead[2] == x._version
            and ahead[1].grad_fn is x.grad_fn
        ):
            return ahead[1]
    if x.dtype not in _DTYPES or not is_plain(module.weight):
        return plain(module, x)
    return _rms_norm(x, _gain(module, offset), eps)


@replacement
def layer_norm(module: Any, x: Tensor, *, eps: float) -> Any:
    weight, bias = module.weight, module.bias
    if x.dtype not in _DTYPES or not is_plain(weight) or not is_plain(bias):
        return plain(module, x)
    return _layer_norm(x, weight, bias, eps)


def fuses(norm: Any, x: Tensor) -> bool:
    """Whether a sum can be normalized as the norm would, but without calling it: it is one of the
    above, and it has no hooks."""
    ours = norm.__dict__.get("forward")
    known = isinstance(ours, functools.partial) and ours.func in _NORMS
    return known and x.dtype in _DTYPES and is_unheard(norm) and is_plain(norm.weight)


def add_norm(x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """``norm(residual + x)`` and the sum, in one pass where that can be."""
    if not fuses(norm, x) or residual.dtype not in _DTYPES or x.shape != residual.shape:
        total = residual + x
        return norm(total), total
    ours = norm.__dict__["forward"]
    if ours.func is rms_norm:
        return add_rms_norm(x, residual, _gain(norm, ours.keywords["offset"]), ours.keywords["eps"])
    return add_layer_norm(x, residual, norm.weight, norm.bias, ours.keywords["eps"])


_NORMS = (rms_norm, layer_norm)


# ---- layers: the residual's addition goes with the norm behind it --------------------------------


def _finish(module: nn.Module, x: Tensor, residual: Tensor, ahead: tuple[Any, ...]) -> Tensor:
    """``residual + x``; with it, for the norm that comes next, what it will be asked for. That
    norm's module knows it by the sum's attribute, and takes it if the sum was not written to, and
    is still a result of the call that made both: a backward hook, or a checkpoint's second run,
    makes it another's."""
    # what is kept beside a sum
    alone = torch.compiler.is_compiling() or (
        module.training and getattr(module, "gradient_checkpointing", False)
    )
    if not ahead or alone or not fuses(ahead[0], x) or ahead[0].weight.device != x.device:
        return residual + x
    y, total = add_norm(x, residual, ahead[0])
    setattr(total, _AHEAD, (ahead[0], y, total._version))
    return total


@replacement
def decoder_layer(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    *,
    position_embeddings: Any = None,
    ahead: tuple[Any, ...] = (),
    **kwargs: Any,
) -> Tensor:
    """Norm, attention, add, norm, feed-forward, add: Llama and its kin."""
    if state.active and "resid_mlp_dropout" not in module._modules:
        kwargs |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        return _decode_layer(module, hidden_states, **kwargs)
    x = module.input_layernorm(hidden_states)
    x, _ = module.self_attn(
        hidden_states=x,
        attention_mask=attention_mask,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    if "resid_attn_dropout" in module._modules:  # Phi-3
        x = module.resid_attn_dropout(x)
    x, residual = add_norm(x, hidden_states, module.post_attention_layernorm)
    x = module.mlp(x)
    if "resid_mlp_dropout" in module._modules:
        x = module.resid_mlp_dropout(x)
    return _finish(module, x, residual, ahead)


def _decode_layer(module: nn.Module, x: Tensor, **kwargs: Any) -> Tensor:
    """The same in a decode step: products normalize what they read, and add the residual."""
    attention: Any = module.self_attn
    block: Any = module.mlp
    linears = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    known = _runs(attention, "attention") and all(_runs(one, "projection") for one in linears)
    known = known and decoding.takes(x, *linears)
    ends = _runs(getattr(attention, "o_proj", None), "output")
    normed = decoding.without_norm(x, module.input_layernorm, known)
    with decoding.leaving(x, ends) as add:
        x = add(attention(hidden_states=normed, **kwargs)[0])
    gated = (
        _runs(block, "gated_mlp")
        and _is_as_it_was(block, block.__dict__["forward"].keywords["act"])
        and not _drops(block)
        and decoding.takes(x, block.gate_proj, block.up_proj)
    )
    ends = gated and is_bare(block.down_proj)
    normed = decoding.without_norm(x, module.post_attention_layernorm, gated)
    with decoding.leaving(x, ends) as add:
        return add(block(normed))


def _runs(module: Any, name: str) -> bool:
    """Whether that function of ours takes the place of the module's code."""
    ours = None if module is None else module.__dict__.get("forward")
    return isinstance(ours, functools.partial) and ours.func.__name__ == name and is_unheard(module)


@replacement
def sandwich_layer(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    *,
    ahead: tuple[Any, ...] = (),
    **kwargs: Any,
) -> Tensor:
    """As above with a norm on either side: Gemma 2 and 3."""
    x = module.input_layernorm(hidden_states)
    x, _ = module.self_attn(
        hidden_states=x,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        **kwargs,
    )
    x, residual = add_norm(
        module.post_attention_layernorm(x), hidden_states, module.pre_feedforward_layernorm
    )
    return _finish(module, module.post_feedforward_layernorm(module.mlp(x)), residual, ahead)


@replacement
def vit_layer(
    module: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
) -> Tensor:
    x, _ = module.attention(module.layernorm_before(hidden_states), attention_mask, **kwargs)
    x, residual = add_norm(module.dropout(x), hidden_states, module.layernorm_after)
    return _finish(module, module.dropout(module.mlp(x)), residual, ())


@replacement
def bert_output(module: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """The norm behind the sum, so that what is normalized is the stream itself: under autocast it
    stays in the stream's dtype."""
    x = module.dropout(module.dense(hidden_states))
    if x.dtype != input_tensor.dtype:
        normalized: Tensor = module.LayerNorm(x + input_tensor)
        return normalized
    return add_norm(x, input_tensor, module.LayerNorm)[0]


# ---- feed-forward blocks -------------------------------------------------------------------------


def _down(down: Any, kind: Any, gate: Tensor, up: Tensor | None = None) -> Any:
    """``down(act(gate) * up)``; of a plain linear layer's input nothing is kept for the backward
    pass, but worked out again from gate and up."""
    if is_bare(down):
        if kind == "silu":
            return swiglu_linear(gate, up, down.weight, down.bias)
        return geglu_linear(gate, up, down.weight, down.bias, approximate=kind)
    return down(swiglu(gate, up) if kind == "silu" else geglu(gate, up, approximate=kind))


Act = tuple[str, Any]
"""The name and the class of a block's activation, when the block was patched."""


def _is_as_it_was(module: Any, act: Act) -> bool:
    """Whether the activation is still that one, and it has no hooks."""
    found = getattr(module, act[0])
    return type(found) is act[1] and (not isinstance(found, nn.Module) or is_unheard(found))


def dropouts(module: nn.Module) -> list[tuple[str, nn.Dropout]]:
    return [(name, one) for name, one in module.named_children() if isinstance(one, nn.Dropout)]


def _drops(module: nn.Module) -> bool:
    """Whether one of a block's dropouts does something, or a hook listens to it."""
    return any((one.training and one.p) or not is_unheard(one) for _, one in dropouts(module))


@replacement
def gated_mlp(module: Any, x: Tensor, *, kind: str, act: Act) -> Any:
    """``down(act(gate(x)) * up(x))``."""
    if not _is_as_it_was(module, act) or _drops(module):
        return plain(module, x)
    if decoding.takes(x, module.gate_proj, module.up_proj):
        inner = decoding.product(x, (module.gate_proj, module.up_proj), activation=kind)
        if decoding.takes(inner, module.down_proj):
            return decoding.product(inner, (module.down_proj,), ends=True)
        return module.down_proj(inner)
    gate, up = pair(x, module.gate_proj, module.up_proj)
    if gate.dtype not in _DTYPES or gate.dtype != up.dtype or type(gate) is not Tensor:
        return plain(module, x)
    return _down(module.down_proj, kind, gate, up)


@replacement
def packed_mlp(module: Any, hidden_states: Tensor, *, kind: str, act: Act) -> Any:
    """The same with gate and up in one product: Phi-3."""
    if not _is_as_it_was(module, act):
        return plain(module, hidden_states)
    both = module.gate_up_proj(hidden_states)
    if both.dtype not in _DTYPES or type(both) is not Tensor:
        return plain(module, hidden_states)
    return _down(module.down_proj, kind, both)


@replacement
def mlp(module: Any, hidden_states: Tensor, *, kind: str, act: Act, names: tuple[str, str]) -> Any:
    """``second(act(first(x)))``, the first one's bias added where the activation reads it;
    ``names`` are those of the two layers, the second may be ""."""
    first, second = getattr(module, names[0]), getattr(module, names[1]) if names[1] else None
    if (
        hidden_states.dtype not in _DTYPES
        or not is_bare(first)
        or first.bias is None
        or not _is_as_it_was(module, act)
    ):
        return plain(module, hidden_states)
    x = F.linear(hidden_states, first.weight)
    x = bias_silu(x, first.bias) if kind == "silu" else bias_gelu(x, first.bias, kind)  # type: ignore[arg-type]
    return x if second is None else second(x)
