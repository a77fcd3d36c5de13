"""Clipping gradients by their norm."""

from __future__ import annotations

import math
import operator
import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._torch import sharded_tensors
from ..ops._arguments import number
from ..ops._multi_tensor import PARAM_DTYPES
from ..ops._register import is_distributed
from ..ops.grad_norm import clip_grads_, grad_norm
from ._fused import moved, plain, sharded_dimensions

_torchs = torch.nn.utils.clip_grad_norm_  # as it is now: some put ours in its place
_PLAIN_TYPES = {Tensor}
_TAKEN = {(dtype, torch.strided) for dtype in PARAM_DTYPES}
_kind = operator.attrgetter("dtype", "layout")


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the parameters' gradients in place so that their norm, as one vector, is at most
    ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``.

    What is different: one pass over memory to measure and one to scale, and the second is left out,
    on the device, if there is nothing to scale down; the norm is float32 whatever the gradients
    are, and the same in every run; of DTensors it is added up over the ranks that share them (by
    ``torch.distributed``), and comes as a plain tensor. The host waits for no device, unless
    ``error_if_nonfinite`` asks for it.

    Args:
        parameters: parameters, or one; those without a gradient are passed over. Gradients that are
            not float32, bfloat16 or float16, or not dense, are left to torch's function, all of
            them together.
        max_norm: the largest norm to keep.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is NaN or infinite. Waits for the device.
        foreach: accepted, and without effect.

    Returns:
        The norm before clipping, without dimensions, on the first gradient's device.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        TypeError: ``parameters`` is no tensor and no iterable of tensors, or a number is none.
    """
    where = "flexops.optim.clip_grad_norm_:"
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    given: Any = parameters
    if not isinstance(given, Iterable):
        found, fix = type(given).__name__, "give it model.parameters()"
        raise TypeError(f"{where} parameters must be tensors, got {found}. fix: {fix}")
    generated = isinstance(parameters, types.GeneratorType)
    parameters = list(parameters)
    if generated and not parameters:
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
        )
    try:
        grads = [grad for param in parameters if (grad := param.grad) is not None]
    except AttributeError:
        index, wrong = next((i, x) for i, x in enumerate(parameters) if not isinstance(x, Tensor))
        found = type(wrong).__name__
        raise TypeError(f"{where} parameters[{index}] must be a tensor, got {found}") from None
    max_norm = number(f"{where} max_norm", max_norm)
    norm_type = number(f"{where} norm_type", norm_type)
    if not grads:
        return torch.zeros(())
    if not norm_type > 0 or not set(map(_kind, grads)) <= _TAKEN:
        return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    groups = _groups(grads)
    norm = _norm_of(groups, norm_type, grads[0].device)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so"
            " it cannot be clipped. To disable this error and scale the gradients by the"
            " non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    for (device, _), group in groups.items():
        clip_grads_(_plain(group), moved(norm, device), max_norm)
    return norm


def total_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of gradients that :func:`clip_grad_norm_` takes, on the first one's device; of
    DTensors, added up over ranks."""
    return _norm_of(_groups(grads), 2.0, grads[0].device)


Group = tuple[torch.device, tuple[Any, ...]]


def _norm_of(groups: dict[Group, list[Tensor]], norm_type: float, device: torch.device) -> Tensor:
    return _total([_norm(group, norm_type) for group in groups.items()], norm_type, device)


def _groups(grads: list[Tensor]) -> dict[Group, list[Tensor]]:
    """By device, and by the ranks over which they are sharded."""
    if set(map(type, grads)) <= _PLAIN_TYPES and len(set(map(Tensor.get_device, grads))) == 1:
        return {(grads[0].device, ()): grads}
    groups: dict[Group, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, sharded_dimensions(grad)), []).append(grad)
    return groups


def _norm(group: tuple[Group, list[Tensor]], norm_type: float) -> Tensor:
    """The norm of a group, of which this rank may have a part only."""
    (_, sharded), grads = group
    alike = set(map(type, grads)) <= _PLAIN_TYPES
    norm = grad_norm(grads if alike else [plain(_added_up(grad)) for grad in grads], norm_type)
    if not sharded:
        return norm
    mesh, *dimensions = sharded
    for dimension in dimensions:
        ranks = mesh.get_group(dimension)
        if norm_type == math.inf:
            # what a maximum makes of NaN is not defined
            pair = torch.stack([norm.nan_to_num(0.0, posinf=math.inf), norm.isnan().float()])
            torch.distributed.all_reduce(pair, torch.distributed.ReduceOp.MAX, group=ranks)
            norm = torch.where(pair[1] > 0, math.nan, pair[0])
        else:
            power = norm.pow(norm_type)
            torch.distributed.all_reduce(power, group=ranks)
            norm = power.pow(1 / norm_type)
    return norm


def _added_up(grad: Tensor) -> Tensor:
    """The gradient as a whole, if it is a sum that is still spread over ranks. (Scaling the parts
    scales the sum.)"""
    if not is_distributed(grad):
        return grad
    distributed: Any = grad
    if not any(placement.is_partial() for placement in distributed.placements):
        return grad
    replicate = sharded_tensors().Replicate()
    whole = [
        replicate if placement.is_partial() else placement for placement in distributed.placements
    ]
    added: Tensor = distributed.redistribute(distributed.device_mesh, whole)
    return added


def _plain(grads: list[Tensor]) -> list[Tensor]:
    return grads if set(map(type, grads)) <= _PLAIN_TYPES else list(map(plain, grads))


def _total(norms: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([moved(norm, device) for norm in norms]), norm_type
    )
    return total
