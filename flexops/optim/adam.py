"""Adam and AdamW: drop-in replacements for ``torch.optim.Adam`` and ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._multi_tensor import PARAM_DTYPES, increment_versions
from ._fused import (
    Bucket,
    NarrowStates,
    check_types,
    full_state,
    moved,
    plain,
    run,
    step_state,
)
from .clip import total_norm

Copies = torch.dtype | Mapping[Tensor, Tensor] | Sequence[Tensor]


class _FusedAdam(NarrowStates):
    """What flexops does differently from ``torch.optim``: the step itself, states in a dtype of
    their own, and copies in a second dtype."""

    _states = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _decoupled = False
    _max_norm: float | None = None
    _grad_factor: Tensor | None = None
    grad_norm: Tensor | None = None
    """With ``max_norm``, the norm that the gradients of the last step had: float32, without
    dimensions, on their device."""

    def _set_up(
        self,
        copies: Copies | None,
        differentiable: bool,
        betas: tuple[Any, ...],
        state_dtype: torch.dtype | str | None,
        stochastic_rounding: bool,
        max_norm: float | None,
    ) -> None:
        if max_norm is not None:
            check_types(type(self).__name__, max_norm=max_norm)
        if max_norm is not None and not max_norm > 0.0:
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: max_norm must be more than 0, or None, got"
                f" {max_norm!r}"
            )
        self._max_norm = max_norm
        self._set_states(state_dtype, stochastic_rounding)
        if differentiable:
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: differentiable=True is not supported; use"
                " torch.optim for it"
            )
        if any(isinstance(beta, Tensor) for beta in betas):
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: betas must be floats, not tensors"
            )
        self._leave_unscaling()
        copied = (
            copies.values()
            if isinstance(copies, Mapping)
            else copies
            if isinstance(copies, Sequence)
            else ()
        )
        if (
            isinstance(copies, str)
            or not (copies is None or isinstance(copies, (torch.dtype, Mapping, Sequence)))
            or not all(map(_is_tensor, copied))
        ):
            accepted = "None, a dtype, a list of tensors or a mapping to tensors"
            raise TypeError(
                f"flexops.optim.{type(self).__name__}: copies must be {accepted}, got {copies!r}"
            )
        if isinstance(copies, torch.dtype) and copies not in PARAM_DTYPES:
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: copies must be in float32, bfloat16 or"
                f" float16, got {copies}"
            )
        params: list[Tensor] = [param for group in self.param_groups for param in group["params"]]
        self._copy_dtype = copies if isinstance(copies, torch.dtype) else None
        self._each_copied = isinstance(copies, Sequence)
        if isinstance(copies, Sequence) and len(copies) != len(params):
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: copies must hold {len(params)} tensors, one"
                f" for each parameter, got {len(copies)}"
            )
        self._copies = (
            dict(zip(params, copies, strict=True))
            if isinstance(copies, Sequence)
            else dict(copies)
            if isinstance(copies, Mapping)
            else {}
        )
        self._copy(params)

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """The low-precision copy of each parameter that has one."""
        return self._copies

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _KEPT}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_copies": {}, "_copy_dtype": None, "_each_copied": False} | state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for ``torch.optim``. The parameters get copies if a dtype says which; where each
        parameter's copy was given, ``copies`` must hold theirs."""
        if "max_norm" in param_group:  # it would stand there without doing anything
            fix = (
                f"give it to {type(self).__name__} itself, or clip groups with"
                " flexops.optim.clip_grad_norm_"
            )
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: max_norm is of all parameters' gradients,"
                f" and no option of a group: {fix}"
            )
        super().add_param_group(param_group)
        if "_copies" not in self.__dict__:
            return  # torch's constructor comes here, too
        try:
            self._copy(self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def _copy(self, params: list[Tensor]) -> None:
        """Make copies, if a dtype is given; see that there are copies, if each parameter
        must have one."""
        where = f"flexops.optim.{type(self).__name__}"
        if self._copy_dtype is not None:
            if any(param.is_complex() for param in params):
                raise ValueError(f"{where}: a complex parameter has no copy in {self._copy_dtype}")
            self._copies.update(
                {param: param.detach().to(self._copy_dtype, copy=True) for param in params}
            )
        for index, param in enumerate(params if self._each_copied else ()):
            if param not in self._copies:
                raise ValueError(
                    f"{where}: params[{index}] of the new group has no copy, as the others have:"
                    " set optimizer.copies[param] before"
                )

    def _make_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        dtype = self._state_dtype_of(param)
        averages = {
            name: full_state(param, dtype=dtype)
            for name in self._states[1 : 4 if group["amsgrad"] else 3]
        }
        return {"step": step_state(param), **averages}

    def _kinds(self, params: list[Tensor], _states: list[dict[str, Any]]) -> list[Hashable]:
        return (
            [param in self._copies for param in params] if self._copies else [False] * len(params)
        )

    def _measure(self, params: list[Tensor]) -> None:
        self._grad_factor = None
        if self._max_norm is None:
            return
        grads = [grad for param in params if (grad := param.grad) is not None]
        if any(map(Tensor.is_complex, grads)):
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: max_norm does not clip complex gradients;"
                " clip them before the step instead"
            )
        if not grads or any(
            grad.layout != torch.strided or grad.dtype not in PARAM_DTYPES for grad in grads
        ):
            return  # the step rejects them
        self.grad_norm = norm = total_norm(grads)
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            self.grad_norm = norm = norm / moved(scale, norm.device).reshape(())
        self._grad_factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        states = bucket.states
        lists = [
            bucket.params,
            bucket.grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            states.get("max_exp_avg_sq", []),
            bucket.steps,
        ]
        copies = [plain(self._copies[owner]) for owner in bucket.owners] if bucket.kind else []
        op = torch.ops.flexops.adam_copy_.default if copies else torch.ops.flexops.adam_.default
        factor = self._grad_factor
        run(
            op,
            *lists,
            *([copies] if copies else ()),
            **bucket.options,
            eps=group["eps"],
            amsgrad=bool(group["amsgrad"]),
            decoupled=bool(group.get("decoupled_weight_decay", self._decoupled)),
            stochastic=self._stochastic,
            grad_factor=None if factor is None else moved(factor, bucket.params[0].device),
        )
        increment_versions(bucket.params + copies)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


_KEPT = ("_copies", "_copy_dtype", "_each_copied", "_max_norm")
"""What a pickle holds beside the others'."""
_OPTIONS = """
    Args:
        params: parameters, or groups of them with their own options, as for ``torch.optim``.
        lr: learning rate, a float or a tensor of one element (read on the device, so it may change
            under a captured CUDA graph).
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: {decay}.
        amsgrad: use the largest second moment so far.
        maximize: maximize the objective.
        foreach, capturable: accepted without effect: a step is always fused and, on CUDA, always
            capturable.
        fused: False leaves unscaling to a ``GradScaler``, which then waits for the device, and
            permits clipping by Lightning; other values have no effect.
        differentiable: must be False.
        copies: copies of the parameters in a second dtype, updated by every step in the same pass,
            for parameters and states offloaded to the CPU. A dtype such as ``torch.bfloat16`` (the
            optimizer creates the copies), one tensor for each parameter in order, or a mapping from
            parameters to tensors. The property ``copies`` maps each parameter to its copy. Copies
            are not part of the state dict; they are copied and pickled with the optimizer.
        state_dtype: dtype of the averages: None for float32, ``torch.bfloat16``, ``torch.float16``,
            or "param" for each parameter's dtype, as in ``torch.optim``. With everything in
            bfloat16 a step moves 14 bytes per element instead of 22, and states take 4 bytes
            instead of 8. float16 underflows for squares of gradients below 2.4e-4, as in torch.
            Complex parameters have complex states. State dicts of every dtype, and torch's, are
            converted when they are loaded.
        stochastic_rounding: round bfloat16 states stochastically (docs/training.md shows the
            effect); False rounds to nearest. The random numbers depend on the step's number and the
            element's index only, so results are the same in every run and on every device. The
            index of a DTensor's element is that in the rank's shard.
        max_norm: clip by this norm of all gradients of the optimizer's parameters, as
            ``torch.nn.utils.clip_grad_norm_`` before each step. The step scales the gradients as it
            reads them and does not change them, one pass over memory less than
            :func:`clip_grad_norm_`. ``grad_norm`` of the optimizer is the norm. Not for complex
            gradients.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is out of range or not supported, or a complex parameter has a copy.
    """


class Adam(_FusedAdam, torch.optim.Adam):
    __doc__ = f"""Adam with the arguments, state dict and results of ``torch.optim.Adam``. States
    are float32 unless ``state_dtype`` is given.

    Parameters and gradients may be float32, bfloat16 and float16, also mixed, and complex64. Of a
    DTensor each rank steps its own shard. The optimizer unscales gradients of
    ``torch.amp.GradScaler`` itself.
    {_OPTIONS.format(decay="L2 factor of the gradient (decoupled_weight_decay: AdamW's)")}"""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        copies: Copies | None = None,
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = True,
        max_norm: float | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "fused": fused,
        }
        check_types(type(self).__name__, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_decoupled(decoupled_weight_decay)
        self._set_up(copies, differentiable, betas, state_dtype, stochastic_rounding, max_norm)

    def _set_decoupled(self, decoupled: bool) -> None:
        self.defaults["decoupled_weight_decay"] = decoupled  # torch before 2.7 has no such option
        for group in self.param_groups:
            group["decoupled_weight_decay"] = decoupled


class AdamW(_FusedAdam, torch.optim.AdamW):
    __doc__ = f"""AdamW with the arguments, state dict and results of ``torch.optim.AdamW``. States
    are float32 unless ``state_dtype`` is given.

    Supports the tensors of :class:`Adam`.
    {_OPTIONS.format(decay="rate of decoupled weight decay")}"""

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        copies: Copies | None = None,
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = True,
        max_norm: float | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "fused": fused,
        }
        check_types(type(self).__name__, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_up(copies, differentiable, betas, state_dtype, stochastic_rounding, max_norm)
