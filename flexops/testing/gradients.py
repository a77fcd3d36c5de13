"""What gradients promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from flexops.bench.reference import OnReference
from flexops.ops import _register

from .case import Args, Case, Make, Result, has_gradient, is_float, only, tensors_of
from .comparing import ROUNDING, assert_near
from .isa import at_each_isa, every_level
from .layouts import broadcast, misaligned, padded_rows, transposed
from .running import cast, copies, output_gradients, recorded, run


class Gradients:
    @only(has_gradient)
    def test_gradients_are_float64s(self, case: Case, device: str, dtype: torch.dtype) -> None:
        """Of each argument alone too, because then the backward kernel makes less."""
        args = case.inputs(Make(dtype, device), case.shapes[0])
        expected = run(case.oracle, cast(args, torch.float64), case.differentiable)
        for isa in at_each_isa(device):
            with isa:
                everything = run(case.call, args, case.differentiable)
                assert_near(everything, expected, max(ROUNDING[dtype], case.rounding))
                for number, position in enumerate(case.differentiable):
                    alone, one = (
                        run(case.call, args, (position,)),
                        everything.gradients[number : number + 1],
                    )
                    assert_near(
                        alone,
                        everything._replace(gradients=one),
                        case.rounding,
                        what=f"argument {position} alone",
                    )

    @only(has_gradient)
    @every_level
    def test_gradients_of_any_strides(self, case: Case, device: str) -> None:
        """What comes back to an operator is often expanded (from a sum) or transposed."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[1])
        for layout in (broadcast, transposed, misaligned, padded_rows):
            leaves = copies(args, case.differentiable)
            outputs = [output for output in tensors_of(case.call(*leaves)) if output.requires_grad]
            inputs = [leaves[position] for position in case.differentiable]
            given = [
                layout(gradient) if gradient.dim() else gradient
                for gradient in output_gradients(outputs)
            ]
            plain = [gradient.contiguous().clone() for gradient in given]
            actual = torch.autograd.grad(
                outputs, inputs, given, retain_graph=True, allow_unused=True
            )
            expected = torch.autograd.grad(outputs, inputs, plain, allow_unused=True)
            assert_near(
                Result((), actual), Result((), expected), case.rounding, what=layout.__name__
            )

    @only(has_gradient)
    def test_gradcheck(self, case: Case) -> None:
        """Numerical derivatives in float64 of the reference, through the very autograd code that
        native calls take."""
        checked = 0
        for op, args, _ in recorded(case, "cpu", dtype=torch.float32):
            if _register.has_gradient(op):
                self._gradcheck(op, args)
                checked += 1
        assert checked, "no operator with a gradient was reached"

    def _gradcheck(self, op: Any, args: Args) -> None:
        args = tuple(
            arg.detach().double().requires_grad_(arg.requires_grad) if is_float(arg) else arg
            for arg in args
        )
        positions = [
            position
            for position, arg in enumerate(args)
            if isinstance(arg, Tensor) and arg.requires_grad
        ]

        def function(*leaves: Tensor) -> tuple[Tensor, ...]:
            chosen = dict(zip(positions, leaves, strict=True))
            results = op(*(chosen.get(position, arg) for position, arg in enumerate(args)))
            return tuple(result for result in tensors_of(results) if result.requires_grad)

        leaves = [args[position] for position in positions]
        with OnReference():
            try:
                torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6, rtol=1e-4)
            except GradcheckError as error:
                results = function(
                    *((leaf.detach() * (1 + 1e-9)).requires_grad_() for leaf in leaves)
                )
                rounds = any(torch.equal(result, result.float().double()) for result in results)
                cause = "its gradient is not that of its reference"
                if rounds:
                    cause = (
                        "its reference rounds float64 to float32 (x.float()?), which has no"
                        " numerical derivative"
                    )
                raise AssertionError(f"{op}: {cause}\n{error}") from None

    @only(has_gradient)
    def test_differentiable_once(self, case: Case, device: str) -> None:
        """Asking for more raises, and does not give what is wrong."""
        args = copies(
            case.inputs(Make(case.dtypes[0], device), case.shapes[0]), case.differentiable
        )
        outputs = [output for output in tensors_of(case.call(*args)) if output.requires_grad]
        given = [gradient.requires_grad_() for gradient in output_gradients(outputs)]
        inputs = [args[position] for position in case.differentiable]
        gradients = torch.autograd.grad(
            outputs, inputs, given, create_graph=True, allow_unused=True
        )
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.stack(
                [gradient.sum() for gradient in gradients if gradient is not None]
            ).sum().backward()

    @only(has_gradient)
    def test_a_gradient_penalty_is_refused(self, case: Case, device: str) -> None:
        """Of which torch's own mark for such functions makes nothing, without a word. Where one
        argument alone requires a gradient, and where the loss is a sum of results, little of what
        the backward pass reads has a graph."""
        inputs = case.inputs(Make(case.dtypes[0], device), case.shapes[0])

        def second(function: Any, args: Args, positions: Sequence[int], squared: bool) -> Any:
            args = copies(args, positions)
            leaves = [args[position] for position in positions]
            outputs = [one for one in tensors_of(function(*args)) if one.requires_grad]
            loss: Any = sum((one.square() if squared else one).sum() for one in outputs)
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            penalty = sum(one.square().sum() for one in (*leaves, *first) if one is not None)
            return torch.autograd.grad(penalty, leaves), [2 * one for one in leaves]

        for positions in (case.differentiable, *((one,) for one in case.differentiable)):
            for squared in (False, True):
                wide = second(case.oracle, cast(inputs, torch.float64), positions, squared)
                if not all(map(torch.equal, *wide)):
                    with pytest.raises(RuntimeError, match="differentiate twice"):
                        second(case.call, inputs, positions, squared)

    @only(lambda case: has_gradient(case) and "in place" not in case.name)
    def test_gradients_by_torch_func(self, case: Case, device: str) -> None:
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        expected = run(case.call, args, case.differentiable)
        given = output_gradients(expected.outputs)
        differentiable = [output.is_floating_point() for output in expected.outputs]

        def loss(*args: Any) -> Tensor:
            outputs = tensors_of(case.call(*args))
            return torch.stack(
                [
                    (output * grad).sum()
                    for output, grad, is_float in zip(outputs, given, differentiable, strict=True)
                    if is_float
                ]
            ).sum()

        gradients = torch.func.grad(loss, argnums=case.differentiable)(*args)
        for actual, wanted in zip(gradients, expected.gradients, strict=True):
            assert_near(
                Result((), (actual,)),
                Result((), (torch.zeros_like(actual) if wanted is None else wanted,)),
            )
