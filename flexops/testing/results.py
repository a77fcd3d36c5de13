"""What an operator computes: as the reference, float64 and torch have it."""

from __future__ import annotations

import functools
import re
from itertools import product

import torch
from torch import Tensor

from flexops._torch import FakeTensorMode, schema_of
from flexops.bench.reference import OnReference
from flexops.ops import _register

from .accuracy import compared, write
from .case import Args, Case, Make, Result, argument_name, is_float, only, tensors_of
from .comparing import ROUNDING, assert_near, assert_same, numbers_of
from .isa import at_each_isa, every_level
from .layouts import LAYOUTS, laid_out, layouts_of, smaller
from .running import cast, forward_calls, other_values, results_and_written, run


class Results:
    def test_native_is_what_the_reference_is(
        self, case: Case, device: str, dtype: torch.dtype
    ) -> None:
        for shape in case.shapes:
            args = case.inputs(Make(dtype, device), shape)
            with OnReference():
                expected = run(case.call, args, case.differentiable)
            for isa in at_each_isa(device):
                with isa:
                    actual = run(case.call, args, case.differentiable)
                    if case.same_bits:
                        assert_same(actual, expected)
                    assert_near(actual, expected, case.rounding, what=f"{shape}")
                assert _dtypes(actual) == _dtypes(expected)
                assert _gradients_have_dtypes(case, args, actual)

    @only(lambda case: "." in case.family)
    def test_broadcasts_what_the_reference_does(self, case: Case, device: str) -> None:
        """A tensor with fewer elements than the case's is rejected, or means what the reference
        makes of it: the declaration broadcasts nothing."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        for position, small in smaller(args):
            given = (*args[:position], small, *args[position + 1 :])
            try:
                actual = run(case.call, given)
            except (ValueError, TypeError, RuntimeError):
                continue
            name = f"{argument_name(case, position)} of shape {list(small.shape)}"
            with OnReference():
                expected = run(case.call, given)
            assert_near(actual, expected, case.rounding, what=f"{name} (shapes= rejects it):")

    def test_other_numbers(self, case: Case, device: str) -> None:
        """Each number and each switch that an operator is given, once with another value: a kernel
        may have the case's own written into it."""
        for op, args in forward_calls(case, device):
            positions = [
                i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad
            ]
            call, refuse = functools.partial(results_and_written, op), _register.refusal_of(op)
            for number, argument in enumerate(schema_of(op).arguments[: len(args)]):
                for value in other_values(str(argument.type), args[number]):
                    changed = (*args[:number], value, *args[number + 1 :])
                    try:
                        refuse(*changed)
                        with OnReference():
                            expected = run(call, changed, positions)
                    except (
                        RuntimeError,
                        TypeError,
                        ValueError,
                        IndexError,
                        ArithmeticError,
                    ):  # a value that the operator has no meaning for
                        continue
                    for isa in at_each_isa(device):
                        with isa:
                            try:
                                actual = run(call, changed, positions)
                            except RuntimeError as error:
                                if re.match(r"\w+::\w+: .* must ", str(error)) is None:
                                    raise
                                break  # a binding's own refusal
                            assert_near(
                                actual,
                                expected,
                                case.rounding,
                                what=f"{op}, {argument.name}={value!r}",
                            )
                    else:
                        break

    @only(lambda case: case.accuracy)
    def test_accuracy(self, case: Case, device: str, dtype: torch.dtype) -> None:
        """Against float64: no further from it than torch's own kernel."""
        worse = []
        for level, label, mine, theirs, size in compared(case, device, dtype):
            if level == "":
                write(case, device, dtype, label, mine, theirs, size)
            noise = 2.0**-26 * size  # what is far below a float32's grain says nothing
            if any(
                a > b * slack + noise for a, b, slack in zip(mine, theirs, case.slack, strict=True)
            ):
                worse.append(f"{label} {level}: largest and mean error {mine}, torch's {theirs}")
        limits = (
            f"the largest may be {case.slack[0]:g} times torch's, the mean {case.slack[1]:g}:"
            " Case(slack=...), if it rounds otherwise on purpose"
        )
        assert not worse, "\n".join([*worse, limits])

    @every_level
    def test_the_same_bits_twice(self, case: Case, device: str) -> None:
        """And without autograd, and in inference mode. In 16 bits much is rounded away that differs
        in 32."""
        for dtype in dict.fromkeys((case.dtypes[0], case.dtypes[-1])):
            args = case.inputs(Make(dtype, device), case.shapes[-1])
            first = run(case.call, args, case.differentiable)
            assert_same(run(case.call, args, case.differentiable), first)
            with torch.no_grad():
                assert_same(run(case.call, args), first._replace(gradients=()))
            with torch.inference_mode():
                outputs = tensors_of(
                    case.call(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
                )
            assert_same(Result(outputs, ()), first._replace(gradients=()))

    def test_strides(self, case: Case, device: str) -> None:
        for layout, dtype, shape in product(layouts_of(case), case.dtypes[:2], case.shapes[:2]):
            args = laid_out(case.inputs(Make(dtype, device), shape), LAYOUTS[layout])
            plain = tuple(
                arg.contiguous().clone() if isinstance(arg, Tensor) else arg for arg in args
            )
            expected = run(case.call, plain, case.differentiable)
            for isa in at_each_isa(device):
                with isa:
                    assert_near(
                        run(case.call, args, case.differentiable),
                        expected,
                        case.rounding,
                        what=f"{shape} {dtype} {layout}",
                    )

    def test_empty(self, case: Case, device: str) -> None:
        for shape in ((0, *case.shapes[0][1:]),) if case.empty is None else case.empty:
            for dtype in case.dtypes:
                args = case.inputs(Make(dtype, device), shape)
                with OnReference():
                    expected = run(case.call, args, case.differentiable)
                for isa in at_each_isa(device):
                    with isa:
                        actual = run(case.call, args, case.differentiable)
                        assert_near(actual, expected, what=f"{shape}")
                        assert _dtypes(actual) == _dtypes(expected)

    @only(lambda case: case.not_finite)
    def test_not_finite(self, case: Case, device: str) -> None:
        """What a NaN or an infinity in one argument makes of results and gradients is finite where
        the reference has it so, and only there."""
        given = case.inputs(Make(case.dtypes[0], device), case.shapes[1])
        for position, strange in product(
            (i for i, arg in enumerate(given) if is_float(arg)),
            ((float("nan"),), (float("inf"), -float("inf"))),
        ):
            args = tuple(arg.clone() if i == position else arg for i, arg in enumerate(given))
            for number, value in enumerate(strange):
                args[position].view(-1)[number * 19 :: 37 * len(strange)] = value
            with OnReference():
                expected = run(case.call, args, case.differentiable)
            for isa in at_each_isa(device):
                with isa:
                    actual = run(case.call, args, case.differentiable)
                    assert_near(
                        _infinite_is_nan(actual),
                        _infinite_is_nan(expected),
                        case.rounding,
                        what=f"{strange} in {argument_name(case, position)}",
                    )

    @only(lambda case: case.autocast)
    def test_autocast(self, case: Case, device: str) -> None:
        """Float32 parameters with bfloat16 activations, which is what autocast leads to, and
        float32 throughout."""
        for dtype in (torch.bfloat16, torch.float32):
            args = case.inputs(Make(dtype, device), case.shapes[1])
            args = tuple(
                arg.float() if position in case.parameters and is_float(arg) else arg
                for position, arg in enumerate(args)
            )
            exact = run(case.oracle, cast(args, torch.float64), case.differentiable)
            with FakeTensorMode() as fake, torch.autocast(device, dtype=torch.bfloat16):
                planned = tensors_of(
                    case.call(
                        *(fake.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args)
                    )
                )
            for isa in at_each_isa(device):
                with isa, torch.autocast(device, dtype=torch.bfloat16):
                    actual = run(case.call, args, case.differentiable)
                    assert_near(actual, exact, ROUNDING[torch.bfloat16])
                planned_dtypes = _dtypes(Result(planned, ()))
                assert _dtypes(actual) == planned_dtypes, "not the dtype that the compiler assumes"
                assert _gradients_have_dtypes(case, args, actual)


def _dtypes(result: Result) -> list[torch.dtype]:
    return [output.dtype for output in result.outputs]


def _gradients_have_dtypes(case: Case, args: Args, result: Result) -> bool:
    return all(
        one is None or one.dtype == args[position].dtype
        for position, one in zip(case.differentiable, result.gradients, strict=True)
    )


def _infinite_is_nan(result: Result) -> Result:
    def changed(tensor: Tensor) -> Tensor:
        return numbers_of(tensor).nan_to_num(torch.nan, torch.nan, torch.nan)

    return Result(
        tuple(map(changed, result.outputs)),
        tuple(None if one is None else changed(one) for one in result.gradients),
    )
