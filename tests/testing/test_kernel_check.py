"""``flexops.testing.check_kernel``: a right kernel passes, and each mistake is found. What the
kernels compute is stood in for, but in the last test."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.errors import FlexopsError
from flexops.testing import check_kernel, kernel_check

SCALE = """
template <typename T>
__global__ void scale(const T* x, const T* weight, T* out, float factor, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * float(weight[i]) * factor);
}"""
ADD = """
__global__ void add(float* y, const float* x, float factor, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] += factor * x[i];
}"""


def product(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return x * weight * factor


def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]


def gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return grad * weight * ctx.factor, grad * x * ctx.factor, None


def define(**options: Any) -> flexops.Kernel:
    known = {"reference": product, "shapes": {"weight": "x"}, "backward": gradient}
    chosen = known | {"setup_context": setup if options.get("backward", True) else None} | options
    return flexops.kernel(
        SCALE, "checked::scale(Tensor x, Tensor weight, float factor) -> Tensor", **chosen
    )


CASES = [(torch.randn(5, 7), torch.randn(5, 7), 2.0)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Lets kernels compute what a function returns, after their own checks."""

    def compute(function: Callable[..., Any]) -> None:
        def emulate(kernel: flexops.Kernel, *args: Any, reverse: bool = False, **named: Any) -> Any:
            kernel._code.fake(*args, **named)
            return function(*args, *named.values(), reverse=reverse)

        monkeypatch.setattr(kernel_check, "emulate", emulate)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return compute


def right(x: Tensor, weight: Tensor, factor: float, **_: bool) -> Tensor:
    return product(x.double(), weight.double(), factor).to(x.dtype).contiguous()


def test_a_right_kernel_passes(computed):
    computed(right)
    check_kernel(define(), CASES)


@pytest.mark.parametrize(
    ("kernel", "compute", "said"),
    [
        ({}, lambda x, w, *_, **__: right(x, w, 2.0), r"scale: case 0: other numbers: with 1\.6"),
        ({}, lambda x, w, f, **_: right(x, w, f) * 1.01, "case 0, torch.float32: results"),
        (
            {},
            lambda x, w, f, **_: right(x, w, f) if x.is_contiguous() else x * f,
            "any strides: every second element",
        ),
        (
            {"shapes": {}},
            lambda x, w, f, **_: right(x, w.as_strided(x.shape, x.stride()), f),
            r"weight of shape \[1, 7\] is accepted, and the result is not the reference's",
        ),
        (
            {"strided": True},
            lambda x, w, f, reverse: right(x, w, 0.0 if reverse else f),
            "opposite order of threads: a race",
        ),
        (
            {"backward": lambda _, grad: (grad, grad, None)},
            right,
            "gradient: .*Jacobian mismatch",
        ),
    ],
    ids=["number", "result", "strides", "smaller", "race", "gradient"],
)
def test_each_mistake_is_found(computed, kernel, compute, said):
    computed(compute)
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check_kernel(define(**kernel), CASES, dtypes=(torch.float32,))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(said, text, re.DOTALL), text


def test_without_a_backward_a_backward_pass_has_to_raise(computed):
    computed(right)
    check_kernel(define(backward=None), CASES, dtypes=())


def test_what_a_check_requires():
    with pytest.raises(FlexopsError, match="no reference"):
        check_kernel(define(reference=None), CASES)
    with pytest.raises(FlexopsError, match="no cases"):
        check_kernel(define(), [])
    with pytest.raises(TypeError, match=r"tuple of a call's arguments.*got Tensor"):
        check_kernel(define(), [torch.randn(3), 2.0])
    with pytest.raises(TypeError, match=r"case 0 must have .*got 1 arguments"):
        check_kernel(define(), iter([CASES[0][:1]]))
    with pytest.raises(TypeError, match=r"case 0 must have .*tensors of the CPU"):
        check_kernel(define(), [tuple(torch.empty(3, device="meta") for _ in CASES[0])])
    with pytest.raises(TypeError, match=r"must be what flexops.kernel returned"):
        check_kernel(torch.relu, CASES)
    for cases in (5, torch.randn(3), "ab"):
        with pytest.raises(TypeError, match=r"cases must be a list of calls' arguments.* got "):
            check_kernel(define(), cases)
    for dtypes in (3, None, torch.float32, "float32", ["float32"], [torch.int32]):
        with pytest.raises(TypeError, match=r"dtypes must be a list of floating-point dtypes"):
            check_kernel(define(), CASES, dtypes=dtypes)
    for rounding in ("a", None, -1.0, float("nan")):
        with pytest.raises(TypeError, match=r"rounding must be a number from 0 on"):
            check_kernel(define(), CASES, rounding=rounding)
    with pytest.raises(TypeError, match="scale: x must be a tensor, got str"):
        check_kernel(define(), [("x", *CASES[0][1:])])


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_nan_in_the_first_case_is_no_fault_of_the_kernel(computed):
    computed(right)
    x, weight, factor = CASES[0]
    undefined = x.clone()
    undefined[0, 0] = torch.nan
    cases = [(undefined, weight, factor)]
    with pytest.raises(FlexopsError, match="fix: put a case without NaN first"):
        check_kernel(define(), cases)
    check_kernel(define(), CASES + cases)
    computed(lambda *args, **_: right(*args).nan_to_num())
    with pytest.raises(AssertionError, match=r"case 1.*results:  output 0: 1 of 35"):
        check_kernel(define(), CASES + cases)


def test_kernels_that_the_emulator_runs():
    check_kernel(define(), [*CASES, (torch.randn(300), torch.randn(300), 0.5)])
    add = flexops.kernel(
        ADD,
        "checked::add(Tensor(a!) y, Tensor x, *, float factor=1.0) -> ()",
        reference=lambda y, x, factor: y.add_(x, alpha=factor),
        shapes={"x": "as y"},
    )
    check_kernel(add, [(torch.randn(5, 7), torch.randn(5, 1), 2.0)])
    # a GPU reads the NaN behind it
    with pytest.raises(AssertionError, match=r"is accepted, and the (kernel reads|result is not)"):
        check_kernel(define(shapes={}), CASES, dtypes=())
