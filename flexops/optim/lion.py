"""Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops._multi_tensor import increment_versions
from ._fused import Bucket, NarrowStates, check_options, full_state, run, step_state


class Lion(NarrowStates):
    """Lion, of Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023): a step of one
    size in every direction, by the sign of an average.

    Its step is larger than AdamW's: the paper advises a learning rate 3 to 10 times smaller, and a
    weight decay larger by the same factor. One state, ``exp_avg``, in float32 unless
    ``state_dtype`` says otherwise (then there is also ``step``). Takes what
    :class:`flexops.optim.Adam` takes: float32, bfloat16 and float16 parameters and gradients,
    DTensors, ``GradScaler``, CUDA graphs.

    Args:
        params, lr: as for :class:`flexops.optim.Adam`.
        betas: what the average weighs in the step, and in the next average.
        weight_decay: rate of decoupled weight decay.
        maximize: ascend.
        state_dtype, stochastic_rounding: as for :class:`flexops.optim.Adam`: what averages are kept
            in, and how they are rounded to bfloat16.

    Raises:
        ValueError: an option is out of range or not supported.
    """

    _states: tuple[str, ...] = ("exp_avg",)
    _optional_states = ("step",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = True,
    ) -> None:
        self._set_states(state_dtype, stochastic_rounding)
        check_options("Lion", lr, betas, weight_decay=weight_decay)
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    def _set_states(self, state_dtype: torch.dtype | str | None, stochastic_rounding: bool) -> None:
        super()._set_states(state_dtype, stochastic_rounding)
        # random numbers follow from it
        self._states = ("exp_avg",) if state_dtype in (None, torch.float32) else ("step", "exp_avg")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_states(self._state_dtype, self._stochastic)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for the others; steps that a state dict does not count begin anew."""
        super().load_state_dict(state_dict)
        if "step" in self._states:
            for param, state in self.state.items():
                state.setdefault("step", step_state(param))

    def _make_state(self, param: Tensor, _group: dict[str, Any]) -> dict[str, Any]:
        counted = {"step": step_state(param)} if "step" in self._states else {}
        return {**counted, "exp_avg": full_state(param, dtype=self._state_dtype_of(param))}

    def _step_bucket(self, _group: dict[str, Any], bucket: Bucket) -> None:
        stochastic = self._stochastic and bool(bucket.steps)
        lists = bucket.params, bucket.grads, bucket.states["exp_avg"], bucket.steps
        run(torch.ops.flexops.lion_.default, *lists, **bucket.options, stochastic=stochastic)
        increment_versions(bucket.params)
