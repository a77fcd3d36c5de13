"""LAMB steps on lists of tensors, in place.

The formula is that of You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer and Hsieh,
"Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes" (2020), with phi(z) = z. A
step has two passes. They are ops of their own, too, so that the norms of a tensor that lies on
several ranks can be added up between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._multi_tensor import (
    Writer,
    each_step,
    round_to_bfloat16,
    step_noise,
    step_of_lists,
    three_steps,
)
from ._self_check import Make, checking


@step_of_lists
def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adapt: bool = True,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic: bool = False,
) -> None:
    """Make one LAMB step on every parameter, in place.

    With t the incremented step, and all arithmetic in float32::

        grad  = grad / grad_scale                               (written back, if given)
        g     = -grad if maximize else grad
        m     = beta1 * m + (1 - beta1) * g                     (exp_avgs)
        v     = beta2 * v + (1 - beta2) * g * g                 (exp_avg_sqs)
        u     = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * param
        ratio = |param| / |u|                                   (2-norms of the whole tensor;
                                                                1 if one is 0, or without adapt)
        param = param - lr * ratio * u

    The norms stay on the device, and are added up in the same order every time. The lists hold one
    entry for each parameter, all on one device; strides, streams and CUDA graphs are as for
    :func:`flexops.adam_`.

    Args:
        weight_decay: what of the parameter is added to its update, before the trust ratio.
        exp_avgs, exp_avg_sqs: float32, bfloat16 or float16 (each on its own), of their parameters'
            shapes, written. The norm of the update is taken of them before they are rounded, the
            step of what is kept.
        adapt: whether there is a trust ratio.
        params, grads, state_steps, lr, beta1, beta2, eps: see :func:`flexops.adam_`.
        maximize, grad_scale, found_inf, stochastic: see :func:`flexops.adam_`.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the
            message names it.
    """


def _update(
    value: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    # in float32, 1 - beta2 ** step would lose digits in the first steps
    count = step.double().reshape(())
    inverse1, inverse2 = (1 / (1 - beta1**count)).float(), (1 / (1 - beta2**count).sqrt()).float()
    return exp_avg * inverse1 / (exp_avg_sq.sqrt() * inverse2 + eps) + weight_decay * value


def _moments_reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    stochastic: bool = False,
) -> Tensor:
    """One parameter at a time, in plain PyTorch and float32; waits for no device. Returns
    ``[parameters, 2]``: the sums of squares of parameter and update."""
    lists = [params, grads, exp_avgs, exp_avg_sqs, state_steps]
    lists[-1] = each_step(state_steps, params)
    writer = Writer(found_inf)
    norms = []
    for param, grad_, exp_avg, exp_avg_sq, steps in zip(*lists, strict=True):
        writer.put(steps, steps + 1)
        grad, value = writer.gradient(grad_, grad_scale, maximize), param.float()
        averages = (
            exp_avg.float() * beta1 + grad * (1 - beta1),
            exp_avg_sq.float() * beta2 + (1 - beta2) * grad * grad,
        )
        update = _update(value, *averages, steps, beta1, beta2, eps, weight_decay)
        for half, (state, average) in enumerate(zip((exp_avg, exp_avg_sq), averages, strict=True)):
            if stochastic and state.dtype == torch.bfloat16:
                average = round_to_bfloat16(
                    average,
                    step_noise(steps, [param, grad_, exp_avg, exp_avg_sq]) >> 16 * half & 0xFFFF,
                )
            writer.put(state, average)
        norms.append(torch.stack([value.square().sum(), update.square().sum()]))
    result = torch.stack(norms)
    return result if found_inf is None else torch.where(found_inf.reshape(()) != 0, 0.0, result)


def _apply_reference(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adapt: bool,
    lr_tensor: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    lists = [params, exp_avgs, exp_avg_sqs, state_steps]
    lists[-1] = each_step(state_steps, params)
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    writer = Writer(found_inf)
    for i, (param, exp_avg, exp_avg_sq, step) in enumerate(zip(*lists, strict=True)):
        value = param.float()
        update = _update(
            value, exp_avg.float(), exp_avg_sq.float(), step, beta1, beta2, eps, weight_decay
        )
        of_param, of_update = norms[i].sqrt().unbind()
        ratio = (
            torch.where((of_param > 0) & (of_update > 0), of_param / of_update, 1.0)
            if adapt
            else 1.0
        )
        writer.put(param, value - rate * ratio * update)


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adapt: bool,
    maximize: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    stochastic: bool = False,
) -> None:
    numbers, states = (beta1, beta2, eps, weight_decay), (exp_avgs, exp_avg_sqs, state_steps)
    norms = _moments_reference(
        params, grads, *states, *numbers, maximize, grad_scale, found_inf, stochastic
    )
    _apply_reference(params, *states, norms, lr, *numbers, adapt, lr_tensor, found_inf)


define("lamb_", _reference)
define("lamb_moments_", _moments_reference)
define("lamb_apply_", _apply_reference)


@checking()
def self_check(make: Make) -> Any:
    numbers = 0.1, 0.9, 0.999, 1e-6, 0.1, True, False, None, None, None
    return three_steps(make, "lamb_", 2, *numbers)
