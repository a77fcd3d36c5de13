"""LAMB."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops._multi_tensor import increment_versions
from ._fused import (
    PLAIN_TYPES,
    Bucket,
    NarrowStates,
    add_over_ranks,
    check_options,
    full_state,
    run,
    sharded_dimensions,
    step_state,
)

# options of the second pass alone, and of the first
_OF_APPLY, _OF_MOMENTS = ("lr", "lr_tensor", "adapt"), ("maximize", "grad_scale", "stochastic")


class LAMB(NarrowStates):
    """LAMB, of You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    Minutes" (2020): Adam's direction, with a length in proportion to each parameter's own.

    States (``step``, ``exp_avg``, ``exp_avg_sq``) are float32 unless ``state_dtype`` says
    otherwise. Takes what :class:`flexops.optim.Adam` takes: float32, bfloat16 and float16
    parameters and gradients, ``GradScaler``, CUDA graphs; of a DTensor the norms are added up over
    the ranks that share it (by ``torch.distributed``, on the device), so that a sharded parameter
    is stepped as the whole one would be. The gradients' own norm is not clipped:
    :func:`flexops.optim.clip_grad_norm_` does that.

    Args:
        params, lr: as for :class:`flexops.optim.Adam`.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: what of the parameter is added to its update, before the trust ratio.
        adapt: whether steps are scaled by the trust ratio ``|param| / |update|``. Biases and norms'
            weights are often put into a group without, and without weight decay.
        maximize: ascend.
        state_dtype, stochastic_rounding: as for :class:`flexops.optim.Adam`: what averages are kept
            in, and how they are rounded to bfloat16.

    Raises:
        ValueError: an option is out of range or not supported.
    """

    _states = ("step", "exp_avg", "exp_avg_sq")
    _optional_states = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapt: bool = True,
        maximize: bool = False,
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = True,
    ) -> None:
        self._set_states(state_dtype, stochastic_rounding)
        check_options("LAMB", lr, betas, eps=eps, weight_decay=weight_decay)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adapt": adapt,
                "maximize": maximize,
            },
        )

    def _make_state(self, param: Tensor, _group: dict[str, Any]) -> dict[str, Any]:
        averages = {
            name: full_state(param, dtype=self._state_dtype_of(param)) for name in self._states[1:]
        }
        return {"step": step_state(param), **averages}

    def _kinds(self, params: list[Tensor], _states: list[dict[str, Any]]) -> list[Hashable]:
        plain = set(map(type, params)) <= PLAIN_TYPES
        return [()] * len(params) if plain else [sharded_dimensions(param) for param in params]

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        states = bucket.states["exp_avg"], bucket.states["exp_avg_sq"], bucket.steps
        options = {**bucket.options, "eps": group["eps"], "adapt": bool(group["adapt"])}
        options["stochastic"] = self._stochastic
        ops = torch.ops.flexops
        if isinstance(bucket.kind, tuple) and bucket.kind:
            given = {name: options[name] for name in options if name not in _OF_APPLY}
            norms = run(ops.lamb_moments_.default, bucket.params, bucket.grads, *states, **given)
            add_over_ranks(norms, bucket.kind)
            given = {name: options[name] for name in options if name not in _OF_MOMENTS}
            run(ops.lamb_apply_.default, bucket.params, *states, norms, **given)
        else:
            run(ops.lamb_.default, bucket.params, bucket.grads, *states, **options)
        increment_versions(bucket.params)
