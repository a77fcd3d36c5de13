"""Adam and AdamW: drop-in replacements for ``torch.optim.Adam`` and ``torch.optim.AdamW``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..ops.adam import PARAM_DTYPES, increment_versions, split_lr

Copies = torch.dtype | Mapping[Tensor, Tensor] | Sequence[Tensor]

_STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_PLAIN_TYPES = {torch.nn.Parameter, Tensor}
_is_sparse = operator.attrgetter("is_sparse")


class _Bucket:
    """The tensors of one call: parameters of one group on one device, with or without copies."""

    __slots__ = ("copies", "exp_avg_sqs", "exp_avgs", "grads", "max_exp_avg_sqs", "params", "steps")

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.exp_avg_sqs: list[Tensor] = []
        self.max_exp_avg_sqs: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.copies: list[Tensor] = []

    def lists(self) -> list[list[Tensor]]:
        """In the order of the op's arguments."""
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.steps]
        return [*lists, self.copies] if self.copies else lists


class _FusedStep(torch.optim.Optimizer):
    """What flexops does differently from ``torch.optim``: the step itself, float32 states, and copies in a second dtype."""

    # GradScaler then leaves unscaling, and skipping after an overflow, to step(): it sets grad_scale and found_inf before the call.
    _step_supports_amp_scaling = True
    _decoupled = False

    def _set_up(self, copies: Copies | None, differentiable: bool, betas: tuple[Any, ...]) -> None:
        if differentiable:
            raise ValueError(f"flexops.optim.{type(self).__name__}: differentiable=True is not supported; use torch.optim for it")
        if any(isinstance(beta, Tensor) for beta in betas):
            raise ValueError(f"flexops.optim.{type(self).__name__}: betas must be floats, not tensors")
        self._copies = self._make_copies(copies)

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """The low-precision copy of each parameter that has one."""
        return self._copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_copies", {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; parameters without a gradient are left alone.

        Args:
            closure: reevaluates the model and returns the loss, which is returned.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError: a parameter or gradient is not float32, bfloat16 or float16 (or complex64, taken as pairs of float32).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for bucket in self._buckets(group):
                self._step_bucket(group, bucket, grad_scale, found_inf)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.optim``'s; states become float32, and steps move to their parameters' devices."""
        seen: list[dict[str, Any]] = []
        handle = self.register_load_state_dict_pre_hook(lambda _, final: seen.append(final))  # the last hook sees what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._restore_precision(seen[-1])

    def _restore_precision(self, state_dict: dict[str, Any]) -> None:
        """torch has cast the states to their parameters' dtypes, which for bfloat16 parameters throws digits away: take the saved ones."""
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for saved, param in zip(saved_group["params"], group["params"], strict=True):
                state = self.state.get(param)
                if not state:
                    continue
                for name in _STATE_NAMES:
                    if name in state and param.dtype in PARAM_DTYPES and param.dtype != torch.float32:
                        state[name] = state_dict["state"][saved][name].to(device=param.device, dtype=torch.float32, copy=True)
                state["step"] = torch.as_tensor(state["step"]).to(device=param.device, dtype=torch.float32)

    def _make_copies(self, copies: Copies | None) -> dict[Tensor, Tensor]:
        if copies is None:
            return {}
        params: list[Tensor] = [param for group in self.param_groups for param in group["params"]]
        if isinstance(copies, torch.dtype):
            return {param: param.detach().to(copies, copy=True) for param in params}
        if isinstance(copies, Mapping):
            return dict(copies)
        if len(copies) != len(params):
            raise ValueError(f"flexops.optim.{type(self).__name__}: copies must hold {len(params)} tensors, one for each parameter, got {len(copies)}")
        return dict(zip(params, copies, strict=True))

    def _buckets(self, group: dict[str, Any]) -> Iterable[_Bucket]:
        """The group's parameters that have gradients, with everything that belongs to them."""
        # With a thousand parameters this costs as much as their step on a GPU, so what every parameter goes through is a few comprehensions.
        pairs = [(param, grad) for param in group["params"] if (grad := param.grad) is not None]
        if not pairs:
            return ()
        every = self.state
        amsgrad = group["amsgrad"]
        states = [every[param] or _initialise(every[param], param, amsgrad) for param, _ in pairs]
        bucket = _Bucket()
        bucket.params, bucket.grads = [param for param, _ in pairs], [grad for _, grad in pairs]
        bucket.exp_avgs = [state["exp_avg"] for state in states]
        bucket.exp_avg_sqs = [state["exp_avg_sq"] for state in states]
        bucket.max_exp_avg_sqs = [state["max_exp_avg_sq"] for state in states] if amsgrad else []
        bucket.steps = [state["step"] for state in states]
        if self._copies or not _is_uniform(bucket):
            return self._split(bucket)
        return (bucket,)

    def _split(self, mixed: _Bucket) -> Iterable[_Bucket]:
        """Several devices, copies of some parameters, DTensors, complex numbers: one bucket for each kind, of plain tensors."""
        buckets: dict[tuple[torch.device, bool], _Bucket] = {}
        for i, (param, grad) in enumerate(zip(mixed.params, mixed.grads, strict=True)):
            if grad.layout != torch.strided:
                raise RuntimeError(f"flexops.optim.{type(self).__name__} does not support sparse gradients; torch.optim.SparseAdam does")
            copy = self._copies.get(param)
            bucket = buckets.setdefault((param.device, copy is not None), _Bucket())
            bucket.params.append(_plain(param))
            bucket.grads.append(_plain(grad))
            bucket.exp_avgs.append(_plain(mixed.exp_avgs[i]))
            bucket.exp_avg_sqs.append(_plain(mixed.exp_avg_sqs[i]))
            bucket.steps.append(mixed.steps[i])
            if mixed.max_exp_avg_sqs:
                bucket.max_exp_avg_sqs.append(_plain(mixed.max_exp_avg_sqs[i]))
            if copy is not None:
                bucket.copies.append(_plain(copy))
        return buckets.values()

    def _step_bucket(self, group: dict[str, Any], bucket: _Bucket, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        device = bucket.params[0].device
        lr, lr_tensor = split_lr(group["lr"], device.type == "cpu")
        beta1, beta2 = group["betas"]
        op = torch.ops.flexops.adam_copy_.default if bucket.copies else torch.ops.flexops.adam_.default
        op(
            *bucket.lists(),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            decoupled=group.get("decoupled_weight_decay", self._decoupled),
            lr_tensor=_moved(lr_tensor, device),
            grad_scale=_moved(grad_scale, device),
            found_inf=_moved(found_inf, device),
        )
        increment_versions(bucket.params + bucket.copies)


_OPTIONS = """
    Args:
        params: parameters, or groups of them with options of their own, as for ``torch.optim``.
        lr: learning rate, a float or a tensor of one element (read on the device, so that it may change under a captured CUDA graph).
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: {decay}.
        amsgrad: use the largest second moment seen so far.
        maximize: ascend.
        foreach, fused, capturable: accepted, and without effect: a step is always fused and, on CUDA, can always be captured.
        differentiable: must be False.
        copies: None, or a copy of the parameters in a second dtype that every step brings up to date in the same pass over memory, for training
            with parameters and states offloaded to the CPU: a dtype such as ``torch.bfloat16`` (the optimizer then makes the copies), one
            tensor for each parameter in order, or a mapping from parameters to tensors. The property ``copies`` maps each parameter to its copy.
            Copies are not part of the state dict.

    Raises:
        ValueError: an option is out of range or not supported.
    """


class Adam(_FusedStep, torch.optim.Adam):
    __doc__ = f"""Adam as ``torch.optim.Adam``: same arguments, same state dict (states are float32 whatever the parameters are), same results.

    Takes float32, bfloat16 and float16 parameters and gradients, also mixed; complex64 as pairs; of DTensors each rank steps its own part.
    Works under ``torch.amp.GradScaler``, which leaves unscaling to it.
    {_OPTIONS.format(decay="L2 factor, added to the gradient (with decoupled_weight_decay: AdamW's)")}"""

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
    ) -> None:
        options: dict[str, Any] = {"foreach": foreach, "maximize": maximize, "capturable": capturable, "fused": fused}
        torch.optim.Adam.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_decoupled(decoupled_weight_decay)
        self._set_up(copies, differentiable, betas)

    def _set_decoupled(self, decoupled: bool) -> None:
        self.defaults["decoupled_weight_decay"] = decoupled  # torch before 2.7 has no such option
        for group in self.param_groups:
            group["decoupled_weight_decay"] = decoupled


class AdamW(_FusedStep, torch.optim.AdamW):
    __doc__ = f"""AdamW as ``torch.optim.AdamW``: same arguments, same state dict (states are float32 whatever the parameters are), same results.

    Takes what :class:`Adam` takes.
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
    ) -> None:
        options: dict[str, Any] = {"foreach": foreach, "maximize": maximize, "capturable": capturable, "fused": fused}
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_up(copies, differentiable, betas)


def _initialise(state: dict[str, Any], param: Tensor, amsgrad: bool) -> dict[str, Any]:
    dtype = param.dtype if param.is_complex() else torch.float32
    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in _STATE_NAMES[: 3 if amsgrad else 2]:
        state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return state


def _is_uniform(bucket: _Bucket) -> bool:
    """Whether the op takes the bucket as it is: one device, plain tensors of real numbers, gradients that are not sparse."""
    params, grads = bucket.params, bucket.grads
    return (
        set(map(type, params)) <= _PLAIN_TYPES
        and set(map(type, grads)) <= _PLAIN_TYPES
        and len(set(map(Tensor.get_device, params))) == 1
        and not any(map(Tensor.is_complex, params))
        and not any(map(_is_sparse, grads))
    )


def _plain(tensor: Tensor) -> Tensor:
    """The tensor itself, of a DTensor this rank's part, and of complex numbers pairs of real ones."""
    local = cast(Tensor, getattr(tensor, "_local_tensor", tensor))
    return torch.view_as_real(local) if local.is_complex() else local


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device=device, non_blocking=True)
