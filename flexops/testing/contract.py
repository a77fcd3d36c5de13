"""What every operator that is built with flexops promises to torch, as tests that an operator's own test file only has to declare.

A test file says what an operator is, once for each way to call it, and gets the whole contract for the CPU and, marked ``gpu``, for CUDA::

    from flexops.testing import Case, Contract, Make, Refusal

    def inputs(make: Make, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return make(*shape), make(shape[-1])

    class TestContract(Contract):
        cases = (
            Case("rms_norm", "norm", flexops.rms_norm, inputs, oracle=lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
                 names=("x", "weight"), differentiable=(0, 1), parameters=(1,), shapes=((3, 8), (5, 100), (64, 1024)), huge=(2**18 + 3, 2**13)),
        )

The promises: ``torch.library.opcheck``; ``torch.compile(fullgraph=True)`` with fixed and with any sizes, forward and backward; gradcheck in float64 on
the reference; native results and gradients as the reference and float64 have them, at every level of instructions that the CPU has, with an error no
larger than torch's own kernel's; autocast; any strides, broadcast, misaligned and empty tensors; the same bits twice; refusals that name the argument;
CUDA graphs, streams, several GPUs, more than 2^31 elements.

``FLEXOPS_TEST_ACCURACY=FILE pytest`` appends each measured error to FILE; ``python -m flexops.testing.contract FILE`` prints it as tables.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import flexops
from flexops.bench.reference import OnReference
from flexops.op_builder import loader
from flexops.ops import _register

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Shape = tuple[int, ...]
Args = tuple[Any, ...]

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HUGE_MEMORY = 60 * 2**30


class Make:
    """Draws a case's inputs: ``make(4, 8)`` is normal, of the dtype and on the device that are tested, the same numbers on every device."""

    def __init__(self, dtype: torch.dtype, device: str, *, seed: int = 0, in_place: bool = False) -> None:
        self.dtype, self.device = dtype, device
        self._on_device = in_place  # tensors of gigabytes are made where they are needed, without an intermediate
        self.generator = torch.Generator(device if in_place else "cpu").manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if self._on_device:
            return torch.empty(shape, dtype=dtype, device=self.device).normal_(shift, scale, generator=self.generator)
        return (torch.randn(shape, generator=self.generator) * scale + shift).to(dtype).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        device = self.device if self._on_device else "cpu"
        return torch.rand(shape, generator=self.generator, device=device).mul_(high - low).add_(low).to(dtype or self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device if self._on_device else "cpu").to(dtype).to(self.device)

    def booleans(self, *shape: int, likely: float = 0.5) -> Tensor:
        device = self.device if self._on_device else "cpu"
        return (torch.rand(shape, generator=self.generator, device=device) < likely).to(self.device)


class Refusal(NamedTuple):
    """A wrong call, the error that it must raise and what its message must say (a regular expression)."""

    call: Callable[[], object]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Case:
    """One way to call an operator.

    Attributes:
        name: what the tests and the accuracy table call it.
        family: what the operator is built with, as ``flexops.status()`` names it (``norm``, ``mylib.scale``): which native library must be there.
        call: the public function, taking what ``inputs`` gives, by position. One that works in place returns what it wrote: it gets copies.
        inputs: ``(make, shape) -> arguments``; tensors, None, numbers.
        oracle: the same mathematics in plain PyTorch, differentiable by autograd, exact when given float64.
        rival: torch's own kernel for the same, whose error ours must not exceed; the oracle, run in the tested dtype, if None.
        names: the arguments' names in ``call``, as error messages have them. Without names, wrong dtypes are not tried.
        differentiable: positions of arguments with a gradient; () for none.
        parameters: positions of arguments that may have another floating-point dtype than the first one, as mixed training gives them.
        shapes: shapes for ``inputs``. The first is for tests that cost much a number (about 50 elements; gradcheck, compilers), the last for accuracy
            (some thousand elements), all for parity.
        dtypes: floating-point dtypes that are accepted.
        dynamic: shapes that one graph must serve; the first shape, twice and three times as large in each dimension, if empty.
        empty: shapes without elements; the first shape with none in its first dimension, if not given.
        huge: a shape of more than 2^31 elements whose rows (along the first dimension) do not depend on each other, for bfloat16.
        refusals: wrong calls, beyond wrong dtypes, which are tried on every floating-point argument by itself.
        refused: dtypes that every floating-point argument refuses with a TypeError.
        gradients: the family of its gradient, if that is another one.
        same_bits: native results have the reference's bits.
        broadcasts: takes inputs whose elements share memory (not true for what is written in place).
        autocast: the dtype of the parameters inside an autocast region; False: not tried.
        accuracy: False for what has no error to measure, because its results have the reference's bits, say.
        rounding: the least relative rounding that is granted where results are compared element by element, for sums of many terms.
        slack: what the largest and the mean error may be of the rival's. The largest is that of one element of thousands: it is the mean that decides.
        draws: how often inputs are drawn to measure errors; many, where results are few numbers, whose mean error is a matter of luck.
        devices: device types.
        inductor: also compiled with inductor, which takes ten seconds. None: the family's first case is.
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
    shapes: tuple[Shape, ...] = ((3, 8), (5, 100), (64, 512))
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


# ---- running a case ------------------------------------------------------------------------------------------------------------------------


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1


def _cast(args: Args, dtype: torch.dtype) -> Args:
    return tuple(arg.to(dtype) if _is_float(arg) else arg for arg in args)


def tensors_of(value: object) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _copies(args: Args, differentiable: Sequence[int]) -> Args:
    """The arguments as leaves of their own, each laid out as it was: a call may write into them, or into their gradients."""
    copied = []
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor):
            arg = _like_laid_out(arg.detach())
            arg.requires_grad_(position in differentiable)
        copied.append(arg)
    return tuple(copied)


def _like_laid_out(tensor: Tensor) -> Tensor:
    """A copy with the same strides and storage offset, overlaps included."""
    if not tensor.numel():
        return tensor.clone()
    extent = tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.zeros(extent, dtype=tensor.dtype, device=tensor.device)
    copy = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).data  # no view, to autograd and to the compiler
    distinct = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    copy[tuple(distinct)] = tensor[tuple(distinct)]
    return copy


def _output_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random, the same for outputs of the same shapes, and exact in every dtype."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype).to(output.device) for output in outputs]


def run(function: Callable[..., Any], args: Args, differentiable: Sequence[int] = ()) -> Result:
    """Call ``function`` on copies of ``args``; with gradients of the arguments at ``differentiable``."""
    args = _copies(args, differentiable)
    outputs = tensors_of(function(*args))
    if not differentiable:
        return Result(tuple(output.detach() for output in outputs), ())
    with_gradient = [output for output in outputs if output.requires_grad]
    given = [gradient for output, gradient in zip(outputs, _output_gradients(outputs), strict=True) if output.requires_grad]
    gradients = torch.autograd.grad(with_gradient, [args[position] for position in differentiable], given, allow_unused=True)
    return Result(tuple(output.detach() for output in outputs), tuple(gradients))


class Recorder(TorchDispatchMode):
    """Keeps each call of an operator that is registered through flexops, with the arguments as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Args, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _register.references:
            for op in dict.fromkeys((func, _register.public.get(func, func))):
                copy = _snapshot if op in _register._differentiable else _detached
                self.calls.append((op, tree_map(copy, args), tree_map(copy, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _snapshot(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def opchecks(args: Args) -> Sequence[str]:
    """Which of opcheck's parts can be run: its check of the schema compares arguments by a function that torch has not for fp8."""
    parts = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    return parts[1:] if any(isinstance(arg, Tensor) and arg.is_floating_point() and arg.element_size() == 1 for arg in args) else parts


def recorded(case: Case, device: str, *, dtype: torch.dtype | None = None) -> list[tuple[Any, Args, dict[str, Any]]]:
    """The operators that the case reaches, each once, backward ones included, and arguments for them."""
    with Recorder() as recorder:
        run(case.call, case.inputs(Make(dtype or case.dtypes[0], device), case.shapes[0]), case.differentiable)
    return list({str(call[0]): call for call in reversed(recorder.calls)}.values())


# ---- comparing -----------------------------------------------------------------------------------------------------------------------------


def assert_same(actual: Result, expected: Result) -> None:
    """Bit for bit, NaNs in the same places."""
    for one, other in zip([*actual.outputs, *actual.gradients], [*expected.outputs, *expected.gradients], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            torch.testing.assert_close(_numbers(one), _numbers(other), rtol=0, atol=0, equal_nan=True)


def assert_near(actual: Result, expected: Result, rounding: float | None = None, *, what: str = "") -> None:
    """As near as the coarser dtype of the two lets them be; ``rounding`` is the least that is granted."""
    labels = [*(f"output {i}" for i in range(len(actual.outputs))), *(f"gradient {i}" for i in range(len(actual.gradients)))]
    for label, one, other in zip(labels, [*actual.outputs, *actual.gradients], [*expected.outputs, *expected.gradients], strict=True):
        if one is None or other is None:
            assert (one is None) == (other is None), f"{what} {label}: {one} against {other}"
            continue
        assert one.shape == other.shape, f"{what} {label}"
        grain = max(ROUNDING.get(one.dtype, 0.0), ROUNDING.get(other.dtype, 0.0), rounding or 0.0)
        one, other = _numbers(one).double(), _numbers(other).double()
        bound = 8 * grain * (other.abs().nan_to_num(0, 0, 0) + _size(other))
        wrong = ~(((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan()))
        first = f"first {one[wrong][:4].tolist()} against {other[wrong][:4].tolist()}"
        assert not wrong.any(), f"{what} {label}: {int(wrong.sum())} of {wrong.numel()} differ, {first}"


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def _size(tensor: Tensor) -> Tensor:
    """Root mean square of the finite elements."""
    finite = tensor[tensor.isfinite()]
    return finite.square().mean().sqrt() if finite.numel() else torch.zeros((), dtype=tensor.dtype, device=tensor.device)


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest and mean absolute difference, of the elements that float64 has finite."""
    finite = expected.isfinite()
    if not finite.any():
        return 0.0, 0.0
    difference = (actual.detach().double() - expected).abs()[finite]
    return float(difference.max()), float(difference.mean())


class Measured(NamedTuple):
    """Largest and mean error of a result, ours and the rival's, and the result's size."""

    ours: tuple[float, float]
    rivals: tuple[float, float]
    size: float


def _measure(case: Case, make: Make) -> dict[str, Measured]:
    """Of each result and gradient with its label."""
    args = case.inputs(make, case.shapes[-1])
    exact = run(case.oracle, _cast(args, torch.float64), case.differentiable)
    results = (run(call, args, case.differentiable) for call in (case.call, case.rival or case.oracle))
    labels = [f"result {i}" for i in range(len(exact.outputs))] if len(exact.outputs) > 1 else ["result"]
    labels += [f"gradient of {_name(case, i)}" for i in case.differentiable]
    measured = {}
    for label, one, other, value in zip(labels, *([*result.outputs, *result.gradients] for result in (*results, exact)), strict=True):
        if one is not None and other is not None and value is not None and value.is_floating_point():
            measured[label] = Measured(errors(_numbers(one), value), errors(_numbers(other), value), float(_size(value)))
    return measured


def _pooled(draws: list[tuple[float, float]]) -> tuple[float, float]:
    return max(largest for largest, _ in draws), sum(mean for _, mean in draws) / len(draws)


# ---- instruction sets ----------------------------------------------------------------------------------------------------------------------


ISA_LEVELS = ("baseline", "avx2", "avx512")


@contextmanager
def isa_limit(level: str) -> Iterator[int]:
    """Inside, CPU kernels use no more than this; gives the number of the level that they do use on this machine."""
    libraries = [ctypes.CDLL(str(one.path)) for one in flexops.status() if one.device == "cpu" and one.path]
    try:
        used = {library.flexops_cpu_isa(level.encode()) for library in libraries}
        assert len(used) == 1, "load the library first"
        yield used.pop()
    finally:
        for library in libraries:
            library.flexops_cpu_isa(ISA_LEVELS[-1].encode())


def at_each_isa(device: str) -> Iterator[AbstractContextManager[object]]:
    """On the CPU a context for each level that the machine has, the best one last; elsewhere one for what there is."""
    if device != "cpu":
        yield nullcontext()
        return
    for number, level in enumerate(ISA_LEVELS):
        with isa_limit(level) as used:
            there = used == number
        if there:
            yield isa_limit(level)


# ---- layouts -------------------------------------------------------------------------------------------------------------------------------


def _every_second(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape, 2)
    wide[..., 0] = x
    return wide[..., 0]


def _padded_rows(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _misaligned(x: Tensor) -> Tensor:
    moved = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    return moved.copy_(x)


def _broadcast(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second element": _every_second,
    "padded rows": _padded_rows,
    "transposed": _transposed,
    "misaligned": _misaligned,
    "broadcast": _broadcast,
}


def _laid_out(args: Args, layout: Callable[[Tensor], Tensor]) -> Args:
    return tuple(layout(arg) if isinstance(arg, Tensor) and arg.dim() and arg.numel() else arg for arg in args)


def _layouts(case: Case) -> list[str]:
    return [name for name in LAYOUTS if case.broadcasts or name != "broadcast"]


_APPLIES: dict[str, Callable[[Case], object]] = {
    "test_differentiable_once": lambda case: case.differentiable,
    "test_gradients_are_float64s": lambda case: case.differentiable,
    "test_gradients_of_any_strides": lambda case: case.differentiable,
    "test_gradcheck": lambda case: case.differentiable,
    "test_a_dispatch_mode_sees_the_same_operators": lambda case: case.differentiable,
    "test_a_gradient_penalty_is_refused": lambda case: case.differentiable,
    "test_gradients_by_torch_func": lambda case: case.differentiable and "in place" not in case.name,
    "test_accuracy": lambda case: case.accuracy,
    "test_autocast": lambda case: case.autocast,
    "test_refuses_other_dtypes_by_name": lambda case: case.names,
    "test_refuses_wrong_calls_by_name": lambda case: case.refusals,
    "test_cuda_more_than_2_to_31_elements": lambda case: case.huge,
}
"""Which cases a test is for; all of them if it is not listed."""


# ---- the contract --------------------------------------------------------------------------------------------------------------------------


class Contract:
    """The tests. A subclass called ``Test...`` names the cases."""

    cases: ClassVar[tuple[Case, ...]] = ()

    def __init_subclass__(cls) -> None:
        for test, applies in _APPLIES.items():
            if not any(applies(case) for case in cls.cases):
                setattr(cls, test, None)  # nothing to collect

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise by what a test asks for: ``case`` alone, ``device``, ``dtype``."""
        metafunc.config.addinivalue_line("markers", "gpu: needs a GPU; runs wherever torch.cuda.is_available()")
        wanted = [name for name in ("case", "device", "dtype") if name in metafunc.fixturenames]
        if "case" in wanted:
            metafunc.parametrize(wanted, list(self._parameters(metafunc.function.__name__, wanted)))

    def _parameters(self, test: str, wanted: Sequence[str]) -> Iterator[Any]:
        gpu_only = test.startswith("test_cuda")
        for case in filter(_APPLIES.get(test, bool), self.cases):
            for device in case.devices if "device" in wanted else (None,):
                marks = [pytest.mark.gpu] if device == "cuda" or gpu_only else []
                for dtype in case.dtypes if "dtype" in wanted else (None,):
                    values = {"case": case, "device": device, "dtype": dtype}
                    label = "-".join(str(values[name]).replace("torch.", "") for name in wanted)
                    yield pytest.param(*(values[name] for name in wanted), marks=marks, id=label)

    @pytest.fixture(autouse=True)
    def _native(self, request: pytest.FixtureRequest) -> None:
        """Compiled kernels are what calls reach. How a project says that a machine lacks a compiler, its fixture ``native_kernels`` may tell."""
        values = request.node.callspec.params
        device = values.get("device") or ("cuda" if request.node.get_closest_marker("gpu") else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        try:
            ensure = request.getfixturevalue("native_kernels")
        except pytest.FixtureLookupError:
            ensure = _require_native
        for family in filter(None, (values["case"].family, values["case"].gradients)):
            ensure(family, device)

    @pytest.fixture
    def _fresh_compiler(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    # -- results

    def test_native_is_what_the_reference_is(self, case: Case, device: str, dtype: torch.dtype) -> None:
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
                assert [output.dtype for output in actual.outputs] == [output.dtype for output in expected.outputs]
                assert all(g is None or g.dtype == args[i].dtype for i, g in zip(case.differentiable, actual.gradients, strict=True))

    def test_gradients_are_float64s(self, case: Case, device: str, dtype: torch.dtype) -> None:
        """Of each argument alone too, because then the backward kernel makes less."""
        args = case.inputs(Make(dtype, device), case.shapes[0])
        expected = run(case.oracle, _cast(args, torch.float64), case.differentiable)
        everything = run(case.call, args, case.differentiable)
        assert_near(everything, expected, max(ROUNDING[dtype], case.rounding))
        for number, position in enumerate(case.differentiable):
            alone = run(case.call, args, (position,))
            assert_near(alone, everything._replace(gradients=everything.gradients[number : number + 1]), case.rounding, what=f"argument {position} alone")

    def test_accuracy(self, case: Case, device: str, dtype: torch.dtype) -> None:
        """Against float64: no further from it than torch's own kernel."""
        draws = [_measure(case, Make(dtype, device, seed=3 + draw)) for draw in range(case.draws)]
        worse = []
        for label in draws[0]:
            mine, theirs = _pooled([draw[label].ours for draw in draws]), _pooled([draw[label].rivals for draw in draws])
            size = sum(draw[label].size for draw in draws) / len(draws)
            _write_accuracy(case, device, dtype, label, mine, theirs, size)
            noise = 2.0**-26 * size  # what is far below a float32's grain says nothing
            if any(a > b * slack + noise for a, b, slack in zip(mine, theirs, case.slack, strict=True)):
                worse.append(f"{label}: largest and mean error {mine}, torch's {theirs}")
        assert not worse, "\n".join(worse)

    def test_gradcheck(self, case: Case) -> None:
        """Numerical derivatives in float64 of the reference, through the very autograd code that native calls take."""
        checked = 0
        for op, args, _ in recorded(case, "cpu", dtype=torch.float32):
            if op in _register._differentiable:
                self._gradcheck(op, args)
                checked += 1
        assert checked, "no operator with a gradient was reached"

    def _gradcheck(self, op: Any, args: Args) -> None:
        args = tuple(arg.detach().double().requires_grad_(arg.requires_grad) if _is_float(arg) else arg for arg in args)
        positions = [position for position, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]

        def function(*leaves: Tensor) -> tuple[Tensor, ...]:
            chosen = dict(zip(positions, leaves, strict=True))
            results = op(*(chosen.get(position, arg) for position, arg in enumerate(args)))
            return tuple(result for result in tensors_of(results) if result.requires_grad)

        with OnReference():
            assert torch.autograd.gradcheck(function, [args[position] for position in positions], eps=1e-6, atol=1e-6, rtol=1e-4)

    def test_differentiable_once(self, case: Case, device: str) -> None:
        """Asking for more raises, and does not give what is wrong."""
        args = _copies(case.inputs(Make(case.dtypes[0], device), case.shapes[0]), case.differentiable)
        outputs = [output for output in tensors_of(case.call(*args)) if output.requires_grad]
        given = [gradient.requires_grad_() for gradient in _output_gradients(outputs)]
        inputs = [args[position] for position in case.differentiable]
        gradients = torch.autograd.grad(outputs, inputs, given, create_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.stack([gradient.sum() for gradient in gradients if gradient is not None]).sum().backward()

    def test_a_gradient_penalty_is_refused(self, case: Case, device: str) -> None:
        """Of which torch's own mark for such functions makes nothing, without a word."""
        args = _copies(case.inputs(Make(case.dtypes[0], device), case.shapes[0]), case.differentiable)
        loss: Any = sum(output.square().sum() for output in tensors_of(case.call(*args)) if output.requires_grad)
        gradients = torch.autograd.grad(loss, [args[position] for position in case.differentiable], create_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice|modified by an inplace operation"):
            (loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)).backward()

    def test_gradients_by_torch_func(self, case: Case, device: str) -> None:
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        expected = run(case.call, args, case.differentiable)
        given = _output_gradients(expected.outputs)
        differentiable = [output.is_floating_point() for output in expected.outputs]

        def loss(*args: Any) -> Tensor:
            outputs = tensors_of(case.call(*args))
            return torch.stack([(output * grad).sum() for output, grad, is_float in zip(outputs, given, differentiable, strict=True) if is_float]).sum()

        gradients = torch.func.grad(loss, argnums=case.differentiable)(*args)
        for actual, wanted in zip(gradients, expected.gradients, strict=True):
            assert_near(Result((), (actual,)), Result((), (torch.zeros_like(actual) if wanted is None else wanted,)))

    def test_the_same_bits_twice(self, case: Case, device: str) -> None:
        """And without autograd, and in inference mode."""
        args = case.inputs(Make(case.dtypes[-1], device), case.shapes[-1])
        first = run(case.call, args, case.differentiable)
        assert_same(run(case.call, args, case.differentiable), first)
        with torch.no_grad():
            assert_same(run(case.call, args), first._replace(gradients=()))
        with torch.inference_mode():
            outputs = tensors_of(case.call(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)))
        assert_same(Result(outputs, ()), first._replace(gradients=()))

    # -- what tensors may be like

    def test_strides(self, case: Case, device: str) -> None:
        for layout, dtype, shape in product(_layouts(case), case.dtypes[:2], case.shapes[:2]):
            args = _laid_out(case.inputs(Make(dtype, device), shape), LAYOUTS[layout])
            plain = tuple(arg.contiguous().clone() if isinstance(arg, Tensor) else arg for arg in args)
            expected = run(case.call, plain, case.differentiable)
            for isa in at_each_isa(device):
                with isa:
                    assert_near(run(case.call, args, case.differentiable), expected, case.rounding, what=f"{shape} {dtype} {layout}")

    def test_gradients_of_any_strides(self, case: Case, device: str) -> None:
        """What comes back to an operator is often expanded (from a sum) or transposed."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[1])
        for layout in (_broadcast, _transposed, _misaligned, _padded_rows):
            leaves = _copies(args, case.differentiable)
            outputs = [output for output in tensors_of(case.call(*leaves)) if output.requires_grad]
            inputs = [leaves[position] for position in case.differentiable]
            given = [layout(gradient) if gradient.dim() else gradient for gradient in _output_gradients(outputs)]
            plain = [gradient.contiguous().clone() for gradient in given]
            actual = torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)
            expected = torch.autograd.grad(outputs, inputs, plain, allow_unused=True)
            assert_near(Result((), actual), Result((), expected), case.rounding, what=layout.__name__)

    def test_empty(self, case: Case, device: str) -> None:
        for shape in ((0, *case.shapes[0][1:]),) if case.empty is None else case.empty:
            for dtype in case.dtypes:
                args = case.inputs(Make(dtype, device), shape)
                actual = run(case.call, args, case.differentiable)
                with OnReference():
                    expected = run(case.call, args, case.differentiable)
                assert_near(actual, expected, what=f"{shape}")
                assert [output.dtype for output in actual.outputs] == [output.dtype for output in expected.outputs]

    def test_autocast(self, case: Case, device: str) -> None:
        """Float32 parameters with bfloat16 activations, which is what autocast leads to, and float32 throughout."""
        for dtype in (torch.bfloat16, torch.float32):
            args = case.inputs(Make(dtype, device), case.shapes[1])
            args = tuple(arg.float() if position in case.parameters and _is_float(arg) else arg for position, arg in enumerate(args))
            with torch.autocast(device, dtype=torch.bfloat16):
                actual = run(case.call, args, case.differentiable)
            assert_near(actual, run(case.oracle, _cast(args, torch.float64), case.differentiable), ROUNDING[torch.bfloat16])
            assert all(g is None or g.dtype == args[i].dtype for i, g in zip(case.differentiable, actual.gradients, strict=True))

    # -- torch's machinery

    def test_a_dispatch_mode_sees_the_same_operators(self, case: Case, device: str) -> None:
        """With a gradient as without one: who looks for an operator (to count it, to replace it, to keep its result) finds it under one name."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        seen = []
        for differentiable in ((), case.differentiable):
            with Recorder() as recorder:
                case.call(*_copies(args, differentiable))
            # what has no gradient need not be written in place: a name's underscore may come with one
            seen.append(list(dict.fromkeys(op._schema.name.rstrip("_") for op, *_ in recorder.calls)))
        assert seen[0]
        assert seen[0] == seen[1]

    def test_opcheck(self, case: Case, device: str) -> None:
        calls = recorded(case, device)
        assert calls, "no operator that is registered through flexops was reached"
        for op, args, kwargs in calls:
            torch.library.opcheck(op, args, kwargs, test_utils=opchecks(args))

    @pytest.mark.usefixtures("_fresh_compiler")
    def test_compiles_whole(self, case: Case, device: str) -> None:
        first = next(item for item in self.cases if item.family == case.family)
        inductor = case is first if case.inductor is None else case.inductor
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        expected = run(case.call, args, case.differentiable)
        for backend in ("aot_eager", "inductor") if inductor else ("aot_eager",):
            torch._dynamo.reset()
            compiled = torch.compile(lambda *arguments: case.call(*arguments), fullgraph=True, dynamic=False, backend=backend)
            assert_near(run(compiled, args, case.differentiable), expected, what=backend)

    @pytest.mark.usefixtures("_fresh_compiler")
    def test_compiles_for_any_size(self, case: Case, device: str) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        counter, graphs = CompileCounterWithBackend("aot_eager"), []
        compiled = torch.compile(lambda *arguments: case.call(*arguments), fullgraph=True, dynamic=True, backend=counter)
        shapes = case.dynamic or tuple(tuple(size * factor for size in case.shapes[0]) for factor in (1, 2, 3))
        for shape in shapes:
            args = case.inputs(Make(case.dtypes[0], device), shape)
            assert_near(run(compiled, args, case.differentiable), run(case.call, args, case.differentiable), what=f"{shape}")
            graphs.append(counter.frame_count)
        assert len(set(graphs)) == 1, f"graphs after each of {shapes}: {graphs}"

    def test_without_memory(self, case: Case, device: str) -> None:
        """On meta, forward and backward, shapes and dtypes are those of a call that computes."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        expected = run(case.call, args, case.differentiable)
        leaves = tuple(arg.detach().to("meta").requires_grad_(i in case.differentiable) if isinstance(arg, Tensor) else arg for i, arg in enumerate(args))
        outputs = tensors_of(case.call(*leaves))
        assert [(output.shape, output.dtype) for output in outputs] == [(output.shape, output.dtype) for output in expected.outputs]
        for output in outputs:
            if output.requires_grad:
                output.sum().backward(retain_graph=True)
        for position, gradient in zip(case.differentiable, expected.gradients, strict=True):
            found = leaves[position].grad
            assert (found is None) == (gradient is None)
            assert found is None or found.device.type == "meta"

    # -- refusals

    def test_refuses_other_dtypes_by_name(self, case: Case, device: str) -> None:
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        for position, arg in enumerate(args):
            if not _is_float(arg):
                continue
            name = _name(case, position)
            for wrong in (*(arg.to(dtype) for dtype in case.refused), "a string"):
                with pytest.raises(TypeError, match=rf"^\w+\.[\w.]+: {re.escape(name)}\b.* must"):
                    case.call(*args[:position], wrong, *args[position + 1 :])

    def test_refuses_tensors_elsewhere_by_name(self, case: Case, device: str) -> None:
        """Each by itself: a kernel would take the address of what is not there, and a fake kernel would compute nothing."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        positions = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
        for position in positions if len(positions) > 1 else ():
            for elsewhere in other_devices(device):
                wrong = [arg.to(elsewhere) if i == position else arg for i, arg in enumerate(args)]
                with pytest.raises(ValueError, match=r"must be on .*device.*, got ") as caught:
                    case.call(*wrong)
                assert re.search(rf"\b{_name(case, position)}\b" if case.names else r"\w+\[0\]", str(caught.value)), (elsewhere, str(caught.value))
        for op, args, kwargs in recorded(case, device):  # backward ones, too
            tensors = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
            for position in tensors[device == "cuda" :]:  # on a GPU, where the first one is chooses the kernel
                for elsewhere in other_devices(device) if len(tensors_of(args)) > 1 else ():
                    wrong = [arg.detach().to(elsewhere) if i == position else arg for i, arg in enumerate(args)]
                    with pytest.raises((ValueError, RuntimeError), match=" must be "), torch.no_grad():
                        op(*wrong, **kwargs)

    @pytest.mark.filterwarnings("ignore")  # that such layouts are experimental
    def test_refuses_what_is_not_dense_by_name(self, case: Case, device: str) -> None:
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        for position, arg in enumerate(args):
            for wrong in _not_dense(arg) if isinstance(arg, Tensor) and arg.dim() else ():
                with pytest.raises(TypeError, match=" must be ") as caught:
                    case.call(*args[:position], wrong, *args[position + 1 :])
                text = str(caught.value)
                assert re.match(rf"\w+\.\w+: {_name(case, position)} must be " if case.names else r"\w+::\w+: \w+\[0\] must be ", text), text

    def test_refuses_wrong_calls_by_name(self, case: Case) -> None:
        for call, error, message in case.refusals:
            with pytest.raises(error, match=message):
                call()

    # -- CUDA

    def test_cuda_graph(self, case: Case) -> None:
        make = Make(case.dtypes[1 % len(case.dtypes)], "cuda")
        args, others = (case.inputs(make, case.shapes[-1]) for _ in range(2))
        expected = run(case.call, others, case.differentiable)
        leaves, given = _copies(args, case.differentiable), _output_gradients(expected.outputs)
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
        given = _output_gradients(expected.outputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = tuple(torch.zeros_like(arg) if isinstance(arg, Tensor) else arg for arg in args)
            torch.cuda._sleep(20_000_000)
            for target, source in zip(late, args, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            late = tuple(arg.requires_grad_() if i in case.differentiable else arg for i, arg in enumerate(late))
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
        here = Result(tuple(t.to("cuda:0") for t in actual.outputs), tuple(None if t is None else t.to("cuda:0") for t in actual.gradients))
        assert_same(here, run(case.call, args, case.differentiable))

    def test_cuda_more_than_2_to_31_elements(self, case: Case) -> None:
        """The first and the last rows are those of a call on these rows alone."""
        assert case.huge is not None
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < HUGE_MEMORY:
            pytest.skip(f"needs {HUGE_MEMORY / 2**30:.0f} GiB of free GPU memory")
        args = case.inputs(Make(torch.bfloat16, "cuda", in_place=True), case.huge)
        assert any(isinstance(arg, Tensor) and arg.numel() > 2**31 for arg in args)
        args = tuple(arg.requires_grad_() if i in case.differentiable else arg for i, arg in enumerate(args))
        whole, rows = _with_ones_for_gradients(case, args), case.huge[0]
        for part in (slice(0, 8), slice(rows - 8, rows)):
            few = tuple(arg.detach()[part].clone() if _has_rows(arg, rows) else arg for arg in args)
            alone = _with_ones_for_gradients(case, _copies(few, case.differentiable))
            for actual, expected in zip([*whole.outputs, *whole.gradients], [*alone.outputs, *alone.gradients], strict=True):
                if actual is not None and expected is not None and _has_rows(actual, rows):
                    assert_near(Result((actual[part],), ()), Result((expected,), ()), what=f"{case.huge} {part}")


def _require_native(family: str, device: str) -> None:
    if not loader.ensure(family, device):
        pytest.fail(next(one.reason for one in flexops.status() if (one.op, one.device) == (family, device)), pytrace=False)


def other_devices(device: str) -> list[str]:
    others = ["meta"] if device == "cpu" else ["meta", "cpu", *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]
    return others + (["cuda"] if device == "cpu" and torch.cuda.is_available() else [])


def _not_dense(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in the ways to hold one that torch has beside the usual."""
    yield tensor.to_sparse()
    if tensor.dim() == 2:
        yield tensor.to_sparse_csr()
    yield torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)
    if tensor.dtype == torch.float32 and tensor.is_cpu:
        yield torch.nested.nested_tensor([tensor, tensor])
        yield torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
        yield tensor.to_mkldnn()


def run_in_place(case: Case, args: Args, given: list[Tensor]) -> Result:
    """Like ``run``, on these very tensors and with output gradients that are there: no copy from the host, which stream capture would refuse."""
    outputs = tensors_of(case.call(*args))
    gradients: tuple[Tensor | None, ...] = ()
    if case.differentiable:
        with_gradient = [output for output in outputs if output.requires_grad]
        wanted = [gradient for output, gradient in zip(outputs, given, strict=True) if output.requires_grad]
        gradients = torch.autograd.grad(with_gradient, [args[i] for i in case.differentiable], wanted, allow_unused=True)
    return Result(tuple(output.detach() for output in outputs), gradients)


def _with_ones_for_gradients(case: Case, args: Args) -> Result:
    outputs = tensors_of(case.call(*args))
    gradients: tuple[Tensor | None, ...] = ()
    if case.differentiable:
        with_gradient = [output for output in outputs if output.requires_grad]
        ones = [torch.ones((), dtype=output.dtype, device=output.device).expand_as(output) for output in with_gradient]
        gradients = torch.autograd.grad(with_gradient, [args[i] for i in case.differentiable], ones, allow_unused=True)
    return Result(tuple(output.detach() for output in outputs), gradients)


def _has_rows(value: object, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _name(case: Case, position: int) -> str:
    return case.names[position] if position < len(case.names) else f"argument {position}"


def _write_accuracy(case: Case, device: str, dtype: torch.dtype, what: str, ours: tuple[float, float], torchs: tuple[float, float], size: float) -> None:
    file = os.environ.get("FLEXOPS_TEST_ACCURACY")
    if not file:
        return
    row = {"op": case.name, "what": what, "device": device, "dtype": str(dtype).removeprefix("torch."), "size": size, "torch": torch.__version__}
    row |= {"max": ours[0], "mean": ours[1], "torch_max": torchs[0], "torch_mean": torchs[1]}
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def accuracy_tables(rows: list[dict[str, Any]]) -> str:
    """The rows of an accuracy file in Markdown: errors against float64, over the root mean square of the exact values; torch's in brackets."""
    newest = {(row["device"], row["op"], row["what"], row["dtype"]): row for row in rows}
    lines: list[str] = []
    for device in dict.fromkeys(key[0] for key in newest):
        names = dict.fromkeys(key[1:3] for key in newest if key[0] == device)
        dtypes = [dtype for dtype in _SHORT if any(key[0] == device and key[3] == dtype for key in newest)]
        head = [f"{_SHORT[dtype]} {kind}" for dtype in dtypes for kind in ("largest", "mean")]
        lines += [f"## {device}", "", f"| operator | of | {' | '.join(head)} |", f"| --- | --- |{' ---: |' * len(head)}"]
        for op, what in names:
            cells = [_accuracy_cell(newest.get((device, op, what, dtype)), kind) for dtype in dtypes for kind in ("max", "mean")]
            lines.append(f"| {op} | {what} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _accuracy_cell(row: dict[str, Any] | None, kind: str) -> str:
    return "" if row is None else f"{row[kind] / (row['size'] or 1):.1e} ({row[f'torch_{kind}'] / (row['size'] or 1):.1e})"


if __name__ == "__main__":
    print(accuracy_tables([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]))
