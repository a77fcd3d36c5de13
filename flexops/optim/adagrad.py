"""Adagrad: a drop-in replacement for ``torch.optim.Adagrad``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops._multi_tensor import increment_versions
from ._fused import Bucket, FusedOptimizer, full_state, rate_for, run, step_state


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """Adagrad as ``torch.optim.Adagrad``: same arguments, same state dict (sums are float32 whatever the parameters are), same results.

    Takes what :class:`flexops.optim.Adam` takes: float32, bfloat16 and float16 parameters and gradients, also mixed, complex64 as pairs, DTensors,
    ``GradScaler``, CUDA graphs. Sparse gradients are left to ``torch.optim.Adagrad``.

    Args:
        params: parameters, or groups of them with options of their own, as for ``torch.optim``.
        lr: learning rate, a float or a tensor of one element (read on the device, so that it may change under a captured CUDA graph).
        lr_decay: step t is made with ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: L2 factor, added to the gradient.
        initial_accumulator_value: what the sums of squares begin with.
        eps: added to the denominator.
        maximize: ascend.
        foreach: accepted, and without effect: a step is always fused and, on CUDA, can always be captured.
        fused: False leaves unscaling to a ``GradScaler``, which then waits for the device, and lets Lightning clip gradients; else without effect.
        differentiable: must be False.

    Raises:
        ValueError: an option is out of range or not supported.
        RuntimeError: ``foreach`` and ``fused`` are both True.
    """

    _states = ("step", "sum")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if differentiable:
            raise ValueError("flexops.optim.Adagrad: differentiable=True is not supported; use torch.optim for it")
        if foreach and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, foreach, maximize=maximize)
        for group in self.param_groups:
            group["fused"] = fused
            for param in group["params"]:  # torch has made states already, of the parameters' dtypes and with steps on the CPU
                self.state[param] = self._make_state(param, group)
            self._join_steps(group["params"], [self.state[param] for param in group["params"]])
        self.defaults["fused"] = fused
        self._leave_unscaling()

    def _make_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": step_state(param), "sum": full_state(param, group["initial_accumulator_value"])}

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        lr, lr_tensor = rate_for(group["lr"], bucket)
        lists = bucket.params, bucket.grads, bucket.states["sum"], bucket.steps
        op = torch.ops.flexops.adagrad_.default
        run(op, *lists, lr, group["lr_decay"], group["weight_decay"], group["eps"], group["maximize"], lr_tensor, grad_scale, found_inf)
        increment_versions(bucket.params)
