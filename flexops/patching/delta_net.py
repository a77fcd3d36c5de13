"""Layers of the gated delta rule, in a prompt and in one decode step: products, a convolution, the
recurrence with its gates, a norm and a product."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import is_unheard
from ..generation import products
from ..generation.state import behind_the_prompt, state
from ..nn.linears import DTYPES
from ..ops import state_scan
from ..ops.causal_conv1d import MOST_TAPS, causal_conv1d, causal_conv1d_update
from ..ops.state_chunks import is_chunked
from .forwards import rebound, replacement, with_names
from .probe import failure, once, own_class, settings, undisturbed

_PROJECTIONS = (
    (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
    (("in_proj_qkvz", "in_proj_ba"),),
)
"""Of the two forms that there are, Qwen 3.5's and Qwen3-Next's: each pair is one product."""
_SIZES = (
    "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "layer_idx",
    "conv_kernel_size", "activation",
)  # fmt: skip
_PACKED = ("cu_seq_lens_q", "seq_idx")
LONG = 1024
"""Tokens of a prompt from which on other packages' kernels take less time than ours without tensor
cores."""
_ROUNDING = 2e-5
_orders: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


class _Cache(NamedTuple):
    """What a layer's code asks of a cache, for the probe."""

    layers: list[Any]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self.layers[0].has_previous_state[0])

    def update_conv_state(self, states: Tensor, *_: Any, **named: Any) -> Any:
        return self.layers[0].update_conv_state(states, **named)

    def update_recurrent_state(self, states: Tensor, *_: Any, **named: Any) -> Any:
        return self.layers[0].update_recurrent_state(states, **named)

    def get_conv_state(self, *_: Any, **__: Any) -> Any:
        return self.layers[0].conv_states[0] if self.has_previous_state() else None

    def get_recurrent_state(self, *_: Any, **__: Any) -> Any:
        return self.layers[0].recurrent_states[0] if self.has_previous_state() else None

    def is_recording_past(self, *_: Any) -> bool:
        return False


def _pairs(module: Any) -> tuple[tuple[str, str], ...]:
    """The names of the projections before; none where a layer is another one."""
    for pairs in _PROJECTIONS:
        whole = {name for pair in pairs for name in pair} | {"conv1d", "norm", "out_proj"}
        if set(module._modules) == whole and set(module._parameters) == {"dt_bias", "A_log"}:
            return pairs if all(hasattr(module, one) for one in _SIZES) else ()
    return ()


def fits(module: Any, functions: Callable[[Any], dict[str, Any]]) -> bool:
    """Whether a layer's prompts and steps are what :func:`prompt` and :func:`step` compute.

    Args:
        functions: gives, for a class's code, what it calls when it is probed.
    """
    if not _pairs(module):
        return False
    return not once(
        ("delta_net", own_class(module), settings(module)), lambda: _differs(module, functions)
    )


@replacement
def layer(
    module: Any,
    hidden_states: Tensor,
    *args: Any,
    kind: str,
    make: Callable[[Any], dict[str, Any]],
    **kwargs: Any,
) -> Any:
    """A layer: a prompt or a step as below, everything else by its class's code."""
    cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
    if state.active and takes(module, hidden_states, cache, mask):
        return step(module, hidden_states, cache)
    packed = any(kwargs.get(name) is not None for name in _PACKED)
    if not packed and takes_prompt(module, hidden_states, cache, mask):
        return prompt(module, hidden_states, cache)
    return rebound(own_class(module), kind, make)(module, hidden_states, *args, **kwargs)


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among a layer's arguments, as transformers names it from 5.24 on, and before."""
    return kwargs.get("cache", kwargs.get("cache_params"))


def takes(module: Any, x: Tensor, cache: Any, attention_mask: Any) -> bool:
    """Whether :func:`step` computes a layer, in a step: one token of each sequence, without
    padding, behind others."""
    if cache is None or attention_mask is not None or x.shape[1] != 1:
        return False
    kept = cache.layers[module.layer_idx]
    if not kept.has_previous_state[0] or not _keeps(module, kept, x):
        return False
    linears = [[module._modules[name] for name in pair] for pair in _pairs(module)]
    return all(products.takes(x, *some) for some in (*linears, [module.out_proj]))


def takes_prompt(module: Any, x: Tensor, cache: Any, attention_mask: Any) -> bool:
    """Whether :func:`prompt` computes a layer: several tokens of each sequence, without padding or
    gradients."""
    if cache is None or attention_mask is not None or x.shape[1] == 1:
        return False
    convolution = module.conv1d
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and x.dtype in DTYPES
        and (x.shape[1] <= LONG or is_chunked(module.head_k_dim, x, delta=True))
        and convolution.weight.dtype in DTYPES
        and convolution.weight.shape[-1] <= MOST_TAPS
        and is_unheard(convolution)
        and "forward" not in vars(convolution)  # as accelerate fetches weights
        and _keeps(module, cache.layers[module.layer_idx], x)
    )


def _keeps(module: Any, kept: Any, x: Tensor) -> bool:
    """Whether kernels write what a layer's cache keeps, or will."""
    if kept.record_past or module.activation != "silu":
        return False
    states, before = kept.recurrent_states.get(0), kept.conv_states.get(0)
    return (
        state_scan.has_kernels(module.head_k_dim, module.head_v_dim, x.is_cuda)
        and (before is None or before.dtype == x.dtype)
        and (states is None or (states.dtype == torch.float32 and states.is_contiguous()))
    )


def _order(module: Any, device: torch.device) -> Tensor:
    """:func:`_order_of`, kept for the next call."""
    order = _orders.get(module)
    if order is None or order.device != device:
        order = _orders[module] = _order_of(module, device)
    return order


def _ended(module: Any, states: Tensor, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """The recurrence behind the convolution, and the norm, ``[batch, tokens, values]``. The states
    are written."""
    keys, values = module.key_dim, module.value_dim
    q, k, v = mixed.split([keys, keys, values], -1)
    out = state_scan.delta_steps(
        states,
        q.unflatten(-1, (module.num_k_heads, module.head_k_dim)),
        k.unflatten(-1, (module.num_k_heads, module.head_k_dim)),
        v.unflatten(-1, (module.num_v_heads, module.head_v_dim)),
        a,
        b,
        module.A_log,
        module.dt_bias,
    )
    rows = out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim)
    normed: Tensor = module.norm(*rows)
    return normed.reshape(*mixed.shape[:2], -1)


def step(module: Any, x: Tensor, cache: Any) -> Tensor:
    """One token of each sequence, ``[batch, 1, hidden]``."""
    kept, convolution, pairs = cache.layers[module.layer_idx], module.conv1d, _pairs(module)
    made = [products.product(x, tuple(module._modules[name] for name in pair)) for pair in pairs]
    heads, keys, values = module.num_v_heads, module.key_dim, module.value_dim
    if len(pairs) == 1:
        order = _order(module, x.device)
        rest = order.numel() - 2 * heads
        made = list(made[0].index_select(-1, order).split([rest, 2 * heads], -1))
    mixed, z = made[0].split([2 * keys + values, values], -1)
    b, a = made[1].split([heads, heads], -1)
    mixed = causal_conv1d_update(
        mixed.transpose(1, 2),
        kept.conv_states[0],
        convolution.weight.squeeze(1),
        convolution.bias,
        module.activation,
    ).transpose(1, 2)
    out = _ended(module, kept.recurrent_states[0], mixed, z, b, a)
    return products.product(out, (module.out_proj,), ends=True)


def prompt(module: Any, x: Tensor, cache: Any) -> Tensor:
    """Several tokens of each sequence, ``[batch, tokens, hidden]``, behind those that the cache
    knows. Tokens behind a prompt that is filled up change no state."""
    kept, convolution, length = cache.layers[module.layer_idx], module.conv1d, x.shape[1]
    made = [module._modules[name](x) for pair in _pairs(module) for name in pair]
    if len(made) == 2:
        heads, keys, values = module.num_v_heads, module.key_dim, module.value_dim
        first, second = _order(module, x.device).split([2 * keys + 2 * values, 2 * heads])
        widths = [2 * keys + values, values], [heads, heads]
        orders = first, second - first.numel()
        made = [
            part
            for one, order, some in zip(made, orders, widths, strict=True)
            for part in one.index_select(-1, order).split(some, -1)
        ]
    mixed, z, b, a = made
    behind = behind_the_prompt(length)
    if behind is not None:
        b, a = (gate.masked_fill(behind[..., None], -math.inf) for gate in (b, a))
    if not kept.has_previous_state[0]:
        states = kept.recurrent_states.get(0)
        if states is None:
            shape = len(x), module.num_v_heads, module.head_k_dim, module.head_v_dim
            kept.lazy_initialization(recurrent_states=x.new_empty(shape, dtype=torch.float32))
        else:
            states.zero_()
    mixed = kept.update_conv_state(mixed.transpose(1, 2), conv_kernel_size=module.conv_kernel_size)
    mixed = causal_conv1d(
        mixed, convolution.weight.squeeze(1), convolution.bias, activation=module.activation
    )[..., -length:].transpose(1, 2)
    out: Tensor = module.out_proj(_ended(module, kept.recurrent_states[0], mixed, z, b, a))
    return out


def _order_of(module: Any, device: torch.device) -> Tensor:
    """Where q, k, v, z, b and a of all heads are in what Qwen3-Next projects, which has those of a
    head side by side."""
    widths = [module._modules[name].weight.shape[0] for name in _pairs(module)[0]]
    places = torch.arange(sum(widths), device=device).view(1, 1, -1).split(widths, -1)
    return torch.cat([one.flatten() for one in module.fix_query_key_value_ordering(*places)])


# ---- the probe -----------------------------------------------------------------------------------


def _differs(module: Any, functions: Callable[[Any], dict[str, Any]]) -> str:
    """What a layer's class computes that :func:`prompt` and :func:`step` do not."""
    from transformers.cache_utils import LinearAttentionLayer

    try:
        with undisturbed(), torch.no_grad():
            tiny = _miniature(module)
            code: Any = inspect.unwrap(type(tiny).forward)
            forward: Any = with_names(code, functions(code))
            found: list[list[Tensor]] = []
            tokens = torch.randn(2, 6, 24)
            for ours in (False, True):
                cache = _Cache([LinearAttentionLayer()])
                named: Any = {_argument(forward): cache}
                results = []
                for part in tokens.split([3, 2, 1], 1):
                    if not ours:
                        results.append(forward(tiny, part, **named))
                    elif part.shape[1] > 1:
                        assert takes_prompt(tiny, part, cache, None)
                        results.append(prompt(tiny, part, cache))
                    else:
                        results.append(_stepped(tiny, part, cache))
                kept = cache.layers[0]
                found.append([*results, kept.conv_states[0], kept.recurrent_states[0]])
    except (Exception, SystemExit) as error:  # whatever code of another may raise
        return failure(error)
    alike = all(
        one.shape == other.shape and torch.allclose(one, other, _ROUNDING, _ROUNDING)
        for one, other in zip(*found, strict=True)
    )
    return "" if alike else "it computes something else"


def _stepped(tiny: Any, token: Tensor, cache: Any) -> Tensor:
    state.active = True
    try:
        assert takes(tiny, token, cache, None)
        return step(tiny, token, cache)
    finally:
        state.active = False


def _argument(forward: Any) -> str:
    """What a layer calls its cache."""
    return "cache_params" if "cache_params" in forward.__code__.co_varnames else "cache"


def _miniature(module: Any) -> Any:
    cls: Any = own_class(module)
    tiny = cls.__new__(cls)
    nn.Module.__init__(tiny)
    own = {*vars(tiny), "forward"}
    tiny.__dict__.update({name: one for name, one in vars(module).items() if name not in own})
    groups, heads, rows, columns, hidden = 2, 4, 8, 16, 24
    keys, values = groups * rows, heads * columns
    sizes = {
        "num_k_heads": groups, "num_v_heads": heads, "head_k_dim": rows, "head_v_dim": columns,
        "key_dim": keys, "value_dim": values, "hidden_size": hidden, "layer_idx": 0,
        "conv_dim": 2 * keys + values,
    }  # fmt: skip
    for name, size in sizes.items():
        if hasattr(module, name):
            setattr(tiny, name, size)
    widths = {
        "in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads,
        "in_proj_a": heads, "in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads,
    }  # fmt: skip
    for name in (name for pair in _pairs(module) for name in pair):
        bias = module._modules[name].bias is not None
        setattr(tiny, name, nn.Linear(hidden, widths[name], bias=bias))
    own_conv, channels = module.conv1d, 2 * keys + values
    taps, biased = own_conv.kernel_size[0], own_conv.bias is not None
    tiny.conv1d = nn.Conv1d(
        channels, channels, taps, groups=channels, padding=taps - 1, bias=biased
    )
    tiny.A_log, tiny.dt_bias = (nn.Parameter(torch.rand(heads)) for _ in range(2))
    norm = module.norm
    tiny.norm = own_class(norm)(columns, eps=getattr(norm, "variance_epsilon", 1e-6))
    tiny.norm.weight = nn.Parameter(torch.rand(columns))
    tiny.out_proj = nn.Linear(values, hidden, bias=module.out_proj.bias is not None)
    return tiny
