"""What torch's machinery asks of an operator: its checks, its compiler, its modes, tensors without
memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from flexops._torch import counting_backend, schema_of

from .case import Case, Make, has_gradient, only, tensors_of
from .comparing import assert_near
from .running import Recorder, copies, opchecks, recorded, run


class Machinery:
    cases: ClassVar[tuple[Case, ...]]

    @pytest.fixture
    def _fresh_compiler(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()
        # Of torch 2.4, what inductor has compiled for the CPU is linked with -ffast-math: loading
        # it makes this thread take subnormal numbers for zero.
        torch.set_flush_denormal(False)

    @only(has_gradient)
    def test_a_dispatch_mode_sees_the_same_operators(self, case: Case, device: str) -> None:
        """With a gradient as without one: who looks for an operator (to count it, to replace it, to
        keep its result) finds it under one name."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        seen = []
        for differentiable in ((), case.differentiable):
            with Recorder() as recorder:
                case.call(*copies(args, differentiable))
            # what has no gradient need not be written in place: a name's underscore may come with
            # one
            seen.append(
                list(dict.fromkeys(schema_of(op).name.rstrip("_") for op, *_ in recorder.calls))
            )
        assert seen[0]
        assert seen[0] == seen[1]

    def test_opcheck(self, case: Case, device: str) -> None:
        calls = recorded(case, device)
        assert calls, "no operator that is registered through flexops was reached"
        for op, args, kwargs in calls:
            torch.library.opcheck(op, args, kwargs, test_utils=opchecks(args))
        for shape in case.shapes[1:]:  # what is written, or handed on, at any size
            for op, args, kwargs in recorded(case, device, shape=shape):
                if "test_schema" in opchecks(args):
                    torch.library.opcheck(op, args, kwargs, test_utils="test_schema")

    @pytest.mark.usefixtures("_fresh_compiler")
    def test_compiles_whole(self, case: Case, device: str) -> None:
        first = next(item for item in self.cases if item.family == case.family)
        inductor = case is first if case.inductor is None else case.inductor
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        expected = run(case.call, args, case.differentiable)
        for backend in ("aot_eager", "inductor") if inductor else ("aot_eager",):
            torch.compiler.reset()
            compiled = torch.compile(
                lambda *arguments: case.call(*arguments),
                fullgraph=True,
                dynamic=False,
                backend=backend,
            )
            assert_near(run(compiled, args, case.differentiable), expected, what=backend)

    @pytest.mark.usefixtures("_fresh_compiler")
    def test_compiles_for_any_size(self, case: Case, device: str) -> None:
        counter, graphs = counting_backend("aot_eager"), []
        compiled = torch.compile(
            lambda *arguments: case.call(*arguments), fullgraph=True, dynamic=True, backend=counter
        )
        shapes = case.dynamic or tuple(
            tuple(size * factor for size in case.shapes[0]) for factor in (1, 2, 3)
        )
        for shape in shapes:
            args = case.inputs(Make(case.dtypes[0], device), shape)
            assert_near(
                run(compiled, args, case.differentiable),
                run(case.call, args, case.differentiable),
                what=f"{shape}",
            )
            graphs.append(counter.frame_count)
        assert len(set(graphs)) == 1, f"graphs after each of {shapes}: {graphs}"

    def test_without_memory(self, case: Case, device: str) -> None:
        """On meta, forward and backward, shapes and dtypes are those of a call that computes."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        expected = run(case.call, args, case.differentiable)
        leaves = tuple(
            (
                arg.detach().to("meta").requires_grad_(i in case.differentiable)
                if isinstance(arg, Tensor)
                else arg
            )
            for i, arg in enumerate(args)
        )
        outputs = tensors_of(case.call(*leaves))
        assert [(output.shape, output.dtype) for output in outputs] == [
            (output.shape, output.dtype) for output in expected.outputs
        ]
        for output in outputs:
            if output.requires_grad:
                output.sum().backward(retain_graph=True)
        for position, gradient in zip(case.differentiable, expected.gradients, strict=True):
            found = leaves[position].grad
            assert (found is None) == (gradient is None)
            assert found is None or found.device.type == "meta"
