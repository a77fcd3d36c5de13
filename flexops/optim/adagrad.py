"""Adagrad: a drop-in replacement for ``torch.optim.Adagrad``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops._multi_tensor import each_step, increment_versions, round_to_bfloat16, step_noise
from ._fused import Bucket, NarrowStates, check_types, full_state, run, step_state

_NARROW = (torch.bfloat16, torch.float16)
_PIECE = 2**22
"""Elements of narrow sums that are widened at a time: few, for the memory is what they are narrow
for."""


class Adagrad(NarrowStates, torch.optim.Adagrad):
    """Adagrad as ``torch.optim.Adagrad``: same arguments, same state dict (sums are float32 unless
    ``state_dtype`` says otherwise), same results.

    Takes what :class:`flexops.optim.Adam` takes: float32, bfloat16 and float16 parameters and
    gradients, also mixed, complex64 as pairs, DTensors, ``GradScaler``, CUDA graphs. Sparse
    gradients are left to ``torch.optim.Adagrad``.

    Args:
        params, lr: as for :class:`flexops.optim.Adam`.
        lr_decay: step t is made with ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: L2 factor, added to the gradient.
        initial_accumulator_value: what the sums of squares begin with.
        eps: added to the denominator.
        maximize: ascend.
        foreach: accepted, and without effect: a step is always fused and, on CUDA, can always be
            captured.
        fused: False leaves unscaling to a ``GradScaler``, which then waits for the device, and lets
            Lightning clip gradients; else without effect.
        differentiable: must be False.
        state_dtype, stochastic_rounding: as for :class:`flexops.optim.Adam`: what the sums are kept
            in, and how they are rounded to bfloat16. A sum only grows, so that rounded to nearest
            in 8 bits it soon stands still. The kernels take float32: narrow sums are widened for
            the step, a piece at a time, which saves memory and takes more time.

    Raises:
        ValueError: an option is out of range or not supported.
        RuntimeError: ``foreach`` and ``fused`` are both True.
    """

    _states = ("step", "sum")
    _optional_states = ()

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
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = True,
    ) -> None:
        self._set_states(state_dtype, stochastic_rounding)
        if differentiable:
            raise ValueError(
                "flexops.optim.Adagrad: differentiable=True is not supported; use torch.optim"
                " for it"
            )
        if foreach and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        numbers = {
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        check_types("Adagrad", lr=lr, **numbers)
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
        )
        for group in self.param_groups:
            group["fused"] = fused
            # torch has made states already, of the parameters' dtypes and with steps on the CPU
            for param in group["params"]:
                self.state[param] = self._new_state(param, group)
            self._join_steps(group["params"], [self.state[param] for param in group["params"]])
        self.defaults["fused"] = fused
        self._leave_unscaling()

    def _make_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": step_state(param),
            "sum": full_state(
                param, group["initial_accumulator_value"], self._state_dtype_of(param)
            ),
        }

    def _kinds(self, params: list[Tensor], states: list[dict[str, Any]]) -> list[Hashable]:
        return (
            [None] * len(params)
            if self._state_dtype is None
            else [state["sum"].dtype in _NARROW for state in states]
        )

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        numbers = bucket.options | {"lr_decay": group["lr_decay"], "eps": group["eps"]}
        op = torch.ops.flexops.adagrad_.default
        if not bucket.kind:
            run(op, bucket.params, bucket.grads, bucket.states["sum"], bucket.steps, **numbers)
        else:
            for *tensors, step in zip(
                bucket.params,
                bucket.grads,
                bucket.states["sum"],
                each_step(bucket.steps, bucket.params),
                strict=True,
            ):
                counted = step
                for start, (param, grad, narrow) in _pieces(tensors):
                    total, counted = narrow.float(), step.clone()
                    run(op, [param], [grad], [total], [counted], **numbers)
                    if self._stochastic and narrow.dtype == torch.bfloat16:
                        total = round_to_bfloat16(
                            total, step_noise(counted, [param, grad, narrow], start) & 0xFFFF
                        )
                    narrow.copy_(total)
                step.copy_(counted)
        increment_versions(bucket.params)


def _pieces(tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Tensors of one shape in pieces, each with its place; whole where they are not row-major."""
    count = tensors[0].numel()
    if count <= _PIECE or not all(map(Tensor.is_contiguous, tensors)):
        yield 0, tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, count, _PIECE):
        yield start, [tensor[start : start + _PIECE] for tensor in flat]
