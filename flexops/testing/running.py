"""Running a case: on copies of its arguments, with gradients, and with the operators that it
reaches written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexops._torch import TorchDispatchMode, schema_of, tree_map
from flexops.ops import _register

from .case import Args, Case, Make, Result, Shape, is_float, tensors_of


def cast(args: Args, dtype: torch.dtype) -> Args:
    return tuple(arg.to(dtype) if is_float(arg) else arg for arg in args)


def copies(args: Args, differentiable: Sequence[int]) -> Args:
    """The arguments as leaves of their own, each laid out as it was: a call may write into them, or
    into their gradients."""
    copied = []
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor):
            arg = _like_laid_out(arg.detach())
            arg.requires_grad_(position in differentiable)
        copied.append(arg)
    return tuple(copied)


def _like_laid_out(tensor: Tensor) -> Tensor:
    """A copy with the same strides and storage offset, overlaps included."""
    if not tensor.numel():
        return tensor.clone()
    extent = (
        tensor.storage_offset()
        + 1
        + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )
    storage = torch.zeros(extent, dtype=tensor.dtype, device=tensor.device)
    # no view, to autograd and to the compiler
    copy = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).data
    distinct = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    copy[tuple(distinct)] = tensor[tuple(distinct)]
    return copy


def output_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random, the same for outputs of the same shapes, and exact in every dtype."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype).to(output.device)
        for output in outputs
    ]


def run(function: Callable[..., Any], args: Args, differentiable: Sequence[int] = ()) -> Result:
    """Call ``function`` on copies of ``args``; with gradients of the arguments at
    ``differentiable``."""
    args = copies(args, differentiable)
    outputs = tensors_of(function(*args))
    return result_of(outputs, args, differentiable, output_gradients(outputs))


def run_in_place(case: Case, args: Args, given: Sequence[Tensor]) -> Result:
    """Like ``run``, on these very tensors and with output gradients that are there: no copy from
    the host, which stream capture would reject."""
    return result_of(tensors_of(case.call(*args)), args, case.differentiable, given)


def result_of(
    outputs: Sequence[Tensor], args: Args, differentiable: Sequence[int], given: Sequence[Tensor]
) -> Result:
    """Outputs, and with ``given`` as their gradients those of the arguments at
    ``differentiable``."""
    gradients: tuple[Tensor | None, ...] = ()
    if differentiable:
        both = zip(outputs, given, strict=True)
        pairs = [(output, gradient) for output, gradient in both if output.requires_grad]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [args[position] for position in differentiable],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
    return Result(tuple(output.detach() for output in outputs), gradients)


def results_and_written(op: Any, *args: Any) -> tuple[Tensor, ...]:
    """What a call of ``op`` gives, and what it writes, which is copied before."""
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema_of(op).arguments
    ]
    args = tuple(
        tree_map(_detached, arg) if write else arg
        for arg, write in zip(args, written, strict=False)
    )
    return (
        *tensors_of(op(*args)),
        *tensors_of([arg for arg, write in zip(args, written, strict=False) if write]),
    )


def other_values(kind: str, value: object) -> tuple[object, ...]:
    """For an argument of this type in a schema, values near the given one, of which an operator may
    accept some."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int) and "int" in kind.lower():
        return (value + 1, value - 1, value * 2)
    return (value * 0.75 + 0.1, value * 0.75) if isinstance(value, (int, float)) else ()


class Recorder(TorchDispatchMode):
    """Keeps each call of an operator that is registered through flexops, with the arguments as they
    were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Args, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _register.reference_of(func.name()):
            for op in dict.fromkeys((func, _register.public.get(func.name(), func))):
                copy = _snapshot if _register.has_gradient(op) else _detached
                self.calls.append((op, tree_map(copy, args), tree_map(copy, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _snapshot(value: Any) -> Any:
    return (
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
    )


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def opchecks(args: Args) -> Sequence[str]:
    """Which of opcheck's parts can be run: its check of the schema compares arguments by a function
    that torch has not for fp8."""
    parts = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    return (
        parts[1:]
        if any(
            isinstance(arg, Tensor) and arg.is_floating_point() and arg.element_size() == 1
            for arg in args
        )
        else parts
    )


def forward_calls(case: Case, device: str) -> list[tuple[Any, Args]]:
    """The operators that the case itself calls, each once, with arguments by position."""
    with Recorder() as recorder:
        case.call(
            *copies(case.inputs(Make(case.dtypes[0], device), case.shapes[0]), case.differentiable)
        )
    calls = {
        str(op): (op, args, kwargs)
        for op, args, kwargs in recorder.calls
        if op.name() not in _register.public
    }
    named = [
        (op, args, [argument.name for argument in schema_of(op).arguments[len(args) :]], kwargs)
        for op, args, kwargs in calls.values()
    ]
    return [
        (op, (*args, *(kwargs[name] for name in names if name in kwargs)))
        for op, args, names, kwargs in named
    ]


def recorded(
    case: Case, device: str, *, dtype: torch.dtype | None = None, shape: Shape | None = None
) -> list[tuple[Any, Args, dict[str, Any]]]:
    """The operators that the case reaches, each once, backward ones included, and arguments for
    them."""
    with Recorder() as recorder:
        run(
            case.call,
            case.inputs(Make(dtype or case.dtypes[0], device), shape or case.shapes[0]),
            case.differentiable,
        )
    return list({str(call[0]): call for call in reversed(recorder.calls)}.values())
