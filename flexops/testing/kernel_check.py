"""``check_kernel``: the contract of a kernel of ``flexops.kernel``, in one line of a test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexops
from flexops._torch import counting_backend, schema_of
from flexops.errors import FlexopsError

from .case import FLOATS, Args, Result, is_float, tensors_of
from .comparing import assert_near
from .emulator import EmulationError, emulate
from .layouts import LAYOUTS, laid_out, smaller
from .running import cast, opchecks, other_values

Call = Callable[..., Any]


def check_kernel(
    kernel: flexops.Kernel,
    cases: Iterable[Args],
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    rounding: float = 0.0,
) -> None:
    """Verify a kernel against its reference and what torch requires of an operator.

    The kernel runs on the GPU of this machine, else on the emulator (:func:`emulate`). For each
    case and each dtype that the kernel accepts, results are verified against the reference in
    float64; so is each candidate, for the cases' own dtypes. For the first case also: any strides,
    empty tensors, other numbers than the case's, smaller tensors (rejected, or broadcast as the
    reference does), the opposite order of threads, ``torch.library.opcheck``, ``torch.compile``
    with fixed and dynamic sizes, meta tensors, and the gradient: gradcheck with ``backward=``, an
    error without.

    Args:
        kernel: what ``flexops.kernel`` returned, with ``reference=``.
        cases: the arguments of a call each: tensors of the CPU, numbers, None. About a thousand
            elements; the first case, which costs most, about 50.
        dtypes: floating-point dtypes that floating-point arguments are converted to; those that the
            kernel's pointers exclude are skipped.
        rounding: the least relative rounding that is granted, for sums of many terms.

    Raises:
        AssertionError: names the check, the case and what differs.
        FlexopsError: there is no reference, or no case, or NaN in the first case's results.
        TypeError: ``kernel`` or a case is not as above.
    """
    if not isinstance(kernel, flexops.Kernel):
        raise TypeError(
            f"check_kernel: kernel must be what flexops.kernel returned, got {kernel!r}"
        )
    if isinstance(cases, (Tensor, str)) or not isinstance(cases, (Iterable, NoneType)):
        raise TypeError(
            "check_kernel: cases must be a list of calls' arguments, such as [(x, 2.0)], got"
            f" {type(cases).__name__}"
        )
    cases = list(() if cases is None else cases)
    if odd := [one for one in cases if not isinstance(one, (tuple, list))]:
        raise TypeError(
            "check_kernel: each case must be the tuple of a call's arguments, such as [(x, 2.0)],"
            f" got {type(odd[0]).__name__}"
        )
    listed = isinstance(dtypes, (list, tuple))
    if not listed or not all(isinstance(d, torch.dtype) and d.is_floating_point for d in dtypes):
        raise TypeError(
            "check_kernel: dtypes must be a list of floating-point dtypes, such as [torch.float32],"
            f" got {dtypes!r}"
        )
    if not isinstance(rounding, (int, float)) or not rounding >= 0:
        raise TypeError(f"check_kernel: rounding must be a number from 0 on, got {rounding!r}")
    if kernel.reference is None or not cases:
        raise FlexopsError(
            f"{kernel.schema} cannot be checked",
            found="no reference" if kernel.reference is None else "no cases",
            required="a reference in plain PyTorch, and the arguments of one call or more",
            fix="flexops.kernel(..., reference=...), check_kernel(kernel, [(x, 2.0)])",
        )
    parameters = list(inspect.signature(kernel).parameters.values())
    least = sum(one.default is one.empty for one in parameters)
    for number, args in enumerate(cases):
        if not least <= len(args) <= len(parameters) or any(t.is_meta for t in tensors_of(args)):
            raise TypeError(
                f"check_kernel: case {number} must have {', '.join(map(str, parameters))}, tensors"
                f" of the CPU among them, got {len(args)} arguments"
            )
    subject = _Subject(kernel, rounding)
    own = tuple({arg.dtype: None for args in cases for arg in args if is_float(arg)})
    subject.expression(cases[0])  # the first case's own dtypes have to be accepted
    for number, args in enumerate(cases):
        for dtype in dict.fromkeys((*own[:1], *dtypes)) if own else (None,):
            given = cast(args, dtype) if dtype else args
            if subject.takes(given):
                with _named(kernel, f"case {number}{f', {dtype}' if dtype else ''}: results"):
                    subject.results(given)
    for number, one in enumerate(kernel.candidates[1:], 1):
        other = _Subject(one, rounding)
        for args in cases:
            with _named(kernel, f"candidate {number}"):
                other.results(args)
                _opposite_order_of_threads(other, args)
    if any(one.isnan().any() for one in subject.reference(*cases[0])):
        raise FlexopsError(
            f"the first case of {kernel.schema} cannot be checked",
            found="results with NaN, which torch's checks and gradcheck find unequal to themselves",
            fix="put a case without NaN first; the results of the others may have NaN",
        )
    for check in _CHECKS:
        with _named(kernel, f"case 0: {check.__name__.strip('_').replace('_', ' ')}"):
            check(subject, cases[0])


class _Subject(NamedTuple):
    kernel: flexops.Kernel
    rounding: float

    @property
    def written(self) -> list[bool]:
        """Of each argument, whether the kernel writes it."""
        return [
            one.alias_info is not None and one.alias_info.is_write
            for one in schema_of(self.kernel.op).arguments
        ]

    def expression(self, args: Args) -> str:
        given, named = self.split(args)
        return self.kernel.expression(*given, **named)

    def takes(self, args: Args) -> bool:
        try:
            self.expression(args)
        except TypeError:
            return False
        return True

    def native(self, *args: Any, reverse: bool = False) -> Any:
        """The kernel, on copies of what it writes; its results, and what it wrote."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        args = self._own(args, device)
        if device == "cuda":
            made = self.call(*args)
        else:
            given, named = self.split(args)
            made = emulate(self.kernel, *given, reverse=reverse, **named)
        return self._all(made, args)

    def reference(self, *args: Any) -> Any:
        args = self._own(args, "cpu")
        assert self.kernel.reference is not None
        given, named = self.split(args)
        return self._all(self.kernel.reference(*given, **named), args)

    def call(self, *args: Any) -> Any:
        """The operator, as the dispatcher calls it."""
        given, named = self.split(args)
        return self.kernel(*given, **named)

    def split(self, args: Args) -> tuple[Args, dict[str, Any]]:
        """The arguments by position, and those that the schema has by name only."""
        names = [one.name for one in schema_of(self.kernel.op).arguments if one.kwarg_only]
        first = len(args) - len(names)
        return args[:first], dict(zip(names, args[first:], strict=True))

    def _own(self, args: Args, device: str) -> Args:
        """The arguments on a device: copies of what is written, and a factory's device."""
        places = ["Device" in str(one.type) for one in schema_of(self.kernel.op).arguments]
        return tuple(
            (arg.clone() if written else arg).to(device)
            if isinstance(arg, Tensor)
            else torch.device(device)
            if place
            else arg
            for arg, written, place in zip(args, self.written, places, strict=True)
        )

    def _all(self, made: Any, args: Args) -> tuple[Tensor, ...]:
        changed = [arg for arg, written in zip(args, self.written, strict=True) if written]
        made = made if schema_of(self.kernel.op).returns else ()
        return tuple(one.cpu() for one in (*tensors_of(made), *tensors_of(changed)))

    def results(self, args: Args) -> None:
        made = self.native(*args)
        try:
            wide = self.reference(*cast(args, torch.float64))
        except (TypeError, RuntimeError):  # a reference that computes no float64
            wide = self.reference(*args)
        assert_near(Result(made, ()), Result(wide, ()), self.rounding)

    def plain(self, args: Args) -> Result:
        return Result(self.reference(*args), ())


class _named:
    """Puts what was checked before an error's text."""

    def __init__(self, kernel: flexops.Kernel, what: str) -> None:
        self.label = f"{kernel._code.schema.qualname}: {what}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FlexopsError):
            if hasattr(error, "add_note"):
                error.add_note(self.label)
        elif isinstance(error, Exception):
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{self.label}: {kind}{error}") from error


# ---- checks of the first case ----


def _any_strides(subject: _Subject, args: Args) -> None:
    for name, layout in LAYOUTS.items():
        if name == "broadcast" and any(subject.written):
            continue
        given = laid_out(args, layout)
        try:
            actual = subject.native(*given)
        except ValueError:  # what is written must be contiguous
            assert any(subject.written), f"{name}: rejected"
            continue
        assert_near(Result(actual, ()), subject.plain(given), subject.rounding, what=name)


def _empty_tensors(subject: _Subject, args: Args) -> None:
    none = tuple(arg[:0] if isinstance(arg, Tensor) and arg.dim() else arg for arg in args)
    try:
        expected = subject.plain(none)
        actual = subject.native(*none)
    except (ValueError, IndexError, RuntimeError):
        return  # a check of the kernel's own, or a reference that has no result
    assert_near(Result(actual, ()), expected)


def _other_numbers(subject: _Subject, args: Args) -> None:
    """In case the kernel has a case's number written into it."""
    kinds = [str(one.type) for one in schema_of(subject.kernel.op).arguments]
    for position, (arg, kind) in enumerate(zip(args, kinds, strict=True)):
        for value in () if isinstance(arg, Tensor) or arg is None else other_values(kind, arg):
            given = (*args[:position], value, *args[position + 1 :])
            try:
                expected = subject.plain(given)
                actual = subject.native(*given)
            except (ValueError, RuntimeError, IndexError) as error:
                if isinstance(error, FlexopsError):
                    raise
                continue  # a value that the kernel or its reference rejects
            assert_near(Result(actual, ()), expected, subject.rounding, what=f"with {value!r}")


def _smaller_tensors(subject: _Subject, args: Args) -> None:
    """Each further tensor with one element along a dimension, before memory of NaN: it is
    rejected, or means what the reference makes of it."""
    for position, small in smaller(args):
        given = (*args[:position], small, *args[position + 1 :])
        name = schema_of(subject.kernel.op).arguments[position].name
        try:
            actual = Result(subject.native(*given), ())
        except (ValueError, TypeError, IndexError):
            continue
        except EmulationError as error:
            said = f"the kernel reads beyond it: {error}"
            raise AssertionError(_accepted(name, small, said)) from None
        try:
            assert_near(actual, subject.plain(given), subject.rounding)
        except (AssertionError, RuntimeError) as error:
            said = f"the result is not the reference's: {error}"
            raise AssertionError(_accepted(name, small, said)) from None


def _accepted(name: str, small: Tensor, said: str) -> str:
    fix = f'shapes={{"{name}": ...}}: a shape rejects it, "as x" broadcasts it to x'
    return f"{name} of shape {list(small.shape)} is accepted, and {said}\n  fix: {fix}"


def _opposite_order_of_threads(subject: _Subject, args: Args) -> None:
    if torch.cuda.is_available():
        return
    actual = Result(subject.native(*args, reverse=True), ())
    assert_near(actual, Result(subject.native(*args), ()), subject.rounding, what="a race:")


def _operator_checks_of_torch(subject: _Subject, args: Args) -> None:
    given, named = subject.split(subject._own(args, "cpu"))
    torch.library.opcheck(subject.kernel.op, given, named, test_utils=opchecks(args))


def _torch_compile(subject: _Subject, args: Args) -> None:
    kernel = subject.kernel
    for dynamic in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *given, **named: kernel(*given, **named),
            fullgraph=True,
            dynamic=dynamic,
            backend=counting_backend("aot_eager"),
        )
        own = subject._own(args, "cpu")
        given, named = subject.split(own)
        actual = Result(subject._all(compiled(*given, **named), own), ())
        assert_near(actual, subject.plain(args), what=f"dynamic={dynamic}")
    torch.compiler.reset()


def _meta_tensors(subject: _Subject, args: Args) -> None:
    made = subject.call(*subject._own(args, "meta"))
    found, wanted = (
        [(tuple(one.shape), one.dtype) for one in tensors_of(results)]
        for results in (made, subject.reference(*args)[: len(tensors_of(made))])
    )
    assert found == wanted, f"out= says {found}, the reference returns {wanted}"


def _gradient(subject: _Subject, args: Args) -> None:
    positions = [
        i
        for i, (arg, written) in enumerate(zip(args, subject.written, strict=True))
        if is_float(arg) and not written
    ]
    if not positions or not schema_of(subject.kernel.op).returns:
        return
    leaves = [args[i].detach().double().requires_grad_() for i in positions]

    def call(*given: Tensor) -> Any:
        chosen = dict(zip(positions, given, strict=True))
        every = (chosen.get(i, arg) for i, arg in enumerate(cast(args, torch.float64)))
        return subject.call(*every)

    if subject.kernel.differentiable:
        assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-6, rtol=1e-4)
        return
    outputs = [one for one in tensors_of(call(*leaves)) if one.requires_grad]
    for output in outputs:
        with pytest.raises(RuntimeError, match="has no gradient"):
            output.sum().backward()


_CHECKS = (
    _meta_tensors,
    _any_strides,
    _empty_tensors,
    _other_numbers,
    _smaller_tensors,
    _opposite_order_of_threads,
    _operator_checks_of_torch,
    _torch_compile,
    _gradient,
)
