"""Causal convolutions inside of transformers' linear-attention and state-space layers: the class's
own ``forward``, with other functions called ``causal_conv1d_fn`` and ``causal_conv1d_update`` among
the names that it sees."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.linears import DTYPES
from ..ops.causal_conv1d import causal_conv1d
from ..ops.causal_conv1d import causal_conv1d_update as update
from .forwards import rebind
from .probe import Swap, difference, own_class

_WHOLE, _STEP = "causal_conv1d_fn", "causal_conv1d_update"
_MOST_TAPS = 4


def _code_of(cls: Any) -> Any:
    """The class's own code: HF's kernels wraps it."""
    return inspect.unwrap(cls.forward)


def is_called(module: nn.Module) -> bool:
    forward = _code_of(own_class(module))
    return isinstance(forward, types.FunctionType) and all(
        name in forward.__code__.co_names and callable(forward.__globals__.get(name))
        for name in (_WHOLE, _STEP)
    )


def _is_supported(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    return (
        x.dtype in DTYPES
        and weight.dtype in DTYPES
        and weight.shape[-1] <= _MOST_TAPS
        and activation in (None, "silu", "swish")
    )


def whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``causal_conv1d_fn``, by flexops; what it does not support goes to the original
    one."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        packed = kwargs.get("seq_idx") is not None or kwargs.get("initial_states") is not None
        if packed or not _is_supported(hidden_states, weight, activation):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        return causal_conv1d(hidden_states, weight, bias, activation=activation)

    return causal_conv1d_fn


def step(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for ``causal_conv1d_update``."""

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        supported = _is_supported(hidden_states, weight, activation)
        no_gradient = not (torch.is_grad_enabled() and hidden_states.requires_grad)
        if not supported or conv_state.dtype != hidden_states.dtype or not no_gradient:
            return original(hidden_states, conv_state, weight, bias, activation)
        return update(hidden_states, conv_state, weight, bias, activation)

    return causal_conv1d_update


def _functions(original: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    return {_WHOLE: whole(original[_WHOLE]), _STEP: step(original[_STEP])}


@functools.cache
def _differs(whole: Any, step: Any) -> str:
    """What functions compute that ours do not."""
    theirs = {_WHOLE: whole, _STEP: step}
    run = functools.partial(functools.partial, _results)
    return difference(run(theirs), run(_functions(theirs)), _inputs)


def _inputs() -> tuple[Tensor, ...]:
    return tuple(map(torch.randn, ((2, 6, 7), (6, 4), (6,), (2, 6, 4))))


def _results(
    functions: dict[str, Any], x: Tensor, weight: Tensor, bias: Tensor, state: Tensor
) -> Tensor:
    results = []
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    was_disabled, logger.disabled = logger.disabled, True  # it would report a missing package
    try:
        for activation in (None, "silu"):
            results.append(functions[_WHOLE](x, weight, bias, activation=activation))
            with torch.no_grad():
                written = state.clone()
                stepped = functions[_STEP](x[..., :1], written, weight, bias, activation)
            results += [stepped, written]
    finally:
        logger.disabled = was_disabled
    return torch.cat([one.flatten() for one in results])


def _replaced(code: Any) -> dict[str, Any]:
    seen = code.__globals__
    known = torch.compiler.is_compiling() or not _differs(seen[_WHOLE], seen[_STEP])
    return _functions(seen) if known else {}


def refuse(module: Any) -> str:
    """Why a layer's convolutions stay the class's own; "" if they need not."""
    seen = _code_of(own_class(module)).__globals__
    return _differs(seen[_WHOLE], seen[_STEP])


def swap(module: Any) -> Swap:
    return rebind(module, _WHOLE, _replaced)
