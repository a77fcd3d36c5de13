"""Adagrad steps on lists of tensors, in place.

The formula is that of Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
and Stochastic Optimization" (2011), as ``torch.optim.Adagrad`` computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._declared import define
from ._multi_tensor import (
    Writer,
    each_step,
    step_of_lists,
    three_steps,
)
from ._self_check import Make, checking


@step_of_lists
def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make one Adagrad step on every parameter, in place.

    With t the incremented step, and all arithmetic in float32::

        grad  = grad / grad_scale                               (written back, if given)
        g     = (-grad if maximize else grad) + weight_decay * param
        s     = s + g * g                                       (sums)
        param = param - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    The lists hold one entry for each parameter, all on one device; strides, streams and CUDA graphs
    are as for :func:`flexops.adam_`.

    Args:
        sums: float32, of their parameters' shapes, written.
        lr_decay: how fast the learning rate falls.
        weight_decay: L2 factor, added to the gradient.
        params, grads, state_steps, lr, eps, maximize, grad_scale, found_inf: see
            :func:`flexops.adam_`.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the
            message names it.
    """


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    state_steps: list[Tensor],
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One parameter at a time, in plain PyTorch and float32; waits for no device."""
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    writer = Writer(found_inf)
    for param, grad_, sum_, steps in zip(
        params, grads, sums, each_step(state_steps, params), strict=True
    ):
        step = steps + 1
        writer.put(steps, step)
        grad, value = writer.gradient(grad_, grad_scale, maximize), param.float()
        if weight_decay:
            grad = grad + weight_decay * value
        total = sum_ + grad * grad
        writer.put(
            param,
            value - rate / (1 + (step.reshape(()) - 1) * lr_decay) * grad / (total.sqrt() + eps),
        )
        writer.put(sum_, total)


define("adagrad_", _reference)


@checking()
def self_check(make: Make) -> Any:
    return three_steps(make, "adagrad_", 1, 0.1, 0.1, 0.1, 1e-10, False, None, None, None)
