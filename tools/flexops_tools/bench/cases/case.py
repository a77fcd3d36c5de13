"""A case, the machine it is for, and how the usual kinds of case are put together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flexops.bench.reference import on_reference
from flexops.bench.setup import COMPILE as COMPILE
from flexops.bench.setup import Function as Function
from flexops.bench.setup import Functions as Functions
from flexops.bench.setup import Setup as Setup
from flexops.bench.setup import random
from flexops.bench.timing import Measure

from ..results import FLEXOPS as FLEXOPS

TORCH = "torch eager"
REFERENCE = "reference"

SMALL_ROWS = (1, 16, 64)


@dataclass(frozen=True)
class Case:
    """One thing to do, and the ways to do it.

    Attributes:
        op: the op's family, as the catalogue calls it.
        function: the public function.
        name: what is done, with dtype and shape.
        part: ``forward``, ``backward``, ``step``, ``call`` or ``device``.
        bytes: each input read once and each output written once; 0 where memory is not what bounds
            it.
        contenders: name -> a call that does it; flexops's own is called ``flexops``. Forward passes
            write into memory of their own.
        reads_and_writes: the bytes in words, for the reader to check.
        measure: how calls are timed.
        memory: the memory that a call takes is measured, too.
        operations: floating-point ones, where these are what bounds it.
    """

    op: str
    function: str
    name: str
    part: str
    bytes: int
    contenders: dict[str, Callable[[], object]]
    reads_and_writes: str
    measure: Measure = "device"
    memory: bool = False
    operations: int = 0


def library(
    label: str,
    module: str,
    name: str,
    adapt: Callable[[Function], Function] = lambda function: function,
) -> Functions:
    """``{label: function}`` if the library is installed, else nothing. ``adapt`` gives it the
    arguments that the other contenders take."""
    try:
        found = getattr(import_module(module), name)
    except Exception:  # absent, or made for another torch
        return {}
    return {label: adapt(found)}


def contenders(
    setup: Setup, ours: Function, torchs: Function, others: Functions | None = None
) -> Functions:
    """Ours, torch's eager way, the same compiled, libraries, and our reference."""
    return {
        FLEXOPS: ours,
        TORCH: torchs,
        **setup.compiled(torchs),
        **(others or {}),
        REFERENCE: on_reference(ours),
    }


def tensors(value: object) -> list[Tensor]:
    return [
        item
        for item in (value if isinstance(value, (tuple, list)) else [value])
        if isinstance(item, Tensor)
    ]


def forward_and_backward(
    family: str,
    function: str,
    name: str,
    functions: Functions,
    args: Sequence[Any],
    forward: tuple[int, str],
    backward: tuple[int, str] | None,
    operations: tuple[int, int] = (0, 0),
) -> Iterator[Case]:
    """Both passes as training runs them: the forward one with what is saved for the other, the
    backward one by ``torch.autograd.grad``.

    Args:
        functions: name -> a function of ``args``.
        args: those that require a gradient get one.
        forward, backward: bytes, and how they are counted.
        operations: floating-point ones of both passes, where these are what bounds them.
    """
    sets = input_sets(args)
    calls = {
        label: rotating([_bound(call, each) for each in sets]) for label, call in functions.items()
    }
    yield Case(
        family, function, name, "forward", forward[0], calls, forward[1], operations=operations[0]
    )
    if backward is not None:
        calls = {
            label: rotating([_backward(label, call, each) for each in sets])
            for label, call in functions.items()
        }
        yield Case(
            family,
            function,
            name,
            "backward",
            backward[0],
            calls,
            backward[1],
            operations=operations[1],
        )


class Family:
    """Cases of one family of operators, on one machine."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name, self.setup = name, setup

    def passes(
        self,
        function: str,
        what: str,
        functions: Functions | tuple[Any, ...],
        args: Sequence[Any],
        forward: tuple[int, str],
        backward: tuple[int, str] | None = None,
    ) -> Iterator[Case]:
        """:func:`forward_and_backward`; ``functions`` may be what :func:`contenders` takes."""
        given = contenders(self.setup, *functions) if isinstance(functions, tuple) else functions
        yield from forward_and_backward(self.name, function, what, given, args, forward, backward)

    def small(
        self, function: str, ours: Function, torchs: Function, args: Any, shape: str
    ) -> Iterator[Case]:
        """:func:`small_calls` of ours and torch's."""
        functions = {FLEXOPS: ours, TORCH: torchs}
        yield from small_calls(self.setup, self.name, function, functions, args, shape)

    def trained(
        self,
        function: str,
        what: str,
        functions: Functions,
        args: Sequence[Tensor],
        differentiable: Sequence[int],
        moved: tuple[int, str],
        *,
        memory: bool = False,
    ) -> Case:
        """Both passes in one call."""
        calls = {name: with_gradient(one, args, differentiable) for name, one in functions.items()}
        part = "forward + backward"
        return Case(self.name, function, what, part, moved[0], calls, moved[1], "queued", memory)


def with_gradient(
    function: Function, args: Sequence[Tensor], differentiable: Sequence[int]
) -> Callable[[], object]:
    """A call of both passes, whose inputs require gradients anew each time. The result's gradient
    is made once: filling it is none of the function's work."""
    upstream: list[Tensor] = []

    def call() -> object:
        given = [
            arg.detach().requires_grad_(position in differentiable)
            for position, arg in enumerate(args)
        ]
        result: Any = function(*given)
        if not upstream:
            upstream.append(torch.ones_like(result))
        inputs = [given[position] for position in differentiable]
        return torch.autograd.grad(result, inputs, upstream[0])

    return call


def input_sets(args: Sequence[Any]) -> list[Sequence[Any]]:
    """The inputs, and two copies of them unless they are enormous: a call that takes those of the
    call before could find some of them in the cache."""
    if sum(tensor.nbytes for tensor in tensors(args)) > 2**30:
        return [args]
    copies = [[_copy(arg) if isinstance(arg, Tensor) else arg for arg in args] for _ in range(2)]
    return [args, *copies]


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call that is each of ``calls`` in turn; the first time, all of them, because some have
    something to prepare."""
    turns = itertools.cycle(calls)
    waiting = list(calls[1:])

    def call() -> object:
        while waiting:
            waiting.pop()()
        return next(turns)()

    return call


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def small_calls(
    setup: Setup,
    family: str,
    function: str,
    functions: Functions,
    args: Callable[[int], Sequence[Any]],
    shape: str,
) -> Iterator[Case]:
    """A call on few rows without gradients, as inference makes it: with the host's part, and in a
    CUDA graph without."""
    for rows in SMALL_ROWS:
        given = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args(rows)]
        name = f"{function}, {rows} x {shape}"
        calls = {label: _bound(call, given) for label, call in functions.items()}
        yield Case(family, function, name, "call", 0, calls, "", "call")
        if setup.device == "cuda":
            yield Case(family, function, name, "device", 0, dict(calls), "", "graph")


class Backward:
    """A backward pass that can be called again and again; its forward pass is run at the first
    call."""

    def __init__(self, function: Function, args: Sequence[Any]) -> None:
        self._function, self._args = function, args
        self._inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def __call__(self) -> object:
        if not self._outputs:
            self._outputs = [
                output for output in tensors(self._function(*self._args)) if output.requires_grad
            ]
            self._gradients = [
                random(output.shape, output.dtype, output.device) for output in self._outputs
            ]
        return torch.autograd.grad(self._outputs, self._inputs, self._gradients, retain_graph=True)


def _backward(label: str, function: Function, args: Sequence[Any]) -> Callable[[], object]:
    call = Backward(function, args)
    # the backward pass, too, must run on the reference
    return on_reference(call) if label == REFERENCE else call


def _bound(function: Function, args: Sequence[Any]) -> Callable[[], object]:
    return lambda: function(*args)
