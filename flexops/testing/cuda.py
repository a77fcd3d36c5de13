"""What only a GPU shows; and, where there is none, its emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexops._torch import keep_gpu_busy
from flexops.errors import ToolchainError

from .case import Args, Case, Make, Result, only, tensors_of
from .comparing import ROUNDING, assert_near, assert_same
from .emulator import order_of_threads
from .running import cast, copies, output_gradients, result_of, run, run_in_place

HUGE_MEMORY = 60 * 2**30


class Cuda:
    @only(lambda case: "." in case.family and "cuda" in case.devices)
    def test_kernels_for_cuda_on_the_emulator(self, case: Case, dtype: torch.dtype) -> None:
        """A project's, without a GPU: results and gradients in both orders of a block's threads,
        and no access outside of the call's memory."""
        from .emulator.families import OnEmulator

        if torch.cuda.is_available():
            pytest.skip("the GPU runs these kernels")
        try:
            emulator = OnEmulator(*filter(None, (case.family, case.gradients)))
        except ToolchainError as error:
            pytest.skip(f"kernels for CUDA are not emulated: {error.what}; {error.required}")
        args = case.inputs(Make(dtype, "cpu"), case.shapes[0])
        expected = run(case.oracle, cast(args, torch.float64), case.differentiable)
        for reverse in (False, True):
            with order_of_threads(reverse=reverse), emulator:
                actual = run(case.call, args, case.differentiable)
            assert_near(actual, expected, max(ROUNDING[dtype], case.rounding))

    def test_cuda_graph(self, case: Case) -> None:
        make = Make(case.dtypes[1 % len(case.dtypes)], "cuda")
        args, others = (case.inputs(make, case.shapes[-1]) for _ in range(2))
        expected = run(case.call, others, case.differentiable)
        leaves, given = copies(args, case.differentiable), output_gradients(expected.outputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is made once only, is made here
            run_in_place(case, leaves, given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run_in_place(case, leaves, given)
        for target, source in zip(leaves, others, strict=True):
            if isinstance(target, Tensor):
                target.data.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(result, expected)

    def test_cuda_stream_of_its_own(self, case: Case) -> None:
        args = case.inputs(Make(case.dtypes[0], "cuda"), case.shapes[-1])
        expected = run(case.call, args, case.differentiable)
        given = output_gradients(expected.outputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = tuple(torch.zeros_like(arg) if isinstance(arg, Tensor) else arg for arg in args)
            keep_gpu_busy(20_000_000)
            for target, source in zip(late, args, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            late = tuple(
                arg.requires_grad_() if i in case.differentiable else arg
                for i, arg in enumerate(late)
            )
            actual = run_in_place(case, late, given)
        stream.synchronize()
        assert_same(actual, expected)

    def test_cuda_another_device_than_the_current(self, case: Case) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs a second GPU")
        args = case.inputs(Make(case.dtypes[0], "cuda:0"), case.shapes[1])
        there = tuple(arg.to("cuda:1") if isinstance(arg, Tensor) else arg for arg in args)
        with torch.cuda.device(0):
            actual = run(case.call, there, case.differentiable)
        assert all(tensor.device.index == 1 for tensor in actual.outputs)
        here = Result(
            tuple(t.to("cuda:0") for t in actual.outputs),
            tuple(None if t is None else t.to("cuda:0") for t in actual.gradients),
        )
        assert_same(here, run(case.call, args, case.differentiable))

    @only(lambda case: case.huge)
    def test_cuda_more_than_2_to_31_elements(self, case: Case) -> None:
        """The first and the last rows are those of a call on these rows alone."""
        assert case.huge is not None
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < HUGE_MEMORY:
            pytest.skip(f"needs {HUGE_MEMORY / 2**30:.0f} GiB of free GPU memory")
        args = case.inputs(Make(torch.bfloat16, "cuda", in_place=True), case.huge)
        assert any(isinstance(arg, Tensor) and arg.numel() > 2**31 for arg in args)
        args = tuple(
            arg.requires_grad_() if i in case.differentiable else arg for i, arg in enumerate(args)
        )
        whole, rows = _with_ones_for_gradients(case, args), case.huge[0]
        for part in (slice(0, 8), slice(rows - 8, rows)):
            few = tuple(arg.detach()[part].clone() if _has_rows(arg, rows) else arg for arg in args)
            alone = _with_ones_for_gradients(case, copies(few, case.differentiable))
            for actual, expected in zip(
                [*whole.outputs, *whole.gradients], [*alone.outputs, *alone.gradients], strict=True
            ):
                if actual is not None and expected is not None and _has_rows(actual, rows):
                    assert_near(
                        Result((actual[part],), ()),
                        Result((expected,), ()),
                        what=f"{case.huge} {part}",
                    )


def _with_ones_for_gradients(case: Case, args: Args) -> Result:
    outputs = tensors_of(case.call(*args))
    ones = [torch.ones((), dtype=one.dtype, device=one.device).expand_as(one) for one in outputs]
    return result_of(outputs, args, case.differentiable, ones)


def _has_rows(value: object, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
