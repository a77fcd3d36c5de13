"""What every optimizer's operator and class promises, as tests that its own test file only has to
declare (as contract.py is for other operators)::

    class TestStep(StepContract):
        step = Step("lion", flexops.lion_, {"params": None, "grads": None, "exp_avgs": torch.float32}, {"lr": 0.01, "weight_decay": 0.1}, optim.Lion, exact)

They run on the CPU and, marked ``gpu``, on CUDA.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from contract import ISA_LEVELS, isa_limit, other_devices
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexops import optim
from flexops.bench.reference import OnReference
from flexops.ops import _register
from flexops.ops.adam8bit import blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sizes around a register, a vector, a block of scales, and what a thread block does at once.
SHAPES = [(7,), (33, 65), (), (3, 5, 17), (1031,), (0,), (4, 1), (256,), (2048,), (2049,), (16385,)]
Lists = list[list[Tensor]]
compiles_written_lists = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""torch.compile of torch 2.4 takes no op that writes lists of tensors: such a call breaks the graph
there (docs/operators.md)."""
needs_mutable_lists = pytest.mark.skipif(
    not compiles_written_lists,
    reason="torch.compile of torch 2.4 takes no op that writes lists of tensors",
)
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    *(("test_aot_dispatch_dynamic",) if compiles_written_lists else ()),
)
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(frozen=True)
class Step:
    """One optimizer.

    Attributes:
        family: the operator's name in the catalogue.
        call: the public function: lists by position, numbers by keyword.
        lists: its lists' names, each with the dtype that is accepted; None for float32, bfloat16
            and float16.
        numbers: numbers for ``call``.
        optimizer: the class.
        exact: ``(row of float64 tensors, one of each list; numbers) -> the row after a step``.
        options: options of the class that mean the same as ``numbers``, except ``lr``.
        bad_numbers: names of numbers that must not be negative.
        operator: its name; the family's with a ``_``, unless told.
        any_width: lists of float32 that may also be bfloat16 or float16.
    """

    family: str
    call: Callable[..., None]
    lists: dict[str, torch.dtype | None]
    numbers: dict[str, Any]
    optimizer: Any
    exact: Callable[[list[Tensor], dict[str, Any]], list[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    bad_numbers: tuple[str, ...] = ("lr", "weight_decay")
    operator: str = ""
    any_width: tuple[str, ...] = ()


def make_lists(
    step: Step,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: str,
    *,
    shapes: list[Any] = SHAPES,
    seed: int = 0,
) -> Lists:
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tensor:
        if name == "state_steps":
            return torch.tensor(3.0)
        if "scale" in name:
            return torch.rand(blocks(torch.Size(shape).numel()), generator=generator) + 0.5
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        if dtype == torch.uint8:
            return torch.randint(1, 256, shape, generator=generator, dtype=torch.uint8)
        value = torch.randn(shape, generator=generator)
        value = value.square() if "sq" in name or name == "sums" else value
        return value.to(dtype or (param_dtype if name == "params" else grad_dtype))

    return [
        [draw(name, dtype, shape).to(device) for shape in shapes]
        for name, dtype in step.lists.items()
    ]


def clone(lists: Lists) -> Lists:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_lists_close(actual: Lists, expected: Lists, *, codes_apart: bool = True) -> None:
    """Up to rounding. A code may be its neighbour where a random number lies just at the border
    between them."""
    for found, wanted in zip(actual, expected, strict=True):
        for left, right in zip(found, wanted, strict=True):
            assert left.dtype == right.dtype
            if left.dtype in (torch.int8, torch.uint8):
                difference = (left.int() - right.int()).abs()
                assert not difference.numel() or difference.max() <= 1
                assert difference.sum() <= (0.001 * difference.numel() + 3 if codes_apart else 0)
            else:
                exact = left.dtype == torch.float32
                torch.testing.assert_close(
                    left,
                    right,
                    rtol=4e-6 if exact else None,
                    atol=2e-6 if exact else None,
                    equal_nan=True,
                )


def make_params(
    device: str, dtype: torch.dtype = torch.float32, shapes: list[Any] | None = None
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device))
        for shape in shapes or [*SHAPES, (80, 70)]
    ]


def set_grads(params: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype).to(param.device)


def step_alike(steps: int, *trained: tuple[list[Any], Any]) -> None:
    """Make as many steps of each ``(parameters, optimizer)``, with the same gradients."""
    for step in range(steps):
        for params, optimizer in trained:
            set_grads(params, seed=step)
            optimizer.step()


def assert_params_close(params: list[Any], expected: list[Any]) -> None:
    """As two implementations of one formula are after many steps."""
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


class CheckedReference(OnReference):
    """The references as the dispatcher calls them: behind the check of their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _register.reference_of(func.name()):
            _register.refusal_of(func)(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class StepContract:
    step: ClassVar[Step]

    @pytest.fixture(autouse=True)
    def _native(
        self, request: pytest.FixtureRequest, native_kernels: Callable[[str, str], None]
    ) -> None:
        device = getattr(request.node, "callspec", None) and request.node.callspec.params.get(
            "device"
        )
        native_kernels(
            self.step.family,
            device or ("cuda" if request.node.get_closest_marker("gpu") else "cpu"),
        )

    def lists(
        self,
        device: str,
        param: torch.dtype = torch.float32,
        grad: torch.dtype = torch.float32,
        **options: Any,
    ) -> Lists:
        return make_lists(self.step, param, grad, device, **options)

    def call(self, lists: Lists, **changes: Any) -> None:
        self.step.call(*lists, **(self.step.numbers | changes))

    def on_reference(self, lists: Lists, **changes: Any) -> None:
        with CheckedReference():
            self.call(lists, **changes)

    def optimizer(self, params: Any, **changes: Any) -> Any:
        return self.step.optimizer(
            params, **({"lr": self.step.numbers["lr"]} | self.step.options | changes)
        )

    # -- results

    @ON_BOTH
    @pytest.mark.parametrize("grad_dtype", DTYPES)
    @pytest.mark.parametrize("param_dtype", DTYPES)
    @pytest.mark.parametrize("maximize", [False, True])
    def test_native_is_what_the_reference_is(self, param_dtype, grad_dtype, maximize, device):
        lists = self.lists(device, param_dtype, grad_dtype)
        expected = clone(lists)
        self.call(lists, maximize=maximize)
        self.on_reference(expected, maximize=maximize)
        assert_lists_close(lists, expected)

    @ON_BOTH
    def test_mixed_dtypes_in_one_call(self, device):
        groups = [self.lists(device, p, g) for p in DTYPES for g in DTYPES]
        lists = [[tensor for group in groups for tensor in group[k]] for k in range(len(groups[0]))]
        expected = clone(lists)
        self.call(lists)
        self.on_reference(expected)
        assert_lists_close(lists, expected)

    @ON_BOTH
    def test_is_the_formula_in_float64(self, device):
        lists = self.lists(device)
        rows = [
            [
                tensor if tensor.dtype in (torch.int8, torch.uint8) else tensor.double()
                for tensor in row
            ]
            for row in zip(*lists, strict=True)
        ]
        exact = [self.step.exact(row, self.step.numbers) for row in rows]
        self.call(lists)
        for row, wanted in zip(zip(*lists, strict=True), exact, strict=True):
            for left, right in zip(row, wanted, strict=True):
                if left.dtype == torch.float32:
                    torch.testing.assert_close(left.double(), right, rtol=4e-6, atol=2e-6)

    @ON_BOTH
    def test_large_tensor_in_pieces(self, device):
        lists = self.lists(device, shapes=[(300_001,)])
        expected = clone(lists)
        self.call(lists)
        self.on_reference(expected)
        assert_lists_close(lists, expected)

    @ON_BOTH
    def test_the_same_bits_twice(self, device):
        lists = self.lists(device, torch.float32, torch.bfloat16, shapes=[(100_003,), (5,)])
        again = clone(lists)
        self.call(lists)
        self.call(again)
        for found, wanted in zip(lists, again, strict=True):
            assert all(map(torch.equal, found, wanted))

    @ON_BOTH
    def test_grad_scale_is_taken_out_and_written_back(self, device):
        lists = self.lists(device, torch.float32, torch.bfloat16)
        plain = clone(lists)
        lists[1] = [grad * 1024 for grad in lists[1]]
        scaled = clone(lists)
        scale = torch.tensor([1024.0], device=device)
        self.call(lists, grad_scale=scale, found_inf=torch.zeros((), device=device))
        self.on_reference(scaled, grad_scale=scale)
        self.call(plain)
        assert_lists_close(lists, plain)
        assert_lists_close(scaled, plain)

    @ON_BOTH
    @pytest.mark.parametrize("reference", [False, True])
    def test_found_inf_does_nothing_at_all(self, reference, device):
        lists = self.lists(device, torch.float32, torch.float16)
        before = clone(lists)
        numbers = {
            "grad_scale": torch.tensor(2.0, device=device),
            "found_inf": torch.ones((), device=device),
        }
        (self.on_reference if reference else self.call)(lists, **numbers)
        for found, wanted in zip(lists, before, strict=True):
            assert all(map(torch.equal, found, wanted))

    @ON_BOTH
    def test_lr_as_a_tensor(self, device):
        lists = self.lists(device)
        plain, reference = clone(lists), clone(lists)
        rate = torch.tensor([self.step.numbers["lr"]], device=device)
        self.call(lists, lr=rate)
        self.on_reference(reference, lr=rate)
        self.call(plain)
        assert_lists_close(lists, plain)
        assert_lists_close(reference, plain)

    @ON_BOTH
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_gradient_that_is_not_finite_shows(self, value, device):
        lists = self.lists(device, shapes=[(1000,)])
        lists[1][0][123] = value
        expected = clone(lists)
        self.call(lists)
        self.on_reference(expected)
        for found, wanted in zip(lists, expected, strict=True):
            assert all(
                torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, wanted, strict=True)
            )

    @ON_BOTH
    @pytest.mark.parametrize("which", ["params", "grads", "states", "all"])
    def test_odd_strides(self, which, device):
        for layout in LAYOUTS.values():
            lists = self.lists(device, shapes=[(137, 241)])
            plain = clone(lists)
            for position in {
                "params": [0],
                "grads": [1],
                "states": range(2, len(lists)),
                "all": range(len(lists)),
            }[which]:
                if lists[position][0].dim() == 2:
                    lists[position] = [layout(lists[position][0])]
            self.call(lists)
            self.call(plain)
            if any(tensors[0].dtype == torch.int8 for tensors in lists):
                assert_lists_close(lists, plain, codes_apart=False)
            assert_lists_close(lists, plain)

    @ON_BOTH
    def test_a_gradient_whose_elements_share_memory(self, device):
        lists = self.lists(device, shapes=[(64, 65)])
        lists[1] = [lists[1][0][:1].expand(64, 65)]
        plain = clone(lists)
        plain[1] = [lists[1][0].contiguous()]
        self.call(lists)
        self.call(plain)
        assert_lists_close([lists[0], *lists[2:]], [plain[0], *plain[2:]])

    @ON_BOTH
    def test_no_tensors_and_empty_tensors(self, device):
        self.call([[] for _ in self.step.lists])
        lists = self.lists(device, shapes=[(0, 3)])
        self.call(lists)
        names = list(self.step.lists)
        if "state_steps" in names:
            assert lists[names.index("state_steps")][0].item() == 4

    @ON_BOTH
    @pytest.mark.parametrize("reference", [False, True])
    def test_step_counts_in_one_tensor(self, reference, device):
        names = list(self.step.lists)
        if "state_steps" not in names:
            return
        at, call = names.index("state_steps"), self.on_reference if reference else self.call
        lists = self.lists(device)
        lists[at] = [torch.tensor(float(3 + i), device=device) for i in range(len(lists[0]))]
        expected = clone(lists)
        lists[at] = [torch.stack(lists[at])]
        before = clone(lists)
        call(lists)
        call(expected)
        expected[at] = [torch.stack(expected[at])]
        assert_lists_close(lists, expected)
        assert torch.equal(lists[at][0], before[at][0] + 1)
        for wrong, text in (
            (before[at][0].double(), r"state_steps\[0\] must be float32, got float64"),
            (before[at][0][1:], "state_steps must hold 11 tensors, as params does, got 1"),
            (
                torch.stack([before[at][0]] * 2, 1)[:, 0],
                "state_steps must hold 11 tensors, as params does, got 1",
            ),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                call([*before[:at], [wrong], *before[at + 1 :]])

    # -- rejections

    def test_wrong_dtypes_are_named(self):
        for position, (name, dtype) in enumerate(self.step.lists.items()):
            for backend in (self.call, self.on_reference):
                lists = self.lists("cpu")
                before = lists[0][0].clone()
                lists[position][1] = lists[position][1].double()
                any_width = dtype is None or name in self.step.any_width
                accepted = (
                    "float32, float16 or bfloat16, got float64"
                    if any_width
                    else "float32"
                    if "scale" in name
                    else f"{dtype}, got float64"
                )
                with pytest.raises(TypeError) as caught:
                    backend(lists)
                assert f"flexops.{self.step.family}" in str(caught.value)
                assert f": {name}[1] must be " in str(caught.value)
                assert accepted.removeprefix("torch.") in str(caught.value)
                assert torch.equal(lists[0][0], before)  # nothing was touched

    def test_wrong_shapes_are_named(self):
        for position, name in enumerate(self.step.lists):
            lists = self.lists("cpu")
            wrong = lists[position][1].reshape(-1)
            lists[position][1] = wrong[:-1] if "scale" in name else torch.cat([wrong] * 2)
            if position == 0:
                name = "grads"  # it is the others that do not fit
            with pytest.raises(
                ValueError, match=rf": {name}\[1\] must (have|be a .* of at least) "
            ):
                self.call(lists)

    def test_what_is_no_dense_tensor_is_named(self):
        for wrong, text in (
            (None, "must be a tensor, got NoneType"),
            (torch.eye(33, 65).to_sparse(), r"must be a dense \(strided\) tensor"),
        ):
            lists: Any = self.lists("cpu")
            lists[1][1] = wrong
            with pytest.raises(TypeError, match=rf": grads\[1\] {text}"):
                self.call(lists)

    def test_wrong_lengths_are_named(self):
        for position, name in enumerate(self.step.lists):
            lists = self.lists("cpu")
            lists[position] = lists[position][:-1]
            with pytest.raises(
                ValueError, match=r"\w+ must hold \d+ tensors, as params does, got \d+"
            ) as caught:
                self.call(lists)
            assert position == 0 or f" {name} must hold" in str(caught.value)

    @ON_BOTH
    def test_a_tensor_on_another_device_is_named(self, device):
        for elsewhere in other_devices(device):
            for call in (self.call, self.on_reference):
                for position, name in enumerate(self.step.lists):
                    lists = self.lists(device)
                    before = lists[0][0].clone()
                    lists[position][1] = lists[position][1].to(elsewhere)
                    with pytest.raises(
                        ValueError,
                        match=(
                            rf"{name}\[1\] must be on the device of params\[0\], {device}\S*, got"
                            rf" {elsewhere}"
                        ),
                    ):
                        call(lists)
                    assert torch.equal(lists[0][0], before)
            for name in ("grad_scale", "found_inf"):
                with pytest.raises(
                    ValueError,
                    match=rf"{name} must be on the device of params\[0\], {device}\S*, got {elsewhere}",
                ):
                    self.call(self.lists(device), **{name: torch.ones((), device=elsewhere)})

    def test_wrong_numbers_are_named(self):
        wrong = [(name, value) for name in self.step.bad_numbers for value in (-1.0, float("nan"))]
        wrong += [(name, 1.0) for name in self.step.numbers if name.startswith("beta")]
        for name, value in wrong:
            with pytest.raises(
                ValueError,
                match=rf"flexops\.{self.step.operator or self.step.family + '_'}: {name} must",
            ):
                self.call(self.lists("cpu"), **{name: value})
        for name in ("lr", "grad_scale", "found_inf"):
            with pytest.raises(
                TypeError, match=rf": {name} must be a float32 tensor of one element"
            ):
                self.call(self.lists("cpu"), **{name: torch.zeros(2)})

    # -- torch

    @ON_BOTH
    def test_opcheck(self, device):
        calls: list[tuple[Any, Any, Any]] = []

        class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func.namespace == "flexops":
                    calls.append(
                        (
                            func,
                            *torch.utils._pytree.tree_map(
                                lambda x: x.clone() if isinstance(x, Tensor) else x,
                                (args, kwargs or {}),
                            ),
                        )
                    )
                return func(*args, **(kwargs or {}))

        with Recorder():
            self.call(self.lists(device, torch.float32, torch.bfloat16, shapes=SHAPES[:3]))
        assert calls
        for op, args, kwargs in calls:
            torch.library.opcheck(op, args, kwargs, test_utils=OPCHECKS)

    @ON_BOTH
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiles_without_graph_breaks(self, dynamic, device):
        def train_step(lists: Lists) -> Tensor:
            self.call(lists)
            return lists[0][0] * 2

        lists = self.lists(device, shapes=SHAPES[:2])
        expected = clone(lists)
        torch._dynamo.reset()
        backend = "inductor" if device == "cuda" else "aot_eager"
        doubled = torch.compile(
            train_step, fullgraph=compiles_written_lists, backend=backend, dynamic=dynamic
        )(lists)
        torch.testing.assert_close(doubled, train_step(expected), rtol=4e-6, atol=2e-6)
        assert_lists_close(lists, expected)
        torch._dynamo.reset()

    def test_backward_notices_that_a_saved_parameter_was_stepped(self):
        param = torch.nn.Parameter(torch.randn(4))
        loss = (param**2).sum()
        param.grad = torch.ones(4)
        self.optimizer([param]).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    # -- the class

    @ON_BOTH
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_state_dict_goes_on_where_it_was_saved(self, dtype, device):
        params, expected = make_params(device, dtype), make_params(device, dtype)
        optimizer, oracle = self.optimizer(params), self.optimizer(expected)
        for step in range(6):
            if step == 3:
                saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
                before = optimizer.state
                optimizer = self.optimizer(params, lr=1.0)
                optimizer.load_state_dict(saved)
                for param in params:
                    for name, value in before[param].items():
                        assert optimizer.state[param][name].dtype == value.dtype
                        assert torch.equal(optimizer.state[param][name], value)
            for each in (params, expected):
                set_grads(each, seed=step)
            optimizer.step()
            oracle.step()
        assert all(map(torch.equal, params, expected))

    def test_a_state_dict_that_knows_fewer_options(self):
        """Of an older version, or of another's optimizer; torch's own do it for each other's."""
        params = make_params("cpu")
        optimizer = self.optimizer(params)
        set_grads(params, seed=0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            for name in set(group) - {
                "params",
                "lr",
                "betas",
                "eps",
                "weight_decay",
                "lr_decay",
                "initial_accumulator_value",
            }:
                del group[name]
        loaded = self.optimizer(params)
        loaded.load_state_dict(saved)
        loaded.step()
        assert loaded.param_groups[0].keys() >= optimizer.defaults.keys()

    @ON_BOTH
    @pytest.mark.parametrize(
        "change",
        ["params", "some states", "all states", "data of states", "counts", "order", "one anew"],
    )
    def test_what_was_put_in_another_place_is_noticed(self, change, device):
        params, expected = make_params(device), make_params(device)
        optimizer, oracle = self.optimizer(params), self.optimizer(expected)
        step_alike(2, (params, optimizer), (expected, oracle))
        states = [optimizer.state[param] for param in params]
        if change == "params":
            for param in params[::2]:
                param.data = param.data.clone()
        elif change == "data of states":
            for state in states:
                for value in state.values():
                    value.data = value.data.clone()
        elif change == "counts":
            for each, optim_ in ((params, optimizer), (expected, oracle)):
                if "step" in states[0]:
                    optim_.state[each[3]]["step"] = torch.tensor(100.0, device=device)
        elif change == "order":
            optimizer.state[params[0]] = optimizer.state.pop(params[0])
        elif change == "one anew":
            for each, optim_ in ((params, optimizer), (expected, oracle)):
                optim_.state[each[1]] = {}
        else:  # as those do that send states to the CPU between steps
            for state in states[:: 3 if change == "some states" else 1]:
                for name, value in state.items():
                    state[name] = value.clone()
        step_alike(2, (params, optimizer), (expected, oracle))
        for left, right in zip(params, expected, strict=True):
            assert torch.equal(left, right)
            assert optimizer.state[left].keys() == oracle.state[right].keys()
            for name, value in oracle.state[right].items():
                assert torch.equal(optimizer.state[left][name], value), name

    def test_replaced_states_are_not_kept(self):
        params = make_params("cpu")
        optimizer = self.optimizer(params)
        set_grads(params, seed=0)
        optimizer.step()
        large = [
            weakref.ref(value)
            for param in params
            for name, value in optimizer.state[param].items()
            if name != "step"
        ]
        optimizer.state.clear()
        # states that are sent to the CPU free their memory at once
        assert not [ref() for ref in large if ref() is not None]

    def test_steps_in_several_threads(self):
        expected = make_params("cpu")
        step_alike(10, (expected, self.optimizer(expected)))
        trained = [make_params("cpu") for _ in range(4)]
        threads = [
            threading.Thread(
                target=lambda params=params: step_alike(10, (params, self.optimizer(params))),
                daemon=True,
            )
            for params in trained
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
            assert not thread.is_alive()
        for params in trained:
            assert all(map(torch.equal, params, expected))

    def test_copies_and_pickles(self):
        params = make_params("cpu")
        optimizer = self.optimizer(params)
        set_grads(params, seed=1)
        optimizer.step()
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            set_grads(other.param_groups[0]["params"], seed=2)
            other.step()

    @ON_BOTH
    def test_groups_schedules_and_missing_gradients(self, device):
        params, expected = make_params(device), make_params(device)
        optimizer = self.optimizer(
            [{"params": params[:4]}, {"params": params[4:], "lr": 0.2, "weight_decay": 0.5}]
        )
        alone = [
            self.optimizer([param], **({} if i < 4 else {"lr": 0.2, "weight_decay": 0.5}))
            for i, param in enumerate(expected)
        ]
        schedules = [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, *alone)
        ]
        for step in range(4):
            for each in (params, expected):
                set_grads(each, seed=step)
                each[step % 3].grad = None
            optimizer.step()
            for each in alone:
                each.step()
            for schedule in schedules:
                schedule.step()
        assert all(map(torch.equal, params, expected))

    @ON_BOTH
    @pytest.mark.parametrize("unscale", [False, True])
    def test_grad_scaler(self, unscale, device):
        results = []
        for scaled in (True, False):
            params = make_params(device, shapes=SHAPES[:5])
            optimizer = self.optimizer(params)
            scaler = torch.amp.GradScaler(
                device, init_scale=2.0**10, growth_interval=2, enabled=scaled
            )
            for step in range(6):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(step)
                loss = sum(
                    (param * torch.randn(param.shape, generator=generator).to(device)).sum()
                    for param in params
                )
                scaler.scale(loss).backward()
                if step == 3:
                    if not scaled:
                        continue
                    params[1].grad[0, 0] = float("inf")
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            results.append(params)
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right, rtol=4e-6, atol=2e-6)

    def test_closure_and_hooks(self):
        params = make_params("cpu")
        optimizer = self.optimizer(params)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum(param.square().sum() for param in params)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        assert seen == [1]

    def test_a_compiled_step_keeps_its_states(self):
        params, expected = (make_params("cpu", shapes=[(80, 70), (33, 65)]) for _ in range(2))
        optimizer, oracle = self.optimizer(params), self.optimizer(expected)
        torch._dynamo.reset()
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        for step in range(3):
            for each in (params, expected):
                set_grads(each, seed=step)
            compiled()
            oracle.step()
        torch._dynamo.reset()
        for left, right in zip(params, expected, strict=True):
            assert torch.equal(left, right)
            assert optimizer.state[left].keys() == oracle.state[right].keys()

    def test_wrong_options_are_rejected(self):
        for options in (
            {"lr": -1.0},
            {"weight_decay": -1.0},
            *({"betas": (1.0, 0.9)} for _ in range("betas" in self.step.options)),
        ):
            with pytest.raises(ValueError, match="Invalid"):
                self.optimizer(make_params("cpu"), **options)

    def test_what_cannot_be_stepped_is_rejected_clearly(self):
        param = torch.nn.Parameter(torch.randn(100, 60))
        param.grad = torch.eye(100, 60).to_sparse()
        with pytest.raises(
            RuntimeError, match=r"does not support sparse gradients; torch.optim.\w+ does"
        ):
            self.optimizer([param]).step()
        param = torch.nn.Parameter(torch.randn(100, 60, dtype=torch.float64))
        param.grad = torch.ones_like(param)
        with pytest.raises(
            TypeError, match=r"params\[0\] must be float32, bfloat16 or float16, got float64"
        ):
            self.optimizer([param]).step()

    def test_expanded_parameters_are_rejected_before_any_step(self):
        """As torch's own optimizers, except fused ones."""
        param, expanded = (
            torch.nn.Parameter(torch.randn(5)),
            torch.nn.Parameter(torch.randn(1).expand(6)),
        )
        for one in (param, expanded):
            one.grad = torch.ones_like(one)
        before = param.detach().clone()
        with pytest.raises(RuntimeError, match=r"param_groups\[1\]: params\[0\] is expanded"):
            self.optimizer([{"params": [param]}, {"params": [expanded]}]).step()
        assert torch.equal(param, before)

    def test_an_expanded_list_is_rejected_before_it_is_written(self):
        lists = self.lists("cpu", shapes=[(5,), (64, 65)])
        lists[0][1] = lists[0][1][:1].expand(64, 65)
        before = clone(lists)
        with pytest.raises(RuntimeError, match=r"params\[1\] is written, and must not be expanded"):
            self.call(lists)
        assert_lists_close(lists, before)

    @pytest.mark.parametrize("wrong", ["dtype", "complex", "sparse", "rate"])
    def test_no_group_is_stepped_if_one_cannot_be(self, wrong):
        params = make_params("cpu", shapes=[(3, 4), (4, 3), (5, 3)])
        optimizers = [
            self.optimizer([{"params": params[:1]}, {"params": params[1:]}]),
            self.optimizer(params),
        ]
        if wrong in ("dtype", "complex"):  # as model.double() does it
            params[2].data = params[2].data.to(
                torch.float64 if wrong == "dtype" else torch.complex128
            )
        set_grads(params, seed=0)
        if wrong == "sparse":
            params[2].grad = torch.eye(5, 3).to_sparse()
        if wrong == "rate":
            del optimizers[1]
            optimizers[0].param_groups[1]["lr"] = torch.tensor([0.1, 0.2])
        before = [param.detach().clone() for param in params]
        error, text = {
            "sparse": (RuntimeError, "sparse gradients"),
            "rate": (ValueError, "1-element"),
        }.get(wrong, (TypeError, r"params\[[12]\] must be"))
        for optimizer in optimizers:
            for _ in range(2):
                with pytest.raises(error, match=text):
                    optimizer.step()
            assert all(map(torch.equal, params, before))
            assert all(state["step"] == 0 for state in optimizer.state.values() if "step" in state)

    def test_parameters_without_memory(self):
        """On meta, and fake ones, as those have who plan what a training takes."""
        for place in (torch.device("meta"), FakeTensorMode()):
            with place:
                params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((80, 70), (3,))]
                optimizer = self.optimizer(params)
                for _ in range(2):
                    for param in params:
                        param.grad = torch.zeros_like(param)
                    optimizer.step()
            assert all(
                value.device == param.device
                for param in params
                for value in optimizer.state[param].values()
            )

    def test_each_step_count_has_its_own_storage(self):
        params = make_params("cpu")
        optimizer = self.optimizer(params)
        step_alike(2, (params, optimizer))
        counts = [state["step"] for state in optimizer.state.values() if "step" in state]
        assert all(count.untyped_storage().nbytes() == 4 and count == 2 for count in counts)
        assert len({count.untyped_storage().data_ptr() for count in counts}) == len(counts)

    def test_complex_parameters_step_as_pairs(self):
        param = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))
        pair = torch.nn.Parameter(torch.view_as_real(param.detach().clone()))
        optimizers = self.optimizer([param]), self.optimizer([pair])
        for _ in range(3):
            param.grad = torch.randn(9, dtype=torch.complex64)
            pair.grad = torch.view_as_real(param.grad.clone())
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(torch.view_as_real(param), pair)

    @pytest.mark.extra
    @pytest.mark.parametrize("isa", ISA_LEVELS[:2])  # the best one is what every other test runs
    def test_lower_instruction_sets(self, isa):
        with isa_limit(isa):
            for param_dtype, grad_dtype in zip(
                DTYPES, [DTYPES[0], DTYPES[2], DTYPES[1]], strict=True
            ):
                self.test_native_is_what_the_reference_is(param_dtype, grad_dtype, False, "cpu")
            for test in (
                self.test_large_tensor_in_pieces,
                self.test_mixed_dtypes_in_one_call,
                self.test_is_the_formula_in_float64,
                self.test_grad_scale_is_taken_out_and_written_back,
                self.test_lr_as_a_tensor,
            ):
                test("cpu")

    # -- CUDA

    @pytest.mark.gpu
    def test_cuda_more_tensors_than_one_launch_holds(self):
        lists = self.lists("cuda", shapes=[(17 + i % 40,) for i in range(5000)])
        expected = clone(lists)
        self.call(lists)
        self.on_reference(expected)
        joined = [
            [[torch.cat([tensor.reshape(-1) for tensor in tensors])] for tensors in each]
            for each in (lists, expected)
        ]
        assert_lists_close(*joined)

    @pytest.mark.gpu
    def test_cuda_never_waits_for_the_device(self):
        params = make_params("cuda")
        optimizer = self.optimizer(params, lr=torch.tensor(0.1, device="cuda"))
        set_grads(params, seed=0)
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optim.clip_grad_norm_(params, 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.gpu
    def test_cuda_graph_with_a_learning_rate_that_changes(self):
        params, expected = make_params("cuda"), make_params("cuda")
        rate = torch.tensor(0.1, device="cuda")
        optimizer, oracle = self.optimizer(params, lr=rate), self.optimizer(expected, lr=0.1)
        for each in (params, expected):
            set_grads(each, seed=0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()  # makes the states
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        oracle.step()
        for step in range(1, 5):
            rate.fill_(0.1 / step)
            oracle.param_groups[0]["lr"] = 0.1 / step
            for param, other in zip(params, expected, strict=True):
                other.grad = torch.randn_like(other)
                param.grad.copy_(other.grad)
            graph.replay()
            oracle.step()
        for left, right in zip(params, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)

    @pytest.mark.gpu
    def test_cuda_runs_on_the_current_stream(self):
        lists = self.lists("cuda", shapes=[(2**22,)])
        expected = clone(lists)
        expected[1][0].fill_(1.0)
        self.call(expected)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            # the gradient arrives late; a step on any other stream would not see it
            torch.cuda._sleep(100_000_000)
            lists[1][0].fill_(1.0)
            self.call(lists)
        torch.cuda.synchronize()
        assert_lists_close(lists, expected)

    @pytest.mark.gpu
    def test_cuda_more_than_2_to_31_elements(self, require_gpu_memory):
        count = 2**31 + 12_345
        sizes = {torch.int8: 1, torch.uint8: 1, torch.float32: 4, None: 2}
        needed = (
            sum(
                count * sizes[dtype]
                for name, dtype in self.step.lists.items()
                if name != "state_steps" and "scale" not in name
            )
            + 2**31
        )
        require_gpu_memory(needed)
        lists = []
        for name, dtype in self.step.lists.items():
            shape = (
                () if name == "state_steps" else (blocks(count),) if "scale" in name else (count,)
            )
            lists.append([torch.zeros(shape, dtype=dtype or torch.bfloat16, device="cuda")])
        places = torch.tensor([0, 2**30 + 1, 2**31 - 1, 2**31, count - 1], device="cuda")
        lists[1][0][places] = torch.tensor([1.0, 2.0, -3.0, 4.0, -5.0], device="cuda").bfloat16()
        self.call(lists)
        stepped = lists[0][0]
        assert torch.equal(stepped[places].sign().float(), -lists[1][0][places].sign().float())
        assert sum(int(part.count_nonzero()) for part in stepped.split(2**28)) == len(places)

    @pytest.mark.gpu
    @pytest.mark.usefixtures("two_gpus")
    def test_cuda_second_gpu(self):
        lists, expected = self.lists("cuda:1"), self.lists("cuda:0")
        self.call(lists)
        self.call(expected)
        assert_lists_close(
            [[tensor.to("cuda:0") for tensor in tensors] for tensors in lists], expected
        )

    @pytest.mark.gpu
    def test_cuda_parameters_on_cpu_and_gpu_in_one_group(self):
        params = [
            torch.nn.Parameter(torch.ones(5000, device=device))
            for device in ("cpu", "cuda", "cpu", "cuda")
        ]
        optimizer = self.optimizer(params, lr=0.1)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        for param in params[1:]:
            torch.testing.assert_close(param.detach().cpu(), params[0].detach())


class TorchStepContract(StepContract):
    """For an optimizer that ``torch.optim`` has, too: it is used like that one."""

    oracle: ClassVar[Any]
    """torch's class."""
    torch_options: ClassVar[list[dict[str, Any]]]
    """Options of both classes: each alone, and the ones that meet in one line of the formula
    together."""

    def both(
        self, device: str, options: dict[str, Any], **changes: Any
    ) -> list[tuple[list[torch.nn.Parameter], Any]]:
        """Ours and torch's, each with the same parameters of its own."""
        pairs = []
        for kind in (self.step.optimizer, self.oracle):
            params = make_params(device, **changes)
            pairs.append((params, kind(params, lr=0.05, **options)))
        return pairs

    @ON_BOTH
    def test_torch_after_many_steps(self, device):
        for options in self.torch_options:
            (params, optimizer), (expected, oracle) = self.both(device, options)
            step_alike(20, (params, optimizer), (expected, oracle))
            for left, right in zip(params, expected, strict=True):
                torch.testing.assert_close(
                    left,
                    right,
                    rtol=1e-5,
                    atol=5e-6,
                    msg=lambda text, options=options: f"{options}: {text}",
                )
                state, wanted = optimizer.state[left], oracle.state[right]
                assert set(state) == set(wanted)
                for name in wanted:
                    torch.testing.assert_close(
                        state[name],
                        wanted[name],
                        rtol=1e-5,
                        atol=1e-5,
                        check_dtype=False,
                        check_device=False,
                    )

    @ON_BOTH
    @pytest.mark.parametrize("first", ["ours", "theirs"])
    def test_torch_state_dicts_load_both_ways(self, first, device):
        kinds: list[Any] = (
            [self.step.optimizer, self.oracle]
            if first == "ours"
            else [self.oracle, self.step.optimizer]
        )
        for options in self.torch_options:
            (params, _), (expected, oracle) = self.both(device, options)
            optimizer = kinds[0](params, lr=0.05, **options)
            for step in range(6):
                if step == 3:
                    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
                    optimizer = kinds[1](params, lr=1.0)
                    optimizer.load_state_dict(saved)
                for each, stepper in ((params, optimizer), (expected, oracle)):
                    set_grads(each, seed=step)
                    stepper.step()
            for left, right in zip(params, expected, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)

    def test_torch_class_can_be_replaced(self):
        params = make_params("cpu")
        assert isinstance(self.step.optimizer(params), self.oracle)
        ours, theirs = (
            inspect.signature(kind).parameters for kind in (self.step.optimizer, self.oracle)
        )
        for name, parameter in theirs.items():
            assert ours[name].kind == parameter.kind, name
            assert ours[name].default == parameter.default, name
        positional = [
            name
            for name, parameter in theirs.items()
            if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        ]
        assert list(ours)[: len(positional)] == positional
        for flag in {"foreach", "maximize", "capturable", "fused"} & set(theirs):
            self.step.optimizer(params, **{flag: True})
        self.step.optimizer(
            [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "weight_decay": 0.3}],
            lr=torch.tensor(0.1),
        )
        with pytest.raises(ValueError, match="differentiable=True is not supported"):
            self.step.optimizer(params, differentiable=True)

    def test_torch_rejects_the_same_options(self):
        flags = [
            flag
            for flag in ("foreach", "fused", "capturable", "maximize")
            if flag in inspect.signature(self.oracle).parameters
        ]
        for values in itertools.product((False, True), repeat=len(flags)):
            for lr in (0.1, torch.tensor(0.1)):
                outcomes = []
                for kind in (self.step.optimizer, self.oracle):
                    try:
                        kind(make_params("cpu"), lr=lr, **dict(zip(flags, values, strict=True)))
                        outcomes.append(None)
                    except (RuntimeError, ValueError) as error:
                        outcomes.append((type(error), str(error)))
                assert outcomes[0] == outcomes[1], (flags, values, lr)

    def test_torch_class_may_be_put_in_place_of_torchs(self, monkeypatch):
        monkeypatch.setattr(torch.optim, self.oracle.__name__, self.step.optimizer)
        params = make_params("cpu")
        optimizer = getattr(torch.optim, self.oracle.__name__)(params)
        step_alike(
            1, (params, pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))), (params, optimizer)
        )

    @ON_BOTH
    @pytest.mark.parametrize("unscale", [False, True])
    def test_torch_under_a_grad_scaler(self, unscale, device):
        results = []
        for params, optimizer in self.both(device, self.torch_options[1]):
            scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
            for step in range(6):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(step)
                scaler.scale(
                    sum(
                        (param * torch.randn(param.shape, generator=generator).to(device)).sum()
                        for param in params
                    )
                ).backward()
                if step == 3:
                    params[1].grad[0, 0] = float("inf")
                if unscale:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                scaler.step(optimizer)
                scaler.update()
            results.append((params, scaler.get_scale(), optimizer.state[params[0]]["step"].item()))
        assert results[0][1:] == results[1][1:]
        assert results[0][2] == 5
        for left, right in zip(results[0][0], results[1][0], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)

    def test_torch_unfused_leaves_unscaling_to_the_scaler(self):
        """Code that clips gradients in between, such as Lightning's, looks at torch's attribute
        first."""
        params = make_params("cpu", shapes=SHAPES[:5])
        fused, unfused = (
            self.step.optimizer(params),
            self.step.optimizer(params, lr=0.05, fused=False),
        )
        assert fused._step_supports_amp_scaling
        for optimizer in (unfused, copy.deepcopy(unfused)):
            assert not optimizer._step_supports_amp_scaling
        scaler, before = (
            torch.amp.GradScaler("cpu", init_scale=2.0**10),
            [param.detach().clone() for param in params],
        )
        for bad in (True, False):
            unfused.zero_grad()
            scaler.scale(sum(param.sum() for param in params)).backward()
            params[0].grad[0] *= float("inf") if bad else 1.0
            scaler.step(unfused)
            scaler.update()
            assert bad == all(map(torch.equal, params, before))
        expected = [torch.nn.Parameter(param) for param in before]
        oracle = self.oracle(expected, lr=0.05)
        for param in expected:
            param.grad = torch.ones_like(param)
        oracle.step()
        assert_params_close(params, expected)
