"""AdamW with 8-bit states."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from .._torch import sharded_tensors
from ..ops._multi_tensor import increment_versions
from ..ops._register import is_distributed
from ..ops.adam8bit import blocks, quantize_averages
from ._fused import (
    Bucket,
    FusedOptimizer,
    check_options,
    full_state,
    plain,
    run,
    step_state,
)
from ._loading import CODES, check_floats, check_names, renamed, row_major

_CODED = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(FusedOptimizer):
    """AdamW whose two averages take 8 bits an element and two float32 scales for 256, instead of 32
    bits each: 2.03 bytes of states an element instead of 8, and half of the memory traffic.

    :func:`flexops.adam8bit_` documents codes and rounding. A parameter that holds fewer
    than ``min_8bit_size`` elements keeps float32 states and is stepped as
    :class:`flexops.optim.AdamW` steps it. Takes what ``AdamW`` takes (except complex parameters,
    ``amsgrad`` and ``copies``): float32, bfloat16 and float16 parameters and gradients, DTensors
    (each rank quantizes its own part), ``GradScaler``, CUDA graphs. The states are ``step``,
    ``exp_avg_codes`` (int8), ``exp_avg_sq_codes`` (uint8), ``exp_avg_scale`` and
    ``exp_avg_sq_scale`` (float32); state dicts keep them as they are. A parameter with float32
    states has ``exp_avg`` and ``exp_avg_sq`` instead. Sharded states can be loaded again on as many
    ranks as saved them.

    ``load_state_dict`` quantizes the float32 states of :class:`flexops.optim.AdamW` and
    ``torch.optim.AdamW``; flexops' ``AdamW``, ``Adam`` and ``LAMB`` load states of 8 bits.
    ``torch.optim.AdamW`` cannot: its first step fails with ``KeyError: 'exp_avg'``. Load the states
    into :class:`flexops.optim.AdamW` and save its state dict for it. Checkpoints in which codes are
    named ``exp_avg`` and ``exp_avg_sq`` load as before.

    Args:
        params, lr: as for :class:`flexops.optim.Adam`.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: rate of decoupled weight decay.
        maximize: ascend.
        min_8bit_size: the least number of elements of a parameter whose states are quantized. Small
            ones save little, and are often the sensitive ones.

    Raises:
        ValueError: an option is out of range.
    """

    _states = ("step", *CODES, *_CODED)

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
        check_options(
            "AdamW8bit", lr, betas, eps=eps, weight_decay=weight_decay, min_8bit_size=min_8bit_size
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "min_8bit_size": min_8bit_size,
        }
        super().__init__(params, defaults)

    def _make_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": step_state(param)}
        if param.numel() < group["min_8bit_size"] or param.is_complex():
            return state | {"exp_avg": full_state(param), "exp_avg_sq": full_state(param)}
        for name, dtype in CODES.items():
            zeros = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            state[f"{name}_codes"] = zeros
        return state | {"exp_avg_scale": _scales(param), "exp_avg_sq_scale": _scales(param)}

    def _loaded_state(
        self, param: Tensor, group: dict[str, Any], state: dict[str, Any], where: str
    ) -> dict[str, Any]:
        state = renamed(state)
        if "exp_avg_codes" in state:
            names = ("step", *_CODED)
            check_names(state, names, names, where)
            for name, dtype in CODES.items():
                codes = state[f"{name}_codes"]
                if not isinstance(codes, Tensor) or codes.dtype != dtype:
                    found = getattr(codes, "dtype", type(codes).__name__)
                    raise TypeError(f"{where} must have {name}_codes as {dtype}, got {found}")
            return state
        if "max_exp_avg_sq" in state:
            fix = "load it with flexops.optim.AdamW"
            raise ValueError(f"{where} has max_exp_avg_sq; AdamW8bit has no amsgrad. fix: {fix}")
        check_names(state, ("step", *CODES), ("step", *CODES), where)
        check_floats(state, where)
        made = self._make_state(param, group)
        if "exp_avg_codes" not in made:
            return state
        if is_distributed(param) != is_distributed(state["exp_avg"]):
            fix = "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            raise ValueError(f"{where} must be sharded if its parameter is. fix: {fix}")
        _quantize(made, state)
        return made | {"step": state["step"]}

    def _kinds(self, _params: list[Tensor], states: list[dict[str, Any]]) -> list[Hashable]:
        return ["exp_avg_scale" in state for state in states]

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        states, ops = bucket.states, torch.ops.flexops
        if bucket.kind:
            codes = (states["exp_avg_codes"], states["exp_avg_sq_codes"])
            op, lists = ops.adam8bit_, _row_major(bucket.params, bucket.grads, *codes)
            lists += [states["exp_avg_scale"], states["exp_avg_sq_scale"]]
        else:
            op, lists = ops.adam_, [bucket.params, bucket.grads]
            lists += [states["exp_avg"], states["exp_avg_sq"], []]
            bucket.options["amsgrad"] = False
        options = {**bucket.options, "eps": group["eps"], "decoupled": True}
        run(op.default, *lists, bucket.steps, **options)
        increment_versions(bucket.params)


def _quantize(made: dict[str, Any], state: dict[str, Any]) -> None:
    """Write float averages into new states, as codes.

    Of a DTensor, each rank quantizes its own part, as its steps do.
    """
    targets = [plain(made[f"{name}_codes"]) for name in CODES]
    order = row_major(targets[0])
    device = targets[0].device
    wide = [plain(state[name]).detach().to(device, torch.float32) for name in CODES]
    averages = [average.permute(order).flatten() for average in wide]
    step = torch.as_tensor(state["step"]).to(device, torch.float32)
    *codes, scale, scale_sq = quantize_averages(averages[0], averages[1], step)
    for target, code in zip(targets, codes, strict=True):
        target.permute(order).copy_(code.view(target.permute(order).shape))
    for name, scales in (("exp_avg_scale", scale), ("exp_avg_sq_scale", scale_sq)):
        plain(made[name])[: len(scales)].copy_(scales)


def _row_major(params: list[Tensor], *others: list[Tensor]) -> list[list[Tensor]]:
    """Views in which parameters that are dense, but not row-major (channels last, transposed), are:
    the op would copy them at every step."""
    lists = [params, *others]
    if all(map(Tensor.is_contiguous, params)):
        return lists
    orders = list(map(row_major, params))
    return [
        [tensor.permute(order) for tensor, order in zip(tensors, orders, strict=True)]
        for tensors in lists
    ]


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
    # of the largest part, so that all parts are of one size
    count = blocks(torch.Size(largest).numel())
    zeros = torch.zeros(count, dtype=torch.float32, device=plain(param).device)
    found: Tensor = sharded.DTensor.from_local(zeros, mesh, placements, run_check=False)
    return found
