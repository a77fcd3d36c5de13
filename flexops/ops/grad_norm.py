"""The norm of many tensors as one vector, and scaling them down by it, without waiting for the
device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._arguments import number
from ._declared import define
from ._multi_tensor import call_lists, listed, write_lists
from ._self_check import Make, checking


def grad_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Compute the p-norm of all tensors as if they were one vector.

    Sums are in float32, in an order that depends on nothing but the sizes: the same input gives the
    same bits.

    Args:
        grads: float32, bfloat16 or float16 tensors of any shapes and strides on one device. None at
            all give a norm of 0 on the CPU.
        norm_type: p, more than 0; ``inf`` for the largest magnitude.

    Returns:
        A float32 tensor without dimensions, on the tensors' device. NaN if one is among the
        elements.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted, or ``norm_type`` is
            no number; the message names it.
        ValueError: an entry is on another device, or ``norm_type`` is not accepted.
    """
    norm_type = number("flexops.grad_norm: norm_type", norm_type)
    if not norm_type > 0:
        raise ValueError(
            "flexops.grad_norm: norm_type must be more than 0 (inf for the largest magnitude),"
            f" got {norm_type}"
        )
    (tensors,) = listed("grad_norm", grads=grads)
    if not tensors:
        return torch.zeros(())
    norm: Tensor = call_lists(torch.ops.flexops.grad_norm.default, (tensors, norm_type), [])
    return norm


def clip_grads_(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Scale all tensors in place by ``max_norm / (total_norm + 1e-6)``, if that is less than 1. The
    norm is read on the device.

    Args:
        grads: float32, bfloat16 or float16 tensors of any shapes on one device, written unless the
            factor is 1.
        total_norm: a float32 tensor of one element on their device. NaN makes everything NaN, as in
            torch.
        max_norm: what the norm becomes, if it is larger.

    Raises:
        TypeError: an entry or ``total_norm`` is no tensor or has a dtype that is not accepted, or
            ``max_norm`` is no number; the message names it.
        ValueError: an entry is on another device.
    """
    (tensors,) = listed("clip_grads_", grads=grads)
    max_norm = number("flexops.clip_grads_: max_norm", max_norm)
    given: Any = total_norm
    if not isinstance(given, Tensor):
        found = type(given).__name__
        wanted = "a float32 tensor of one element"
        raise TypeError(f"flexops.clip_grads_: total_norm must be {wanted}, got {found}")
    if tensors:
        args = (tensors, total_norm, max_norm)
        write_lists(torch.ops.flexops.clip_grads_.default, args, tensors)


def _norm_reference(grads: list[Tensor], norm_type: float) -> Tensor:
    norms = [
        (
            torch.linalg.vector_norm(grad.float(), norm_type)
            if grad.numel()
            else grad.new_zeros((), dtype=torch.float32)
        )
        for grad in grads
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _clip_reference(grads: list[Tensor], total_norm: Tensor, max_norm: float) -> None:
    factor = (max_norm / (total_norm.reshape(()) + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.copy_(grad.float() * factor)


define("grad_norm", _norm_reference)
define("clip_grads_", _clip_reference)


@checking()
def self_check(make: Make) -> Any:
    """Each norm, in units of about its size, and what clipping by it gives."""
    results: list[Any] = []
    for norm_type in (2.0, 1.0, math.inf):
        grads = [make(size) for size in (1237, 5, 64)]
        norm = torch.ops.flexops.grad_norm(grads, norm_type)
        torch.ops.flexops.clip_grads_(grads, norm, 0.5)
        results += [norm / 1306 ** (1 / norm_type), grads]
    return results
