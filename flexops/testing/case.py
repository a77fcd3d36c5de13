"""One way to call an operator, as a test file says it, and what is drawn for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexops._torch import tree_leaves
from flexops.ops._self_check import Make as Make

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Shape = tuple[int, ...]
Args = tuple[Any, ...]


class Refusal(NamedTuple):
    """A wrong call, the error that it must raise and what its message must say (a regular
    expression)."""

    call: Callable[[], object]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Case:
    """One way to call an operator.

    Attributes:
        name: what the tests and the accuracy table call it.
        family: what the operator is built with, as ``flexops.status()`` names it (``norm``,
            ``mylib.scale``): which native library must be there.
        call: the public function, taking what ``inputs`` gives, by position. One that works in
            place returns what it wrote: it gets copies.
        inputs: ``(make, shape) -> arguments``; tensors, None, numbers.
        oracle: the same mathematics in plain PyTorch, differentiable by autograd, exact when given
            float64.
        rival: torch's own kernel for the same, whose error ours must not exceed; the oracle, run in
            the tested dtype, if None.
        names: the arguments' names in ``call``, as error messages have them. Without names, wrong
            dtypes are not tried.
        differentiable: positions of arguments with a gradient; () for none.
        parameters: positions of arguments that may have another floating-point dtype than the first
            one, as mixed training gives them.
        shapes: shapes for ``inputs``. The first is for tests that cost much a number (about 50
            elements; gradcheck, compilers), the last for accuracy (some thousand elements), all for
            parity.
        dtypes: floating-point dtypes that are accepted.
        dynamic: shapes that one graph must serve; the first shape, twice and three times as large
            in each dimension, if empty.
        empty: shapes without elements; the first shape with none in its first dimension, if not
            given.
        huge: a shape of more than 2^31 elements whose rows (along the first dimension) do not
            depend on each other, for bfloat16.
        refusals: wrong calls, beyond wrong dtypes, which are tried on every floating-point argument
            by itself.
        refused: dtypes that every floating-point argument refuses with a TypeError.
        gradients: the family of its gradient, if that is another one.
        same_bits: native results have the reference's bits.
        broadcasts: takes inputs whose elements share memory (not true for what is written in
            place).
        autocast: the dtype of the parameters inside an autocast region; False: not tried.
        not_finite: NaN and infinity lead where they do in the reference; False: not tried.
        accuracy: False for what has no error to measure, because its results have the reference's
            bits, say.
        rounding: the least relative rounding that is granted where results are compared element by
            element, for sums of many terms.
        slack: what the largest and the mean error may be of the rival's. The largest is that of one
            element of thousands: it is the mean that decides.
        draws: how often inputs are drawn to measure errors; many, where results are few numbers,
            whose mean error is a matter of luck.
        devices: device types.
        inductor: also compiled with inductor, which takes ten seconds. None: the family's first
            case is.
    """

    name: str
    family: str
    call: Callable[..., Any]
    inputs: Callable[[Make, Shape], Args]
    oracle: Callable[..., Any]
    rival: Callable[..., Any] | None = None
    names: tuple[str, ...] = ()
    differentiable: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    shapes: tuple[Shape, ...] = ((3, 8), (5, 101), (64, 512))
    dtypes: tuple[torch.dtype, ...] = FLOATS
    dynamic: tuple[Shape, ...] = ()
    empty: tuple[Shape, ...] | None = None
    huge: Shape | None = None
    refusals: tuple[Refusal, ...] = ()
    refused: tuple[torch.dtype, ...] = (torch.float64, torch.int32)
    gradients: str = ""
    same_bits: bool = False
    broadcasts: bool = True
    autocast: bool = True
    not_finite: bool = True
    accuracy: bool = True
    rounding: float = 0.0
    slack: tuple[float, float] = (2.0, 1.05)
    draws: int = 1
    devices: tuple[str, ...] = ("cpu", "cuda")
    inductor: bool | None = None

    def __str__(self) -> str:
        return self.name


class Result(NamedTuple):
    """What a call gave: its tensors, and the gradients of the case's differentiable arguments."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def only(applies: Callable[[Case], object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test of the contract that is for some cases only."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.applies = applies  # type: ignore[attr-defined]
        return test

    return mark


def has_gradient(case: Case) -> bool:
    return bool(case.differentiable)


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1


def tensors_of(value: object) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def argument_name(case: Case, position: int) -> str:
    return case.names[position] if position < len(case.names) else f"argument {position}"
