"""What every operator that is built with flexops promises to torch, as tests that an operator's own
test file only has to declare.

A test file says what an operator is, once for each way to call it, and gets the whole contract for
the CPU and, marked ``gpu``, for CUDA::

    from flexops.testing import Case, Contract, Make, Refusal

    def inputs(make: Make, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return make(*shape), make(shape[-1])

    class TestContract(Contract):
        cases = (
            Case("rms_norm", "norm", flexops.rms_norm, inputs,
                 oracle=lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
                 names=("x", "weight"), differentiable=(0, 1), parameters=(1,),
                 shapes=((3, 8), (5, 100), (64, 1024)), huge=(2**18 + 3, 2**13)),
        )

The promises: ``torch.library.opcheck``; ``torch.compile(fullgraph=True)`` with fixed and with any
sizes, forward and backward; gradcheck in float64 on the reference; native results and gradients as
the reference and float64 have them, at every level of instructions that the CPU has, with an error
no larger than torch's own kernel's; the same with other numbers and switches than the case gives,
one at a time; autocast; any strides, broadcast, misaligned and empty tensors; NaN and infinities;
the same bits twice; refusals that name the argument; CUDA graphs, streams, several GPUs, more than
2^31 elements.

Each of the classes that it is put together from holds operators to one thing; what they compute, to
the same at each level. ``accuracy`` has tables of errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import flexops
from flexops.bench import reference as on_reference
from flexops.build.load import loader
from flexops.errors import FlexopsError

from .case import Case, Make
from .cuda import Cuda
from .gradients import Gradients
from .machinery import Machinery
from .refusals import Refusals
from .results import Results


class Contract(Results, Gradients, Machinery, Refusals, Cuda):
    """The tests. A subclass called ``Test...`` names the cases."""

    cases: ClassVar[tuple[Case, ...]] = ()
    _left_out: ClassVar[tuple[str, ...]] = ()
    """Tests of which a class has no case, while classes derived from it may."""

    def __init_subclass__(cls) -> None:
        left_out = []
        for test in filter(re.compile("test_").match, dir(cls)):
            found = next(
                base.__dict__[test]
                for base in cls.__mro__
                if test in base.__dict__ and test not in base.__dict__.get("_left_out", ())
            )
            applies = any(
                "cuda" in case.devices or not test.startswith("test_cuda")
                for case in filter(_applies(found), cls.cases)
            )
            setattr(cls, test, found if applies else None)  # None: nothing to collect
            left_out += [test] if found is not None and not applies else []
        cls._left_out = tuple(left_out)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise by what a test asks for: ``case`` alone, ``device``, ``dtype``."""
        metafunc.config.addinivalue_line(
            "markers", "gpu: needs a GPU; runs wherever torch.cuda.is_available()"
        )
        wanted = [name for name in ("case", "device", "dtype") if name in metafunc.fixturenames]
        if "case" in wanted:
            metafunc.parametrize(wanted, list(self._parameters(metafunc.function, wanted)))

    def _parameters(self, test: Any, wanted: Sequence[str]) -> Iterator[Any]:
        gpu_only = test.__name__.startswith("test_cuda")
        for case in filter(_applies(test), self.cases):
            if gpu_only and "cuda" not in case.devices:
                continue
            for device in case.devices if "device" in wanted else (None,):
                marks = [pytest.mark.gpu] if device == "cuda" or gpu_only else []
                for dtype in case.dtypes if "dtype" in wanted else (None,):
                    values = {"case": case, "device": device, "dtype": dtype}
                    label = "-".join(str(values[name]).replace("torch.", "") for name in wanted)
                    yield pytest.param(*(values[name] for name in wanted), marks=marks, id=label)

    @pytest.fixture(autouse=True)
    def _native(self, request: pytest.FixtureRequest) -> None:
        """Compiled kernels are what calls reach. How a project says that a machine lacks a
        compiler, its fixture ``native_kernels`` may tell."""
        values = request.node.callspec.params
        device = values.get("device") or (
            "cuda" if request.node.get_closest_marker("gpu") else "cpu"
        )
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        try:
            ensure = request.getfixturevalue("native_kernels")
        except pytest.FixtureLookupError:
            ensure = _require_native
        for family in filter(None, (values["case"].family, values["case"].gradients)):
            ensure(family, device)
        case = values["case"]
        if "." in case.family and "cpu" in case.devices:
            if id(case) not in _wrong:
                _wrong[id(case)] = _misdeclared(case)
            if _wrong[id(case)]:
                pytest.fail(_wrong[id(case)], pytrace=False)


_wrong: dict[int, str] = {}
"""Of each case that was looked at: cases live as long as their classes."""


def _misdeclared(case: Case) -> str:
    """What the reference says of the declared results. Told first: a launcher would write beyond a
    result that is declared too small."""
    args = case.inputs(Make(case.dtypes[0], "cpu"), case.shapes[0])
    try:
        with on_reference.OnReference():
            case.call(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
    except FlexopsError as error:
        return f"{case.family}, case {case.name}: {error}"
    return ""


def _applies(test: Any) -> Callable[[Case], object]:
    """Which cases a test is for; a test of a project's own is for all."""
    return getattr(test, "applies", bool)


def _require_native(family: str, device: str) -> None:
    if not loader.ensure(family, device):
        pytest.fail(
            next(
                one.reason for one in flexops.status() if (one.op, one.device) == (family, device)
            ),
            pytrace=False,
        )
