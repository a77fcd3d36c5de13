"""Lion steps on lists of tensors, in place.

The formula is that of Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu and Le, "Symbolic Discovery of Optimization Algorithms"
(2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._multi_tensor import PARAM_DTYPES, Lists, Writer, call_lists, check_lists, check_rates, largest_difference, listed, nothing, on_cpu, split_lr
from ._register import define

_SCHEMA = (
    "lion_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, float lr, float beta1, float beta2, float weight_decay, bool maximize, "
    "Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf) -> ()"
)


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make one Lion step on every parameter, in place.

    With all arithmetic in float32::

        grad  = grad / grad_scale                               (written back, if a grad_scale is given)
        g     = -grad if maximize else grad
        param = param - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * param)
        m     = beta2 * m + (1 - beta2) * g                     (exp_avgs)

    A NaN gradient makes its parameter NaN. The lists hold one entry for each parameter, all on one device; strides, streams and CUDA graphs are
    as for :func:`flexops.adam_`.

    Args:
        exp_avgs: float32, of their parameters' shapes, written.
        beta1, beta2: what the average weighs in the step, and in the next average, in [0, 1).
        weight_decay: rate of decoupled decay.
        params, grads, lr, maximize, grad_scale, found_inf: see :func:`flexops.adam_`.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the message names it.
    """
    check_rates("lion_", lr, (beta1, beta2), weight_decay=weight_decay)
    lists = listed("lion_", params=params, grads=grads, exp_avgs=exp_avgs)
    number, tensor = split_lr(lr, on_cpu(lists[0]))
    args = (*lists, number, beta1, beta2, weight_decay, maximize, tensor, grad_scale, found_inf)
    call_lists(torch.ops.flexops.lion_.default, args, lists[0], lambda: _check(lists, tensor, grad_scale, found_inf))


def _check(lists: list[list[Tensor]], lr_tensor: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    wanted: Lists = {"params": (lists[0], PARAM_DTYPES), "grads": (lists[1], PARAM_DTYPES), "exp_avgs": (lists[2], (torch.float32,))}
    check_lists("lion_", wanted, lr=lr_tensor, grad_scale=grad_scale, found_inf=found_inf)


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One parameter at a time, in plain PyTorch and float32; waits for no device."""
    _check([params, grads, exp_avgs], lr_tensor, grad_scale, found_inf)
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    writer = Writer(found_inf)
    for param, grad_, exp_avg in zip(params, grads, exp_avgs, strict=True):
        grad, value = writer.gradient(grad_, grad_scale, maximize), param.float()
        mixed = exp_avg * beta1 + grad * (1 - beta1)
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())
        writer.put(param, value - value * (rate * weight_decay) - rate * direction)
        writer.put(exp_avg, exp_avg * beta2 + grad * (1 - beta2))


define("lion", _SCHEMA, _reference, nothing)


def self_check(device: str) -> float:
    """Three steps by whatever kernel calls reach on ``device`` and by the reference: the largest difference."""
    steps: tuple[Any, Any] = torch.ops.flexops.lion_, _reference
    return largest_difference(device, 1, [lambda *lists, step=step: step(*lists[:3], 0.1, 0.9, 0.99, 0.1, False, None, None, None) for step in steps])
