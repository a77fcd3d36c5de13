"""Adam and AdamW steps on lists of tensors, in place.

The formula is that of Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), with decoupled weight decay after Loshchilov and Hutter,
"Decoupled Weight Decay Regularization" (2019), and AMSGrad after Reddi, Kale and Kumar (2018), each as ``torch.optim`` computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._register import define

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What parameters, gradients and copies may be. States and steps are float32."""

_LISTS = "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps"
_NUMBERS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, bool maximize, bool decoupled, "
    "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None"
)
_LIST_NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "copies")


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
) -> None:
    """Make one Adam step (AdamW with ``decoupled``) on every parameter, in place.

    With t the incremented step, and all arithmetic in float32::

        grad   = grad / grad_scale                                    (written back, if a grad_scale is given)
        g      = -grad if maximize else grad
        param  = param * (1 - lr * weight_decay) if decoupled         else g = g + weight_decay * param
        m      = beta1 * m + (1 - beta1) * g                          (exp_avgs)
        v      = beta2 * v + (1 - beta2) * g * g                      (exp_avg_sqs)
        v'     = max(v', v) with amsgrad (max_exp_avg_sqs), else v
        param  = param - lr / (1 - beta1^t) * m / (sqrt(v') / sqrt(1 - beta2^t) + eps)

    The lists hold one entry for each parameter, all on one device. Any strides will do, but where the tensors of one parameter do not hold their
    elements in the same order without gaps, each costs a copy. On CUDA the step runs on the current stream, never waits for the device and can be
    captured in a CUDA graph.

    Args:
        params: float32, bfloat16 or float16 tensors of any shape, written. They need not be of one dtype.
        grads: float32, bfloat16 or float16 (each on its own), of their parameters' shapes; written only with ``grad_scale``.
        exp_avgs, exp_avg_sqs: float32, of their parameters' shapes, written.
        max_exp_avg_sqs: with ``amsgrad``, float32 and of their parameters' shapes, written; without, ignored.
        state_steps: float32 tensors of one element: how many steps were made before; incremented.
        lr: learning rate. A float32 tensor of one element on the parameters' device is read when the step runs, so it can change under a captured
            graph; a tensor on the CPU, for parameters that are not, is read at once.
        beta1, beta2: decay rates of the two averages, in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 factor, or the rate of decoupled decay.
        amsgrad: use the largest second moment seen so far.
        maximize: ascend.
        decoupled: AdamW.
        grad_scale: float32, one element: what the gradients were multiplied by.
        found_inf: float32, one element: nonzero means that nothing at all is done, steps included.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the message names it.
    """
    lists = [_listed(tensors) for tensors in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else (), state_steps)]
    _call(torch.ops.flexops.adam_, "adam_", lists, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled, grad_scale, found_inf)


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
) -> None:
    """Make the step of :func:`adam_` and, in the same pass over memory, write each new parameter into ``copies`` as well.

    This is for offloaded training: the float32 parameters and their states stay on the CPU, and the bfloat16 or float16 copy is what is sent to
    the device. With ``found_inf`` nonzero the copies are not written either.

    Args:
        copies: float32, bfloat16 or float16 tensors of their parameters' shapes, written (rounded to nearest even). The others: see :func:`adam_`.

    Raises:
        TypeError, ValueError: as for :func:`adam_`.
    """
    lists = [_listed(tensors) for tensors in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else (), state_steps, copies)]
    _call(torch.ops.flexops.adam_copy_, "adam_copy_", lists, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled, grad_scale, found_inf)


def split_lr(lr: float | Tensor, on_cpu: bool) -> tuple[float, Tensor | None]:
    """The learning rate as the ops take it: a number, or a tensor that overrides the number."""
    if not isinstance(lr, Tensor):
        return float(lr), None
    if on_cpu or not lr.is_cpu:
        return 0.0, lr if lr.dtype == torch.float32 else lr.float()
    return float(lr), None  # no synchronisation: it is on the CPU already


def increment_versions(tensors: list[Tensor]) -> None:
    """Tell autograd that the tensors were written: a backward pass that had saved one of them then says so instead of being silently wrong."""
    if torch.compiler.is_compiling():
        return  # the compiler sees the mutation in the schema
    tensors = [tensor for tensor in tensors if not tensor.is_inference()] if torch.is_inference_mode_enabled() else tensors
    if _counts_many_at_once():
        torch.autograd.graph.increment_version(tensors)
    else:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


@functools.cache
def _counts_many_at_once() -> bool:
    """Whether this torch's ``increment_version`` takes a list (torch 2.4's does not)."""
    try:
        torch.autograd.graph.increment_version([torch.empty(0)])
    except (RuntimeError, TypeError):
        return False
    return True


def _call(
    op: Any,
    name: str,
    lists: list[list[Tensor]],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    _check_numbers(name, lr, beta1, beta2, eps, weight_decay)
    if not lists[0]:  # no tensor, so the dispatcher would not know where to go
        _check_lists(name, lists, amsgrad)
        return
    first = lists[0][0]
    number, tensor = split_lr(lr, not isinstance(first, Tensor) or first.is_cpu)
    try:
        with torch.no_grad():
            op(
                *lists,
                lr=number,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
                amsgrad=amsgrad,
                maximize=maximize,
                decoupled=decoupled,
                lr_tensor=tensor,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
    except (RuntimeError, TypeError, NotImplementedError):
        # Checking thousands of tensors in Python at every call would cost more than the step. The native kernels check, too: only when
        # they have refused is it found out here what to tell, in the same words and with the same type for every backend.
        _check(name, lists, amsgrad, tensor, grad_scale, found_inf)
        raise
    increment_versions(lists[0] + (lists[6] if len(lists) > 6 else []))


def _listed(tensors: Sequence[Tensor]) -> list[Tensor]:
    return tensors if isinstance(tensors, list) else list(tensors)


def _check_numbers(name: str, lr: float | Tensor, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    for label, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"flexops::{name}: {label} must be in [0, 1), got {value}")
    for label, value in (("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            raise ValueError(f"flexops::{name}: {label} must not be negative, got {value}")
    if not isinstance(lr, Tensor) and not lr >= 0.0:
        raise ValueError(f"flexops::{name}: lr must not be negative, got {lr}")


def _check(name: str, lists: list[list[Tensor]], amsgrad: bool, lr_tensor: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Raise if the tensors do not fit together, naming the first that does not."""
    _check_lists(name, lists, amsgrad)
    device = lists[0][0].device
    for label, tensor in (("lr", lr_tensor), ("grad_scale", grad_scale), ("found_inf", found_inf)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.numel() != 1:
            raise TypeError(f"flexops::{name}: {label} must be a float32 tensor of one element")
        if tensor.device != device:
            raise ValueError(f"flexops::{name}: {label} must be on the device of params, {device}, got {tensor.device}")


def _check_lists(name: str, lists: list[list[Tensor]], amsgrad: bool) -> None:
    params = lists[0]
    for label, tensors in zip(_LIST_NAMES, lists, strict=False):  # adam_ has no copies
        optional = label == "max_exp_avg_sqs" and not amsgrad
        if len(tensors) != len(params) and not optional:
            raise ValueError(f"flexops::{name}: {label} must hold {len(params)} tensors, as params does, got {len(tensors)}")
        for index, tensor in enumerate(() if optional else tensors):
            _check_tensor(name, label, index, tensor, params)


def _check_tensor(name: str, label: str, index: int, tensor: Any, params: list[Tensor]) -> None:
    where = f"flexops::{name}: {label}[{index}]"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{where} must be a dense (strided) tensor, got {tensor.layout}")
    any_width = label in ("params", "grads", "copies")
    if tensor.dtype not in (PARAM_DTYPES if any_width else (torch.float32,)):
        raise TypeError(f"{where} must be {'float32, bfloat16 or float16' if any_width else 'float32'}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device != params[0].device:
        raise ValueError(f"{where} must be on the device of params[0], {params[0].device}, got {tensor.device}")
    if label == "state_steps":
        if tensor.numel() != 1:
            raise ValueError(f"{where} must have one element, got shape {list(tensor.shape)}")
    elif tensor.shape != params[index].shape:
        raise ValueError(f"{where} must have the shape of its parameter, {list(params[index].shape)}, got {list(tensor.shape)}")


def _reference_step(
    lists: list[list[Tensor]],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One parameter at a time, in plain PyTorch and float32; waits for no device."""
    skip = None if found_inf is None else found_inf.reshape(()) != 0

    def put(target: Tensor, value: Tensor) -> None:
        target.copy_(value if skip is None else torch.where(skip, target, value.to(target.dtype)))

    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, *copies = lists
    for i, param in enumerate(params):
        step = steps[i] + 1
        put(steps[i], step)
        grad, value = grads[i].float(), param.float()
        if grad_scale is not None:
            grad = grad / grad_scale.reshape(())
            put(grads[i], grad)
        if maximize:
            grad = -grad
        if decoupled:
            value = value * (1 - lr * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * value
        exp_avg = exp_avgs[i].lerp(grad, 1 - beta1)
        exp_avg_sq = exp_avg_sqs[i] * beta2 + (1 - beta2) * grad * grad
        largest = torch.maximum(max_exp_avg_sqs[i], exp_avg_sq) if amsgrad else exp_avg_sq
        count = step.double().reshape(())  # in float32, 1 - beta2 ** step would lose digits in the first steps
        step_size, root = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
        value = value - step_size * exp_avg / (largest.sqrt() / root + eps)
        put(exp_avgs[i], exp_avg)
        put(exp_avg_sqs[i], exp_avg_sq)
        if amsgrad:
            put(max_exp_avg_sqs[i], largest)
        put(param, value)
        if copies:
            put(copies[0][i], value)


def _reference(name: str, lists: list[list[Tensor]], lr: float, lr_tensor: Tensor | None, *rest: Any) -> None:
    if not lists[0]:
        return
    amsgrad, (grad_scale, found_inf) = rest[4], rest[-2:]
    _check(name, lists, amsgrad, lr_tensor, grad_scale, found_inf)
    _reference_step(lists, lr if lr_tensor is None else lr_tensor.reshape(()), *rest)


def _adam_reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
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
) -> None:
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps]
    _reference("adam_", lists, lr, lr_tensor, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled, grad_scale, found_inf)


def _adam_copy_reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    copies: list[Tensor],
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
) -> None:
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, copies]
    _reference("adam_copy_", lists, lr, lr_tensor, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled, grad_scale, found_inf)


def _fake(*args: Any, **kwargs: Any) -> None:
    """Nothing is returned, so there is nothing to describe."""


define("adam", f"adam_({_LISTS}, *, {_NUMBERS}) -> ()", _adam_reference, _fake)
define("adam", f"adam_copy_({_LISTS}, Tensor(g!)[] copies, *, {_NUMBERS}) -> ()", _adam_copy_reference, _fake)


def self_check(device: str) -> float:
    """Three AdamW steps on random float32 numbers, by whatever kernel calls reach on ``device`` and by the reference: the largest difference.

    For ``flexops doctor``. The parameters are of size 1 and a step of size 0.1, so a wrong formula shows as 0.01 and more, rounding as 1e-6.
    """
    generator = torch.Generator().manual_seed(0)
    params, *grads = (torch.randn(1237, generator=generator).to(device) for _ in range(4))
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": True, "maximize": False, "decoupled": True}
    results = []
    steps: tuple[Any, Any] = (torch.ops.flexops.adam_, _adam_reference)
    for step in steps:
        param, states, count = params.clone(), [torch.zeros_like(params) for _ in range(3)], torch.zeros((), device=device)
        for grad in grads:
            step([param], [grad], *([state] for state in states), [count], **numbers)
        results.append(torch.stack([param, *states]))
    return float((results[0] - results[1]).abs().max())
