"""Lion steps on lists of tensors, in place.

The formula is that of Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu and Le,
"Symbolic Discovery of Optimization Algorithms" (2023).
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
def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    state_steps: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic: bool = False,
) -> None:
    """Make one Lion step on every parameter, in place.

    With all arithmetic in float32::

        grad  = grad / grad_scale                               (written back, if given)
        g     = -grad if maximize else grad
        param = param - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * param)
        m     = beta2 * m + (1 - beta2) * g                     (exp_avgs)

    A NaN gradient makes its parameter NaN. The lists hold one entry for each parameter, all on one
    device; strides, streams and CUDA graphs are as for :func:`flexops.adam_`.

    Args:
        exp_avgs: float32, bfloat16 or float16 (each on its own), of their parameters' shapes,
            written.
        state_steps: as for :func:`flexops.adam_`, where ``stochastic`` draws its numbers from; or
            none.
        beta1, beta2: what the average weighs in the step, and in the next average, in [0, 1).
        weight_decay: rate of decoupled decay.
        stochastic: round averages in bfloat16 stochastically; needs ``state_steps``.
        params, grads, lr, maximize, grad_scale, found_inf: see :func:`flexops.adam_`.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the
            message names it.
    """


def _check(*args: Any, **named: Any) -> None:
    if (named or {"stochastic": args[-1]})["stochastic"] and not args[3]:
        raise ValueError("flexops.lion_: state_steps must be given to round stochastically")


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    state_steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    stochastic: bool,
) -> None:
    """One parameter at a time, in plain PyTorch and float32; waits for no device."""
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    writer = Writer(found_inf)
    steps = each_step(state_steps, params)
    for step in steps:
        writer.put(step, step + 1)
    for i, (param, grad_, exp_avg) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        grad = writer.gradient(grad_, grad_scale, maximize)
        value = param.float()
        average = exp_avg.float()
        mixed = average * beta1 + grad * (1 - beta1)
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())
        writer.put(param, value - value * (rate * weight_decay) - rate * direction)
        average = average * beta2 + grad * (1 - beta2)
        if stochastic and exp_avg.dtype == torch.bfloat16:
            average = round_to_bfloat16(
                average, step_noise(steps[i], [param, grad_, exp_avg]) & 0xFFFF
            )
        writer.put(exp_avg, average)


define("lion_", _reference, check=_check)


@checking()
def self_check(make: Make) -> Any:
    return three_steps(make, "lion_", 1, 0.1, 0.9, 0.99, 0.1, False, None, None, None, False)
