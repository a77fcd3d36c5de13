"""The shared contract for the operators that are older than it; see contract.py. Their own tests
say much more."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract import ISA_LEVELS, Case, Contract, Make, Shape, assert_near
from processes import completed
from step_contract import needs_mutable_lists
from torch import Tensor
from torch.testing._internal.optests import OpCheckError

import flexops
from flexops.build.describe.spec import Project
from flexops.ops import _register
from flexops.testing.case import Result


def weights(make: Make, shape: Shape) -> tuple[Tensor]:
    return (make(*shape),)


def roundtrip(bits: int, dim: int, symmetric: bool) -> Case:
    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = flexops.quantize(x, bits, 4, dim, symmetric)
        return flexops.dequantize(q), q.packed, q.scales

    return Case(
        f"quantize int{bits} along {dim}",
        "quant",
        call,
        weights,
        oracle=call,
        names=("x",),
        shapes=((8, 8), (16, 100), (65, 516)),
        same_bits=True,
        accuracy=False,
        autocast=False,
        huge=(2**18 + 64, 2**13) if dim else None,
    )


def adam_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    states = make(*shape, dtype=torch.float32), make.uniform(*shape, dtype=torch.float32)
    return make(*shape), make(*shape), *states, torch.full((), 3.0, device=make.device)


def adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    flexops.adam_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=1e-2,
        weight_decay=0.1,
        decoupled=True,
    )
    return param, exp_avg, exp_avg_sq, step


def plain_adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    step = step + 1
    exp_avg = 0.9 * exp_avg + 0.1 * grad
    exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * grad * grad
    denominator = exp_avg_sq.sqrt() / (1 - 0.999**step).sqrt() + 1e-8
    return (
        (param * (1 - 1e-3) - 1e-2 / (1 - 0.9**step) * exp_avg / denominator).to(param.dtype),
        exp_avg,
        exp_avg_sq,
        step,
    )


def test_the_environment_limits_the_instruction_set():
    program = (
        "import ctypes, torch, flexops; flexops.swiglu(torch.ones(2)); library = next(one.path for"
        " one in flexops.status() if one.path)\n"
    )
    program += "print(ctypes.CDLL(str(library)).flexops_cpu_isa(None))"
    for number, level in enumerate(ISA_LEVELS[:2]):
        run = completed(
            [sys.executable, "-c", program], env=os.environ | {"FLEXOPS_CPU_ISA": level}
        )
        assert int(run.stdout) <= number


# ---- operators that are wrong on purpose ----


def doubled_is(function: Callable[[Tensor], Tensor]) -> Case:
    """The case of an operator that ought to double; it is that of the swiglu family, whose library
    is there."""
    name = f"doubled_{function.__name__}"
    if not hasattr(torch.ops.contract_faults, name):
        _register.define(
            "x",
            f"{name}(Tensor x) -> Tensor",
            function,
            torch.empty_like,
            native=False,
            project=Project("contract_faults", Path()),
        )
    op = getattr(torch.ops.contract_faults, name)
    return Case(
        name, "activation", op, weights, oracle=lambda x: x * 2, names=("x",), devices=("cpu",)
    )


def right(x: Tensor) -> Tensor:
    return x * 2


def other_last_bits(x: Tensor, _calls: Iterator[int] = itertools.count()) -> Tensor:  # noqa: B008
    return x * (2 * (1 + 1e-7 * (next(_calls) % 3)))


def writes_where_large(x: Tensor) -> Tensor:
    doubled = x * 2
    if x.numel() > 1000:
        x.detach().view(-1)[-1:].zero_()
    return doubled


def float32_under_autocast(x: Tensor) -> Tensor:
    return (x * 2).float() if torch.is_autocast_enabled("cpu") else x * 2


def forgets_an_odd_column(x: Tensor) -> Tensor:
    doubled = x * 2
    doubled[..., x.shape[-1] // 2 * 2 :] = 0
    return doubled


def hidden_by_its_kernel(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("function", "test"),
    [
        (other_last_bits, "test_the_same_bits_twice"),
        (writes_where_large, "test_opcheck"),
        (float32_under_autocast, "test_autocast"),
        (forgets_an_odd_column, "test_autocast"),
    ],
)
def test_what_is_wrong_on_purpose_is_found(function, test, native_kernels):
    native_kernels("activation", "cpu")

    class Broken(Contract):
        cases = (doubled_is(function), doubled_is(right))

    getattr(Broken(), test)(Broken.cases[1], device="cpu")
    with pytest.raises((AssertionError, OpCheckError)):
        getattr(Broken(), test)(Broken.cases[0], device="cpu")


def test_zeros_do_not_narrow_what_is_granted_to_the_others():
    """Of 100 numbers 99 are 0, such as gradients of queries that see no key."""
    expected = torch.zeros(100, dtype=torch.bfloat16)
    expected[0] = 1.0
    for position, error, granted in ((0, 0.045, True), (0, 0.08, False), (1, 0.02, False)):
        actual = expected.clone()
        actual[position] += error
        with contextlib.nullcontext() if granted else pytest.raises(AssertionError, match="differ"):
            assert_near(Result((actual,), ()), Result((expected,), ()))


def of_a_dense_tensor(x: Tensor) -> Tensor:
    return 2 * x.as_strided(x.shape, torch.empty(x.shape).stride())


@pytest.mark.parametrize(
    ("kernel", "test"),
    [
        (lambda x: (x * 2).nan_to_num(), "test_not_finite"),
        (lambda x: (x * 2).clamp(-3e4, 3e4), "test_not_finite"),
        (lambda x: x * 2 if x.numel() else x.double(), "test_empty"),
        (of_a_dense_tensor, "test_strides"),
    ],
)
def test_a_kernel_that_is_not_what_its_reference_is_is_found(kernel, test, native_kernels):
    native_kernels("activation", "cpu")
    case = doubled_is(hidden_by_its_kernel)
    check = getattr(Contract(), test)
    check(case, device="cpu")
    with torch.library._scoped_library("contract_faults", "IMPL") as library:
        library.impl(case.name, kernel, "CPU")
        with pytest.raises(AssertionError, match="in x output 0" if "finite" in test else None):
            check(case, device="cpu")


def turned(x: Tensor, factor: float, power: int, negate: bool) -> Tensor:
    if power > 3:
        raise ValueError("no such power")  # so that this is no value to compare at
    return (-x if negate else x) * factor * power


WRITTEN_IN: dict[str, Callable[..., Tensor]] = {
    "factor": lambda x, _, power, negate: turned(x, 2.0, power, negate),
    "power": lambda x, factor, _, negate: turned(x, factor, 3, negate),
    "negate": lambda x, factor, power, _: turned(x, factor, power, False),
}


@pytest.mark.parametrize("argument", WRITTEN_IN)
def test_a_kernel_that_has_a_cases_numbers_written_into_it_is_found(argument, native_kernels):
    native_kernels("activation", "cpu")
    if not hasattr(torch.ops.contract_faults, "turned"):
        schema = "turned(Tensor x, float factor, int power, bool negate) -> Tensor"
        _register.define(
            "x",
            schema,
            turned,
            lambda x, *_: torch.empty_like(x),
            native=False,
            project=Project("contract_faults", Path()),
        )
    op = torch.ops.contract_faults.turned
    case = Case(
        "turned",
        "activation",
        lambda x: op(x, 2.0, 3, False),
        weights,
        oracle=lambda x: x * 6.0,
        devices=("cpu",),
    )
    Contract().test_other_numbers(case, device="cpu")
    with torch.library._scoped_library("contract_faults", "IMPL") as library:
        library.impl("turned", WRITTEN_IN[argument], "CPU")
        # which does not see it
        Contract().test_native_is_what_the_reference_is(case, device="cpu", dtype=torch.float32)
        with pytest.raises(AssertionError, match=f"turned.*, {argument}="):
            Contract().test_other_numbers(case, device="cpu")


def test_what_a_class_leaves_out_those_derived_from_it_have():
    class Helpers(Contract):
        pass

    class Mine(Helpers):
        cases = (doubled_is(right),)
        test_empty = None

    class Differentiable(Mine):
        cases = (replace(Mine.cases[0], differentiable=(0,)),)

    assert Helpers.test_opcheck is None
    assert Mine.test_opcheck is Differentiable.test_opcheck is Contract.test_opcheck
    assert Mine.test_gradcheck is Mine.test_empty is Differentiable.test_empty is None
    assert Differentiable.test_gradcheck is Contract.test_gradcheck
    assert Differentiable.test_cuda_graph is None  # of a case for the CPU alone


class TestQuant(Contract):
    cases = (roundtrip(4, 1, False), roundtrip(8, 0, True))


@needs_mutable_lists  # all of it; what does not need them, test_adam.py has too
class TestAdam(Contract):
    cases = (
        Case(
            "AdamW step",
            "adam",
            adamw,
            adam_inputs,
            oracle=plain_adamw,
            shapes=((3, 8), (5, 100), (64, 512)),
            broadcasts=False,
            autocast=False,
        ),
    )
