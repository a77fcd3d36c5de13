"""Causal convolutions inside of transformers' linear-attention and state-space layers: the class's
own ``forward``, with other functions called ``causal_conv1d_fn`` and ``causal_conv1d_update`` among
the names that it sees."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.causal_conv1d import causal_conv1d
from ..ops.causal_conv1d import causal_conv1d_update as update
from .forwards import replacement
from .linears import DTYPES

_WHOLE, _STEP = "causal_conv1d_fn", "causal_conv1d_update"
_MOST_TAPS = 4


def _code_of(cls: Any) -> Any:
    """The class's own code: HF's kernels wraps it."""
    return inspect.unwrap(cls.forward)


def is_called(cls: type[nn.Module]) -> bool:
    forward = _code_of(cls)
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


def _functions(original: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """transformers' two functions, by flexops; what it does not support goes to the original
    ones."""
    whole, step = original[_WHOLE], original[_STEP]

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        packed = kwargs.get("seq_idx") is not None or kwargs.get("initial_states") is not None
        if packed or not _is_supported(hidden_states, weight, activation):
            return whole(hidden_states, weight, bias, activation=activation, **kwargs)
        return causal_conv1d(hidden_states, weight, bias, activation=activation)

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
            return step(hidden_states, conv_state, weight, bias, activation)
        return update(hidden_states, conv_state, weight, bias, activation)

    return {_WHOLE: causal_conv1d_fn, _STEP: causal_conv1d_update}


_made: dict[type, Callable[..., Any]] = {}
"""The code of each class, seeing our functions. No cache of functools', which torch.compile would
look into."""
_verdicts: dict[tuple[Any, Any], str] = {}


def _prepare(cls: Any) -> None:
    forward = _code_of(cls)
    names = {**forward.__globals__, **_functions(forward.__globals__)}
    del names["__name__"]  # by which torch.compile would look the names up in the module
    made = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    _made[cls] = made


@replacement
def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a layer with a causal convolution."""
    cls = type(module)
    if cls not in _made:
        _prepare(cls)
    return _made[cls](module, *args, **kwargs)


def refusal(cls: type[nn.Module]) -> str:
    """Why the functions that a class calls cannot be replaced; "" if they can: they compute the
    same on a small input, gradients and state included."""
    names: Any = _code_of(cls).__globals__
    original = {name: names[name] for name in (_WHOLE, _STEP)}
    key = (original[_WHOLE], original[_STEP])
    if key not in _verdicts:
        logger = logging.getLogger("transformers.integrations.hub_kernels")
        was_disabled, logger.disabled = logger.disabled, True  # it would report a missing package
        try:
            _verdicts[key] = "" if _agree(original) else "its convolution computes something else"
        except Exception as error:
            _verdicts[key] = f"its convolution raised {type(error).__name__}: {error}"
        finally:
            logger.disabled = was_disabled
    return _verdicts[key]


def _agree(original: dict[str, Any]) -> bool:
    with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        x, weight, bias, state = draw(2, 6, 7), draw(6, 4), draw(6), draw(2, 6, 4)
        arguments = [each.requires_grad_() for each in (x, weight, bias)]
        results = []
        for functions in (original, _functions(original)):
            made = []
            for activation in (None, "silu"):
                out = functions[_WHOLE](*arguments, activation=activation)
                made += [out, *torch.autograd.grad(out.square().sum(), arguments)]
                with torch.no_grad():
                    written = state.clone()
                    step = functions[_STEP](x[..., :1], written, weight, bias, activation)
                made += [step, written]
            results.append(made)
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(*results, strict=True)
    )
