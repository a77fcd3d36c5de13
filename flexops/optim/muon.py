"""Muon, with AdamW for what is no matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .._torch import not_compiled
from ..ops._multi_tensor import PARAM_DTYPES
from ..ops._register import is_distributed
from ..ops.muon import apply_, average_
from ._fused import (
    Bucket,
    _is_number,
    _Stored,
    check_options,
    check_types,
    moved,
    placed_like,
    plain,
)
from ._loading import check_floats, check_names
from ._orthogonal import normalize, orthogonalize, scale_of, working_dtype
from .adam import _FusedAdam

_BUFFER = "momentum_buffer"
_TOGETHER = 1 << 28  # elements of the matrices that are orthogonalized at once


class Muon(_FusedAdam):
    """Muon, with the arguments, state dict and results of ``torch.optim.Muon`` (Jordan et al.,
    "Muon: An optimizer for hidden layers in neural networks", 2024), and AdamW for parameters that
    are no matrices.

    A step averages the gradient, makes the average's singular values about 1 by Newton-Schulz
    iterations in float16 (on the CPU in float32), and subtracts the result. Matrices of one shape
    are iterated as one batch, and wide ones by their Gram matrices, which takes about half of the
    products; results agree with torch's to the rounding of bfloat16, which torch iterates in.

    Parameters of two dimensions are matrices, those of three are batches of matrices (weights of
    experts, ``[experts, rows, columns]``). All others, and groups with ``"muon": False`` (give
    embeddings and the head such a group), are stepped by :class:`flexops.optim.AdamW` with the
    options in ``adamw``. A group that holds both is split into two groups.

    Of a DTensor each rank averages its own part; the average is then gathered, and every rank
    iterates on all of it. Under ``torch.amp.GradScaler`` the step waits for the device once.

    Args:
        params: parameters, or groups of them with options of their own, as for ``torch.optim``.
        lr: learning rate, a float or a tensor of one element (read on the device).
        weight_decay: rate of decoupled weight decay.
        momentum: decay rate of the average of the gradient, at least 0 and below 1.
        nesterov: step by the average of the gradient and that average.
        ns_coefficients: a, b and c of an iteration ``a X + b (X X^T) X + c (X X^T)^2 X``.
        eps: the least Frobenius norm that an average is divided by.
        ns_steps: number of iterations, 1 to 99.
        adjust_lr_fn: factor of ``lr`` for a matrix of A rows and B columns. "original" or None:
            ``sqrt(max(1, A / B))``. "match_rms_adamw": ``0.2 sqrt(max(A, B))``, with which AdamW's
            learning rate and weight decay fit.
        adamw: options of AdamW for parameters that are no matrices: ``lr``, ``betas``, ``eps``,
            ``weight_decay``, ``amsgrad``. Without a value, ``lr`` and ``weight_decay`` are Muon's,
            the others :class:`flexops.optim.AdamW`'s.

    Raises:
        TypeError: an option has a wrong type, or a matrix or gradient is not float32, bfloat16 or
            float16.
        ValueError: an option is out of range, or a group with ``"muon": True`` holds a parameter
            that has neither two nor three dimensions.
    """

    _decoupled = True  # weight decay of the parameters that AdamW steps

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        check_types("Muon", momentum=momentum)
        check_options("Muon", lr, (momentum,) * 2, weight_decay=weight_decay, eps=eps)
        if not _is_count(ns_steps):
            raise ValueError(
                f"flexops.optim.Muon: ns_steps must be an integer from 1 to 99, got {ns_steps!r}"
            )
        if not _are_coefficients(ns_coefficients):
            raise ValueError(
                f"flexops.optim.Muon: ns_coefficients must be 3 numbers, got {ns_coefficients!r}"
            )
        if adjust_lr_fn not in list(_FACTORS):
            raise ValueError(
                "flexops.optim.Muon: adjust_lr_fn must be None, 'original' or 'match_rms_adamw',"
                f" got {adjust_lr_fn!r}"
            )
        if adamw is not None and not isinstance(adamw, Mapping):
            raise TypeError(
                "flexops.optim.Muon: adamw must be a mapping of AdamW's options, got"
                f" {type(adamw).__name__}"
            )
        self._adamw: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            **_ADAMW,
            **(adamw or {}),
        }
        if unknown := set(self._adamw) - {"lr", "weight_decay", *_ADAMW}:
            raise ValueError(
                f"flexops.optim.Muon: adamw has unknown options: {', '.join(sorted(unknown))}"
            )
        check_types("Muon", self._adamw["betas"], lr=self._adamw["lr"], eps=self._adamw["eps"])
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "muon": True,
        }
        super().__init__(params, defaults)
        self._set_up(None, False, self._adamw["betas"], None, True, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": self._adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for ``torch.optim``. Without an option ``muon``, parameters that are no matrices
        become a group of their own, with the options in ``adamw``."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        chosen = param_group.get("muon")
        if chosen is False:
            super().add_param_group({**self._adamw, **param_group, "params": params})
            return
        others = [one for one in params if not _is_matrix(one)]
        if chosen and others:
            shape = tuple(_tensor(others[0]).shape)
            raise ValueError(
                "flexops.optim.Muon: a group with muon=True must hold parameters of 2 or 3"
                f" dimensions, got shape {shape}. fix: a group of its own, with muon=False"
            )
        matrices = [one for one in params if _is_matrix(one)]
        if matrices or not others:
            super().add_param_group({**param_group, "params": matrices, "muon": True})
        if others:
            super().add_param_group({**param_group, **self._adamw, "params": others, "muon": False})

    def _loaded_state(
        self, param: Tensor, group: dict[str, Any], state: dict[str, Any], where: str
    ) -> dict[str, Any]:
        if not group["muon"]:
            return super()._loaded_state(param, group, state, where)
        check_names(state, {_BUFFER}, {_BUFFER}, where)
        check_floats(state, where)
        return state

    def _state_dtype_of(self, param: Tensor) -> torch.dtype:
        return param.dtype if _BUFFER in self.state.get(param, {}) else torch.float32

    def _buckets(self, group: dict[str, Any], stored: _Stored) -> Iterable[Bucket]:
        return () if group["muon"] else super()._buckets(group, stored)

    @not_compiled
    def _step_groups(self) -> None:
        groups = [group for group in self.param_groups if group["muon"]]
        for group in groups:
            for param in group["params"]:
                self._judge_matrix(group, param)
        for group in groups:
            self._step_matrices(group)
        super()._step_groups()

    def _judge_matrix(self, group: dict[str, Any], param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        where = f"flexops.optim.Muon: {self._place_of(param, group)}"
        if grad.layout != torch.strided:
            raise RuntimeError(f"{where} has a sparse gradient, which Muon does not support")
        for tensor, of in ((param, ""), (grad, ".grad")):
            if tensor.dtype not in PARAM_DTYPES:
                raise TypeError(
                    f"{where}{of} must be float32, bfloat16 or float16, got"
                    f" {str(tensor.dtype).removeprefix('torch.')}"
                )

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None and param.numel():
                key = (param.shape[-2:], param.device, param.dtype, param.grad.dtype)
                alike.setdefault(key, []).append(param)
        for params in alike.values():
            device = params[0].device
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            if found_inf is not None and found_inf.item():
                continue
            for part in _parts(params):
                self._step_part(group, part, None if scale is None else moved(scale, device))

    def _step_part(self, group: dict[str, Any], params: list[Tensor], scale: Tensor | None) -> None:
        """The step of matrices of one shape."""
        grads = [placed_like(param.grad, param) for param in params]  # type: ignore[arg-type]
        buffers = []
        for param, grad in zip(params, grads, strict=True):
            state = self.state[param]
            if _BUFFER not in state:
                state[_BUFFER] = torch.zeros_like(grad, memory_format=torch.preserve_format)
            buffers.append(state[_BUFFER])
        averages = _averages(params, grads, buffers, scale, group)
        steps = orthogonalize(
            averages, tuple(group["ns_coefficients"]), int(group["ns_steps"])
        ).split(_counts(params))
        owned = [_own_part(one.reshape(p.shape), p) for one, p in zip(steps, params, strict=True)]
        apply_(
            list(map(plain, params)),
            owned,
            lr=group["lr"],
            decay=group["weight_decay"],
            factor=_FACTORS[group["adjust_lr_fn"]](*params[0].shape[-2:]),
        )


_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and 1 <= int(value) < 100


def _are_coefficients(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and list(map(_is_number, value)) == [True] * 3


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns))


_FACTORS = {
    None: _original,
    "original": _original,
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def _tensor(given: Any) -> Tensor:
    """Of a parameter, or of a pair of its name and itself."""
    tensor: Tensor = given[1] if isinstance(given, tuple) else given
    return tensor


def _is_matrix(given: Any) -> bool:
    tensor = _tensor(given)
    return isinstance(tensor, Tensor) and tensor.dim() in (2, 3)


def _parts(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of at most ``_TOGETHER`` elements, but for one parameter that has more."""
    part: list[Tensor] = []
    for param in params:
        if part and sum(map(Tensor.numel, part)) + param.numel() > _TOGETHER:
            yield part
            part = []
        part.append(param)
    yield part


def _counts(params: list[Tensor]) -> list[int]:
    """How many matrices each parameter has."""
    return [param.shape[0] if param.dim() == 3 else 1 for param in params]


def _averages(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    scale: Tensor | None,
    group: dict[str, Any],
) -> Tensor:
    """The averages of all matrices, ``[matrices, rows, columns]``, as ``orthogonalize`` takes them;
    updates the buffers."""
    rows, columns = params[0].shape[-2:]
    counts, device = _counts(params), params[0].device
    if not any(map(is_distributed, params)):
        x = torch.empty(sum(counts), rows, columns, dtype=working_dtype(device), device=device)
        average_(
            _matrices(grads),
            _matrices(buffers),
            list(x),
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            scale=scale_of(rows, columns),
            eps=group["eps"],
            grad_scale=scale,
        )
        return x
    # Each rank averages its part, of which the norm says nothing yet.
    x = plain(grads[0]).new_empty(sum(counts), rows, columns)
    for param, grad, buffer, whole in zip(params, grads, buffers, x.split(counts), strict=True):
        mine, average = plain(grad), plain(buffer)
        mine = mine if scale is None else mine / scale
        average.lerp_(mine, 1 - group["momentum"])
        if group["nesterov"]:
            average = mine.lerp(average, group["momentum"])
        whole.copy_(_gathered(average, param).view(whole.shape))
    return normalize(x, group["eps"])


def _matrices(tensors: list[Tensor]) -> list[Tensor]:
    return [one for whole in tensors for one in (whole if whole.dim() == 3 else (whole,))]


def _gathered(part: Tensor, param: Any) -> Tensor:
    """All of what this rank has a part of, placed as the parameter is."""
    if not is_distributed(param):
        return part
    whole: Tensor = (
        type(param)
        .from_local(
            part,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        .full_tensor()
    )
    return whole


def _own_part(whole: Tensor, param: Any) -> Tensor:
    if not is_distributed(param):
        return whole
    from torch.distributed.tensor import Replicate

    mesh = param.device_mesh
    everywhere = type(param).from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = everywhere.redistribute(mesh, param.placements).to_local()
    return part
