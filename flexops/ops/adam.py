"""Adam and AdamW steps on lists of tensors, in place.

The formula is that of Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), with
decoupled weight decay after Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019),
and AMSGrad after Reddi, Kale and Kumar (2018), each as ``torch.optim`` computes it.
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
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic: bool = False,
    grad_factor: Tensor | None = None,
) -> None:
    """Make one Adam step (AdamW with ``decoupled``) on every parameter, in place.

    With t the incremented step, and all arithmetic in float32::

        grad   = grad / grad_scale                                (written back, if given)
        g      = (-grad if maximize else grad) * grad_factor      (1 if it is None)
        param  = param * (1 - lr * weight_decay) if decoupled
                 else g = g + weight_decay * param
        m      = beta1 * m + (1 - beta1) * g                      (exp_avgs)
        v      = beta2 * v + (1 - beta2) * g * g                  (exp_avg_sqs)
        v'     = max(v', v) with amsgrad (max_exp_avg_sqs), else v
        param  = param - lr / (1 - beta1^t) * m / (sqrt(v') / sqrt(1 - beta2^t) + eps)

    The lists hold one entry for each parameter, all on one device. Any strides will do, but where
    the tensors of one parameter do not hold their elements in the same order without gaps, each
    costs a copy. On CUDA the step runs on the current stream, never waits for the device and can be
    captured in a CUDA graph.

    Native kernels take ``lr * weight_decay * param`` off a parameter, as torch's fused kernel for
    CUDA does: with decoupled decay, an element that is infinite becomes NaN. It stays infinite in
    plain PyTorch, as in torch's other implementations.

    Args:
        params: float32, bfloat16 or float16 tensors of any shape, written. They need not be of one
            dtype.
        grads: float32, bfloat16 or float16 (each on its own), of their parameters' shapes; written
            only with ``grad_scale``.
        exp_avgs, exp_avg_sqs: float32, bfloat16 or float16 (each on its own), of their parameters'
            shapes, written. The step takes them before they are rounded.
        max_exp_avg_sqs: with ``amsgrad``, like ``exp_avg_sqs``; without, ignored.
        state_steps: float32 tensors of one element, or one contiguous tensor of as many as there
            are parameters (which costs the host less): how many steps were made before;
            incremented.
        lr: learning rate. A float32 tensor of one element on the parameters' device is read when
            the step runs, so it can change under a captured graph; a tensor on the CPU, for
            parameters that are not, is read at once.
        beta1, beta2: decay rates of the two averages, in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 factor, or the rate of decoupled decay.
        amsgrad: use the largest second moment seen so far.
        maximize: ascend.
        decoupled: AdamW.
        grad_scale: float32, one element: what the gradients were multiplied by.
        found_inf: float32, one element: nonzero means that nothing at all is done, steps
            included.
        stochastic: round ``exp_avgs`` and ``exp_avg_sqs`` in bfloat16 to one of the two neighbours,
            to each as likely as it is near: to nearest, an average forgets nothing that is
            less than half of a unit in its last place, as is each step of one with ``beta2 =
            0.999``. The random numbers follow from the step's number and the element's place in its
            tensor alone, so every run and device draws the same.
        grad_factor: float32, one element: what the step multiplies gradients by, such as to clip
            them, without that they are written.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the
            message names it.
    """


@step_of_lists
def adam_copy_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic: bool = False,
    grad_factor: Tensor | None = None,
) -> None:
    """Make the step of :func:`adam_` and, in the same pass over memory, write each new parameter
    into ``copies`` as well.

    This is for offloaded training: the float32 parameters and their states stay on the CPU, and the
    bfloat16 or float16 copy is what is sent to the device. With ``found_inf`` nonzero the copies
    are not written either.

    Args:
        copies: float32, bfloat16 or float16 tensors of their parameters' shapes, written (rounded
            to nearest even). The others: see :func:`adam_`.

    Raises:
        TypeError, ValueError: as for :func:`adam_`.
    """


def _check(*lists: Any, amsgrad: bool, **_: Any) -> None:
    if amsgrad and lists[0] and not lists[4]:
        what = f"max_exp_avg_sqs must hold {len(lists[0])} tensors, as params does, got 0"
        raise ValueError(f"flexops.adam_: {what}")


def _reference(
    *lists: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic: bool = False,
    grad_factor: Tensor | None = None,
) -> None:
    """One parameter at a time, in plain PyTorch and float32; waits for no device."""
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    writer = Writer(found_inf)
    put = writer.put
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, *copies = lists
    steps = each_step(steps, params)
    for i, param in enumerate(params):
        step = steps[i] + 1
        put(steps[i], step)
        grad, value = writer.gradient(grads[i], grad_scale, maximize), param.float()
        grad = grad if grad_factor is None else grad * grad_factor.reshape(())
        if decoupled:
            value = value * (1 - rate * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * value
        exp_avg = exp_avgs[i].float().lerp(grad, 1 - beta1)
        exp_avg_sq = exp_avg_sqs[i].float() * beta2 + (1 - beta2) * grad * grad
        largest = torch.maximum(max_exp_avg_sqs[i].float(), exp_avg_sq) if amsgrad else exp_avg_sq
        # in float32, 1 - beta2 ** step would lose digits in the first steps
        count = step.double().reshape(())
        step_size, root = rate / (1 - beta1**count), (1 - beta2**count).sqrt()
        value = value - step_size * exp_avg / (largest.sqrt() / root + eps)
        for half, (state, average) in enumerate(
            ((exp_avgs[i], exp_avg), (exp_avg_sqs[i], exp_avg_sq))
        ):
            if stochastic and state.dtype == torch.bfloat16:
                noise = step_noise(
                    step,
                    [
                        tensors[i]
                        for tensors in (
                            params,
                            grads,
                            exp_avgs,
                            exp_avg_sqs,
                            max_exp_avg_sqs,
                            *copies,
                        )
                        if tensors
                    ],
                )
                average = round_to_bfloat16(average, noise >> 16 * half & 0xFFFF)
            put(state, average)
        if amsgrad:
            put(max_exp_avg_sqs[i], largest)
        put(param, value)
        if copies:
            put(copies[0][i], value)


define("adam_", _reference, check=_check)
define("adam_copy_", _reference, check=_check)


@checking()
def self_check(make: Make) -> Any:
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    return three_steps(make, "adam_", 3, **rates, amsgrad=True, maximize=False, decoupled=True)
