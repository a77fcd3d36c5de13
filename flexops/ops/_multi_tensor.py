"""What ops on lists of tensors share: the learning rate as a number or a tensor, autograd's version
counters, and errors that name an entry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .._torch import compiles_written_lists, not_compiled
from ._arguments import number
from ._register import refusal_of
from ._self_check import Make

F = TypeVar("F", bound=Callable[..., None])
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What parameters, gradients, copies and Adam's averages may be. Steps, and other states that are
not quantized, are float32."""


def listed(op: str, **lists: Iterable[Tensor]) -> list[list[Tensor]]:
    """The lists, as lists."""
    for name, tensors in lists.items():
        if not isinstance(tensors, Iterable) or isinstance(tensors, Tensor):
            raise TypeError(
                f"flexops.{op}: {name} must be a list of tensors, got {type(tensors).__name__}"
            )
    return [tensors if isinstance(tensors, list) else list(tensors) for tensors in lists.values()]


def split_lr(lr: float | Tensor, on_cpu: bool) -> tuple[float, Tensor | None]:
    """The learning rate as the ops take it: a number, or a tensor that overrides the number."""
    if not isinstance(lr, Tensor):
        return float(lr), None
    if on_cpu or not lr.is_cpu:
        return 0.0, lr if lr.dtype == torch.float32 else lr.float()
    return float(lr), None  # no synchronisation: it is on the CPU already


def on_cpu(tensors: Sequence[Any]) -> bool:
    return not tensors or not isinstance(tensors[0], Tensor) or tensors[0].is_cpu


def resolving_negatives(op: Any, *args: Any, **numbers: Any) -> Any:
    """``op(*args, **numbers)``, also where a tensor of a list has torch's negative bit, as what
    comes from ``.imag`` of a conjugate may: torch sees to that before it calls a kernel, but not in
    lists that are written."""
    try:
        return op(*args, **numbers)
    except RuntimeError:
        lists = [arg for arg in args if isinstance(arg, list)]
        negative = {
            id(tensor): tensor
            for tensors in lists
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.is_neg()
        }
        if not negative:
            raise
    resolved = {key: tensor.resolve_neg() for key, tensor in negative.items()}
    args = tuple(
        [resolved.get(id(item), item) for item in arg] if isinstance(arg, list) else arg
        for arg in args
    )
    result = op(*args, **numbers)
    for key, tensor in negative.items():
        # an expanded one is only read
        if all(
            stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            tensor.copy_(resolved[key])
    return result


def call_lists(op: Any, args: Sequence[Any], written: list[Tensor]) -> Any:
    """Call an op on lists of tensors, the first of which determines where it goes: without a tensor
    in it there is nothing to do.

    Checking thousands of tensors in Python at every call would cost more than the step. The native
    kernels check, too: only when they have rejected is it found out here, by the op's check,
    what to tell, in the same words and with the same type for every backend.
    """
    if not args[0]:
        return _refuse(op, args)
    try:
        with torch.no_grad():
            result = resolving_negatives(op, *args)
    except (RuntimeError, TypeError, ValueError):
        _refuse(op, args)
        raise
    increment_versions(written)
    return result


def _refuse(op: Any, args: Sequence[Any]) -> None:
    """Raise if arguments are not as the op's declaration and its check say."""
    given = op.keywords if isinstance(op, functools.partial) else {}
    refusal_of(getattr(op, "func", op))(*args, **given)


write_lists = call_lists if compiles_written_lists else not_compiled(call_lists)
"""For ops that write: what ``torch.compile`` cannot have in its graph runs between two."""


def increment_versions(tensors: list[Tensor]) -> None:
    """Report to autograd that the tensors were written: a backward pass that had saved one of them
    then says so instead of being silently wrong."""
    if torch.compiler.is_compiling():
        return  # the compiler sees the mutation in the schema
    tensors = (
        [tensor for tensor in tensors if not tensor.is_inference()]
        if torch.is_inference_mode_enabled()
        else tensors
    )
    if _counts_many_at_once():
        torch.autograd.graph.increment_version(tensors)
    else:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


@functools.cache
def _counts_many_at_once() -> bool:
    """Whether this torch's ``increment_version`` takes a list (torch 2.4's does not)."""
    try:
        torch.autograd.graph.increment_version([torch.empty(0)])
    except (RuntimeError, TypeError):
        return False
    return True


def check_rates(
    name: str,
    lr: float | Tensor,
    betas: Sequence[float] = (),
    **not_negative: float,
) -> None:
    """Raise if a number is out of range, or none, naming it."""
    given = {**{f"beta{i}": beta for i, beta in enumerate(betas, 1)}, **not_negative}
    for label, value in given.items():
        number(f"flexops.{name}: {label}", value)
    for index, value in enumerate(betas, 1):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"flexops.{name}: beta{index} must be in [0, 1), got {value}")
    for label, value in not_negative.items():
        if not value >= 0.0:
            raise ValueError(f"flexops.{name}: {label} must not be negative, got {value}")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise TypeError(f"flexops.{name}: lr must be a float32 tensor of one element")
    if not isinstance(lr, Tensor) and not number(f"flexops.{name}: lr", lr) >= 0.0:
        raise ValueError(f"flexops.{name}: lr must not be negative, got {lr}")


_NOT_NEGATIVE = ("lr_decay", "weight_decay", "eps")


def step_of_lists(declared: F) -> F:
    """Makes a function the step of the operator of its name. Its body is a docstring: its arguments
    are lists, in the order of the operator's, then by keyword ``lr``, and what the operator takes
    by the same name. The parameters, and copies of them, count as written.
    """
    code, op = declared.__code__, declared.__name__
    lists = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    usual = dict(zip(lists[::-1], (declared.__defaults__ or ())[::-1], strict=False))
    usual |= declared.__kwdefaults__ or {}

    @functools.wraps(declared)
    def step(*args: Any, **others: Any) -> None:
        declared(*args, **others)  # Python's own errors
        given = usual | dict(zip(lists, args, strict=False)) | others
        options = {name: given[name] for name in named if name != "lr"}
        if options.get("amsgrad") is False:
            given["max_exp_avg_sqs"] = ()
        lr, betas = given["lr"], [options[name] for name in ("beta1", "beta2") if name in options]
        rates = {name: options[name] for name in _NOT_NEGATIVE if name in options}
        check_rates(op, lr, betas, **rates)
        made = dict(zip(lists, listed(op, **{name: given[name] for name in lists}), strict=True))
        number, tensor = split_lr(lr, on_cpu(made["params"]))
        call = functools.partial(
            getattr(torch.ops.flexops, op).default, lr=number, lr_tensor=tensor, **options
        )
        write_lists(call, [*made.values()], made["params"] + made.get("copies", []))

    return cast(F, step)


def _are_joined(steps: Sequence[Any], params: Sequence[Any]) -> bool:
    """Whether one tensor holds all parameters' step counts."""
    return (
        len(steps) == 1 < len(params)
        and isinstance(steps[0], Tensor)
        and steps[0].shape == (len(params),)
        and steps[0].is_contiguous()
    )


def each_step(steps: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """A tensor of one element for each parameter's step count, also where one tensor holds them
    all."""
    return list(steps[0].unbind()) if _are_joined(steps, params) else steps


class Writer:
    """Writes results of a reference's step, unless ``found_inf`` says not to; waits for no
    device."""

    def __init__(self, found_inf: Tensor | None) -> None:
        self._skip = None if found_inf is None else found_inf.reshape(()) != 0

    def put(self, target: Tensor, value: Tensor) -> None:
        target.copy_(
            value if self._skip is None else torch.where(self._skip, target, value.to(target.dtype))
        )

    def gradient(self, grad: Tensor, grad_scale: Tensor | None, maximize: bool) -> Tensor:
        """The gradient in float32, unscaled (also where it lies), and turned round to maximize."""
        value = grad.float()
        if grad_scale is not None:
            value = value / grad_scale.reshape(())
            self.put(grad, value)
        return -value if maximize else value


def scramble(x: Tensor) -> Tensor:
    """As in csrc/common/stochastic.h, on int64 that holds 32 bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> shift) * factor) & 0xFFFFFFFF
    return x ^ x >> 16


def step_noise(step: Tensor, tensors: Sequence[Tensor], start: int = 0) -> Tensor:
    """32 random bits, in int64, for each element of tensors of one shape: from the step's number
    and where in memory an element comes, from ``start`` on."""
    first = tensors[0]
    count = torch.arange(start, start + first.numel(), device=first.device)
    # not row-major, but dense
    if (
        len({tensor.stride() for tensor in tensors}) == 1
        and torch.empty_like(first).stride() == first.stride()
    ):
        places = torch.empty_strided(
            first.shape, first.stride(), dtype=torch.int64, device=first.device
        )
        places.as_strided((first.numel(),), (1,)).copy_(count)
    else:
        places = count.view(first.shape)
    return scramble((places + scramble(step.reshape(()).long())) & 0xFFFFFFFF)


def round_to_bfloat16(value: Tensor, noise: Tensor) -> Tensor:
    """float32 to one of its neighbours in bfloat16, to each as likely as it is near; ``noise`` is
    uniform below 2**16."""
    rounded = ((value.view(torch.int32) + noise.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).bfloat16()


CHECKED = 1237
"""Elements of the parameter of a self-check."""


def three_steps(
    make: Make, op: str, states: int | Sequence[Tensor], *numbers: Any, **named: Any
) -> list[Tensor]:
    """Three steps of an operator on random float32 numbers, for ``flexops doctor``: parameter and
    states.

    Parameters are of size 1. With a step of size 0.1, a wrong formula shows as 0.01 and more,
    rounding as 1e-6.

    Args:
        states: what a step has beside the parameter, or how many of its shape; zero to begin with.
    """
    param, *grads = (make(CHECKED) for _ in range(4))
    zeros = (torch.zeros_like(param) for _ in range(states if isinstance(states, int) else 0))
    written = [param, *(zeros if isinstance(states, int) else states)]
    count = torch.zeros((), device=param.device)
    for grad in grads:
        lists = [[one] for one in (written[0], grad, *written[1:], count)]
        getattr(torch.ops.flexops, op)(*lists, *numbers, **named)
    return written
