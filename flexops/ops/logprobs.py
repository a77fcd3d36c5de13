"""Log-probabilities of classes, and entropies, from logits.

A row of ``V`` logits ``y`` gives the distribution ``softmax(z)``, where ``z = y / temperature``, or
with a soft cap (Gemma 2, arXiv 2408.00118, section 2) ``z = softcap * tanh(y / softcap) /
temperature``. With ``p = softmax(z)``, ``lse = log(sum(exp(z)))`` and the row's class ``t``::

    log-probability = z[t] - lse
    entropy         = lse - sum(p * z)
    gradient of z   = grad * ((class == t) - p) - grad_entropy * p * (z - lse + entropy)

Everything is computed in float32, and so are the results, whatever the dtype of the logits. The
gradient has the dtype of the logits. A logit of -inf has probability 0, adds nothing to the entropy
and has gradient 0, with a soft cap too.

Rows whose class is ``ignore_index`` have log-probability, entropy and gradient 0; their logits are
not read. A class that is neither ``ignore_index`` nor in ``[0, V)`` makes the row's
log-probability, entropy and gradient NaN: nothing outside of the logits is read, and a check on the
host would synchronize the GPU.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._arguments import check_float32, number, soft_cap
from ._declared import define
from ._register import caller
from ._self_check import Make, checking
from .cross_entropy import check_arguments, loss_dtype

_LEAST = -200.0
"""Exponents are limited to this, so that a power of 0 times its exponent is 0 and not NaN."""


@overload
def logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: Literal[False] = False,
    ignore_index: int = -100,
) -> Tensor: ...
@overload
def logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
) -> Tensor | tuple[Tensor, Tensor]: ...
def logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each row's class, and with ``return_entropy`` the entropy of each
    row's distribution. Formulas, ignored and invalid classes: see the module.

    Args:
        logits: ``[..., V]``, float32, float16 or bfloat16, any strides; any ``V`` from 1 to 2**30.
            Classes are the last dimension.
        target: int64 ``[...]``: a class in ``[0, V)``, or ``ignore_index``, for each row.
        temperature: greater than 0; the logits are divided by it.
        softcap: ``c > 0`` makes the logits ``c * tanh(logits / c)``, before the temperature.
        return_entropy: also return the entropies.
        ignore_index: the class number of rows that do not count.

    Returns:
        float32 ``[...]``: natural logarithms; with ``return_entropy`` a tuple ``(logprobs,
        entropy)``, both in nats. The logits are read once.

    Raises:
        TypeError: ``logits`` or ``target`` is not a tensor of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``logits``, from both results. The backward pass reads the
    logits once and writes their gradient.
    """
    check_arguments("logprobs", "logits", logits, target, 0.0, 0.0, "none")
    check_numbers("flexops.logprobs:", temperature, softcap)
    if logits.shape[-1] == 0:
        raise ValueError(
            "flexops.logprobs: logits must have at least one class in their last dimension, got"
            f" shape {tuple(logits.shape)}"
        )
    shape = target.shape
    if len(shape) != 1:
        target, logits = target.reshape(-1), logits.reshape(-1, logits.shape[-1])
    result, entropy, _ = _FORWARD(logits, target, ignore_index, temperature, softcap or 0.0)
    if len(shape) != 1:
        result, entropy = result.view(shape), entropy.view(shape)
    return (result, entropy) if return_entropy else result


def check_numbers(where: str, temperature: float, softcap: float | None) -> None:
    divisor = number(f"{where} temperature", temperature)
    if not divisor > 0.0:
        raise ValueError(f"{where} temperature must be greater than 0, got {temperature}")
    if divisor < 1.0:  # any number above leads to a distribution
        check_float32(f"{where} temperature", divisor)
    if softcap is not None:
        soft_cap(f"{where} softcap", softcap, "None")


# ---- the ops: logits, [N, V], target [N] ----


def _scaled(logits: Tensor, temperature: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """``z``, and the soft cap's derivative."""
    y = logits.to(loss_dtype(logits))
    if softcap == 0.0:
        return y / temperature, None
    tanh, masked = torch.tanh(y / softcap), y == -torch.inf
    z = (softcap * tanh).masked_fill(masked, -torch.inf) / temperature
    return z, (1 - tanh.square()).masked_fill(masked, 0.0)


def _logprobs_reference(
    logits: Tensor, target: Tensor, ignore_index: int, temperature: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    z, _ = _scaled(logits, temperature, softcap)
    greatest = z.amax(1)
    greatest = greatest.masked_fill(greatest == -torch.inf, 0.0)
    exponents = z - greatest.unsqueeze(1)
    powers = torch.exp(exponents)
    total = powers.sum(1)
    log = total.log()
    chosen = exponents.gather(1, target.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
    entropy = log - (powers * exponents.clamp_min(_LEAST)).sum(1) / total
    invalid, ignored = (target < 0) | (target >= z.shape[1]), target == ignore_index
    result, entropy = (
        each.masked_fill(invalid, torch.nan).masked_fill(ignored, 0.0)
        for each in (chosen - log, entropy)
    )
    stats = torch.cat([greatest.masked_fill(ignored, 0.0), total.masked_fill(ignored, 0.0)])
    return result, entropy, stats


def _backward_reference(
    grad: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    entropy: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
) -> Tensor:
    z, slope = _scaled(logits, temperature, softcap)
    greatest, total = stats.view(2, -1, 1)
    exponents = z - greatest
    inner = grad.unsqueeze(1) + grad_entropy.unsqueeze(1) * (
        entropy.unsqueeze(1) - total.log() + exponents.clamp_min(_LEAST)
    )
    chosen = target.clamp(0, z.shape[1] - 1).unsqueeze(1)
    gradient: Tensor = (-torch.exp(exponents) / total * inner).scatter_add(
        1, chosen, grad.unsqueeze(1)
    )
    gradient = gradient / temperature if slope is None else gradient * slope / temperature
    gradient = gradient.masked_fill(((target < 0) | (target >= z.shape[1])).unsqueeze(1), torch.nan)
    gradient = gradient.masked_fill((target == ignore_index).unsqueeze(1), 0.0)
    result: Tensor = gradient.to(logits.dtype).contiguous()
    return result


def _backward_inplace_reference(
    grad: Tensor, grad_entropy: Tensor, logits: Tensor, *rest: Any
) -> None:
    logits.copy_(_backward_reference(grad, grad_entropy, logits, *rest))


def both_gradients(grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros for the result that the loss does not depend on."""
    known = grad if grad is not None else grad_entropy
    assert known is not None
    first, second = (torch.zeros_like(known) if g is None else g for g in (grad, grad_entropy))
    return first, second


def _setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    logits, target, *ctx.numbers = args
    _, entropy, stats = results
    ctx.save_for_backward(logits, target, stats, entropy)
    ctx.mark_non_differentiable(stats)


def _backward(
    ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    gradient: Tensor = torch.ops.flexops.logprobs_backward.default(
        *both_gradients(grad, grad_entropy), *ctx.saved_tensors, *ctx.numbers
    )
    return gradient, None, None, None, None


define(
    "logprobs",
    _logprobs_reference,
    setup_context=_setup,
    backward=_backward,
)
define("logprobs_backward", _backward_reference)
define("logprobs_backward_", _backward_inplace_reference)


_FORWARD = caller(torch.ops.flexops.logprobs.default)


@checking()
def self_check(make: Make) -> Any:
    """Results, and gradients both ways."""
    logits, target = make(9, 1031, scale=3.0), make.integers(0, 1031, 9)
    target[3] = -100
    numbers, ops = (-100, 0.7, 20.0), torch.ops.flexops
    result, entropy, stats = ops.logprobs(logits, target, *numbers)
    rest = logits, target, stats, entropy, *numbers
    grads = make(9), make(9)
    gradient = ops.logprobs_backward(*grads, *rest)
    ops.logprobs_backward_(*grads, *rest)
    return result, entropy, gradient, logits
