"""AdamW with 8-bit states."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from .._torch import sharded_tensors
from ..ops._multi_tensor import increment_versions
from ..ops._register import is_distributed
from ..ops.adam8bit import blocks
from ._fused import Bucket, FusedOptimizer, check_options, full_state, plain, rate_for, run, step_state


class AdamW8bit(FusedOptimizer):
    """AdamW whose two averages take 8 bits an element and two float32 scales for 256, instead of 32 bits each: 2.03 bytes of states an element
    instead of 8, and half of the memory traffic.

    The codes and the rounding are told at :func:`flexops.adam8bit_`. A parameter that holds fewer than ``min_8bit_size`` elements keeps float32
    states and is stepped as :class:`flexops.optim.AdamW` steps it. Takes what ``AdamW`` takes (except complex parameters, ``amsgrad`` and
    ``copies``): float32, bfloat16 and float16 parameters and gradients, DTensors (each rank quantizes its own part), ``GradScaler``, CUDA graphs.
    The states are ``step``, ``exp_avg`` (int8), ``exp_avg_sq`` (uint8), ``exp_avg_scale`` and ``exp_avg_sq_scale`` (float32); state dicts keep them
    as they are. Sharded states can be loaded again on as many ranks as saved them.

    Args:
        params: parameters, or groups of them with options of their own, as for ``torch.optim``.
        lr: learning rate, a float or a tensor of one element (read on the device, so that it may change under a captured CUDA graph).
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: rate of decoupled weight decay.
        maximize: ascend.
        min_8bit_size: the least number of elements of a parameter whose states are quantized. Small ones save little, and are often the
            sensitive ones.

    Raises:
        ValueError: an option is out of range.
    """

    _states = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        min_8bit_size: int = 4096,
    ) -> None:
        check_options("AdamW8bit", lr, betas, eps=eps, weight_decay=weight_decay, min_8bit_size=min_8bit_size)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize, "min_8bit_size": min_8bit_size}
        super().__init__(params, defaults)

    def _make_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": step_state(param)}
        if param.numel() < group["min_8bit_size"] or param.is_complex():
            return state | {"exp_avg": full_state(param), "exp_avg_sq": full_state(param)}
        state["exp_avg"] = torch.zeros_like(param, dtype=torch.int8, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.uint8, memory_format=torch.preserve_format)
        return state | {"exp_avg_scale": _scales(param), "exp_avg_sq_scale": _scales(param)}

    def _kinds(self, _params: list[Tensor], states: list[dict[str, Any]]) -> list[Hashable]:
        return ["exp_avg_scale" in state for state in states]

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        lr, lr_tensor = rate_for(group["lr"], bucket)
        numbers = lr, *group["betas"], group["eps"], group["weight_decay"]
        states, rest = bucket.states, (lr_tensor, grad_scale, found_inf)
        ops, maximize = torch.ops.flexops, bool(group["maximize"])
        if bucket.kind:
            lists = _row_major(bucket.params, bucket.grads, states["exp_avg"], states["exp_avg_sq"])
            run(ops.adam8bit_.default, *lists, states["exp_avg_scale"], states["exp_avg_sq_scale"], bucket.steps, *numbers, maximize, True, *rest)
        else:
            tensors: list[list[Tensor]] = [bucket.params, bucket.grads, states["exp_avg"], states["exp_avg_sq"], [], bucket.steps]
            names = "lr", "beta1", "beta2", "eps", "weight_decay"
            options = dict(zip(names, numbers, strict=True)) | dict(zip(("lr_tensor", "grad_scale", "found_inf"), rest, strict=True))
            run(ops.adam_.default, *tensors, amsgrad=False, maximize=maximize, decoupled=True, **options)
        increment_versions(bucket.params)


def _row_major(params: list[Tensor], *others: list[Tensor]) -> list[list[Tensor]]:
    """Views in which parameters that are dense, but not row-major (channels last, transposed), are: the op would copy them at every step."""
    lists = [params, *others]
    if all(map(Tensor.is_contiguous, params)):
        return lists
    orders = [sorted(range(param.dim()), key=param.stride, reverse=True) for param in params]
    return [[tensor.permute(order) for tensor, order in zip(tensors, orders, strict=True)] for tensors in lists]


def _scales(param: Tensor) -> Tensor:
    """Zero scales, one for each block; of a DTensor, one for each block of every rank's part."""
    if not is_distributed(param):
        return torch.zeros(blocks(param.numel()), dtype=torch.float32, device=param.device)
    sharded, distributed = sharded_tensors(), cast(Any, param)
    mesh, largest, placements = distributed.device_mesh, list(param.shape), []
    for dimension, placement in enumerate(distributed.placements):
        replicated = placement.is_replicate()
        placements.append(sharded.Replicate() if replicated else sharded.Shard(0))
        if not replicated:
            largest[placement.dim] = -(-largest[placement.dim] // mesh.size(dimension))
    count = blocks(torch.Size(largest).numel())  # of the largest part, so that all parts are of one size
    zeros = torch.zeros(count, dtype=torch.float32, device=plain(param).device)
    found: Tensor = sharded.DTensor.from_local(zeros, mesh, placements, run_check=False)
    return found
