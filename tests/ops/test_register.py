"""What ``flexops/ops/_register.py`` gives every operator, on the operators that show it."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from penalty_cases import PENALTIES, PLAIN, PUBLIC, WITHOUT_GRADIENT
from processes import printed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flexops
import flexops.optim
from flexops import settings
from flexops.build.describe import catalog, families
from flexops.build.load import loader
from flexops.errors import NO_CODE, NativeUnavailableError
from flexops.ops import _register


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


PAIRS = {
    "rms_norm": (flexops.rms_norm, rms_norm),
    "layer_norm": (flexops.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "softmax": (flexops.scaled_masked_softmax, lambda x: x.softmax(-1)),
    "swiglu": (
        lambda x: flexops.swiglu(x),
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ),
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def _loss(function: Any) -> Any:
    return lambda x: (function(x) * torch.arange(function(x).shape[-1])).square().sum()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", PAIRS)
class TestTransforms:
    """torch.func's."""

    def test_vmap(self, name, x):
        ours, theirs = (torch.vmap(function)(x) for function in PAIRS[name])
        torch.testing.assert_close(ours, theirs)

    def test_vmap_of_what_requires_a_gradient(self, name, x):
        leaf = x.requires_grad_()
        ours, theirs = (
            torch.autograd.grad(_loss(torch.vmap(function))(leaf), leaf)[0]
            for function in PAIRS[name]
        )
        torch.testing.assert_close(ours, theirs)

    def test_gradients_of_each_sample(self, name, x):
        ours, theirs = (torch.vmap(torch.func.grad(_loss(function)))(x) for function in PAIRS[name])
        torch.testing.assert_close(ours, theirs)

    def test_second_and_forward_derivatives_are_rejected(self, name, x):
        loss = _loss(PAIRS[name][0])
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(loss, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
            PAIRS[name][0](forward_ad.make_dual(x, x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_is_around_a_transform_gets_its_gradient(x):
    """A tensor from outside, of another level than the one that is differentiated."""
    weight, gradients = torch.rand(8).requires_grad_(), []
    for function in PAIRS["rms_norm"]:
        inner = torch.func.grad(lambda y, function=function: (function(x, weight) * y).sum())(
            torch.ones(8)
        )
        gradients.append(torch.autograd.grad(inner.square().sum(), weight)[0])
    torch.testing.assert_close(*gradients)


REJECTED = (
    r"differentiate twice|must not require a gradient|has no gradient|written in place|torch\.func"
    r"|inplace must be False"
)


def penalized(
    function: Any, args: Any, positions: tuple[int, ...], squared: bool, asked: tuple[int, ...]
) -> Any:
    """The gradients, with respect to ``asked``, of the squares of ``positions`` and of their
    gradients; by torch.func if none are asked for."""

    def loss(*some: Tensor) -> Tensor:
        given = dict(zip(positions, some, strict=True))
        result = function(*(given.get(i, one) for i, one in enumerate(args)))
        return (result.square() if squared else result).sum()

    if not asked:
        numbers = tuple(range(len(positions)))

        def total(*some: Tensor) -> Any:
            firsts = torch.func.grad(loss, numbers)(*some)
            return sum(one.square().sum() for one in (*some, *firsts))

        return torch.func.grad(total, numbers)(*(args[i] for i in positions))
    leaves = {i: args[i].detach().clone().requires_grad_() for i in positions}
    value = loss(*leaves.values())
    if not value.requires_grad:
        return [args[i] * 2 for i in asked]
    firsts = torch.autograd.grad(value, [*leaves.values()], create_graph=True, allow_unused=True)
    penalty = sum(one.square().sum() for one in (*leaves.values(), *firsts) if one is not None)
    return torch.autograd.grad(
        penalty, [leaves[i] for i in asked], allow_unused=True, materialize_grads=True
    )


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.parametrize(
    ("name", "transforms"),
    [*((name, False) for name in PENALTIES), *((name, True) for name in PUBLIC)],
)
def test_a_gradient_penalty_is_right_or_rejected(name, transforms):
    """Whichever arguments require a gradient, and whichever are asked for. Where the loss is the
    sum of results, no gradient that comes in requires one."""
    function, *args = PENALTIES[name]
    plain, doubled = PLAIN.get(name), [one.double() for one in args]
    for positions in chain.from_iterable(
        combinations(range(len(args)), n + 1) for n in range(len(args))
    ):
        for squared, asked in product(
            (False, True), [()] if transforms else {positions, *((one,) for one in positions)}
        ):
            actual = attempted(penalized, function, args, positions, squared, asked)
            if isinstance(actual, Exception):
                assert re.search(REJECTED, str(actual)), actual
                continue
            assert plain, (positions, squared, asked)
            expected = penalized(plain, doubled, positions, squared, asked or positions)
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def attempted(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        return error


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_forward_mode_is_rejected_by_name(name):
    function, first, *args = PENALTIES[name]
    with forward_ad.dual_level():
        x = forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises((NotImplementedError, RuntimeError), match=r"flexops\."):
            function(x, *args)


def test_every_public_function_is_asked_for_a_penalty():
    ops = [name for name, module in flexops._PUBLIC.items() if module.startswith("ops.")]
    functions = {name for name in ops if name.islower() and not name.endswith("_")}
    assert functions == {name.split()[0] for name in PENALTIES} & functions | WITHOUT_GRADIENT


WRONG = {
    "layer_norm": lambda x: flexops.layer_norm(x, x[0, :5]),
    "add_rms_norm": lambda x: flexops.add_rms_norm(x, x[:, :5]),
    "rms_norm_quantized": lambda x: flexops.rms_norm_quantized(x, x[0, :5]),
    "bias_gelu": lambda x: flexops.bias_gelu(x, x[0, :5]),
    "swiglu": lambda x: flexops.swiglu(x, x[:, :5]),
    "scaled_masked_softmax": lambda x: flexops.scaled_masked_softmax(x, x[:, :5]),
    "rotary_embedding": lambda x: flexops.rotary_embedding(x[None, None], None, x[:, :4], x[:, :2]),
}


@pytest.mark.parametrize("name", WRONG)
def test_fake_tensors_are_rejected_in_the_same_words(name, x):
    with pytest.raises(ValueError, match=f"^flexops.{name}: ") as native:
        WRONG[name](x)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match=f"^flexops.{name}: ") as fake,
    ):
        WRONG[name](x)
    assert str(fake.value) == str(native.value)


def messages() -> dict[str, str]:
    """Of the errors that wrong calls raise."""
    found = {}
    for name, call in WRONG.items():
        with pytest.raises(ValueError) as error:
            call(torch.zeros(3, 8))
        found[name] = str(error.value)
    return found


def test_references_reject_in_the_same_words(tmp_path):
    """Where there is no native library."""
    code = """
import json, torch, flexops, test_register
flexops.swiglu(torch.ones(2))
print(json.dumps([test_register.messages(), [op.backend for op in flexops.status()]]))
"""
    without = {"FLEXOPS_JIT": "0", "FLEXOPS_CACHE_DIR": str(tmp_path), "FLEXOPS_FALLBACK": "allow"}
    without["PYTHONPATH"] = os.pathsep.join(sys.path)
    said, _ = printed(code, os.environ | without, Path(__file__).parent)
    found, backends = json.loads(said)
    assert set(backends) == {"reference", "unasked"}
    assert found == messages()


OPTIMIZERS = {
    name
    for name, value in vars(flexops.optim).items()
    if getattr(value, "__module__", "").startswith("flexops.optim.")
}
NO_NUMBERS = (
    "lr",
    "eps",
    "weight_decay",
    "lr_decay",
    "initial_accumulator_value",
    "max_norm",
    "min_8bit_size",
)
NO_OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NO_NUMBERS, ("1", [0.1])),
    "betas": ("ab", 0.9, None, (0.9,), (0.9, 0.9, 0.9), ("a", 0.9)),
    "copies": ("x", 3, [1]),
    "state_dtype": ("x", torch.int8),
}
"""What an option of an optimizer cannot be."""


@pytest.mark.parametrize("name", sorted(OPTIMIZERS - {"clip_grad_norm_"}))
def test_options_of_optimizers_that_are_none_are_named(name):
    kind = getattr(flexops.optim, name)
    taken = [option for option in inspect.signature(kind).parameters if option in NO_OPTIONS]
    assert {"lr", "weight_decay"} <= {*taken}
    for option in taken:
        for value in NO_OPTIONS[option]:
            with pytest.raises(
                (TypeError, ValueError), match=rf"flexops\.optim\.{name}: {option} must be"
            ):
                kind([torch.nn.Parameter(torch.ones(3))], **{option: value})


@pytest.mark.parametrize("name", sorted(OPTIMIZERS - {"clip_grad_norm_"}))
def test_flags_of_optimizers_are_what_python_takes_them_for(name):
    """As torch has it: a number, or a numpy.bool_ of a configuration."""
    kind, stepped = getattr(flexops.optim, name), []
    flags = [
        flag
        for flag in ("maximize", "amsgrad", "adapt", "stochastic_rounding")
        if flag in inspect.signature(kind).parameters
    ]
    for value in (True, 1, "x"):
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        kind([param], lr=0.125, **dict.fromkeys(flags, value)).step()
        stepped.append(param.tolist())
    assert stepped[0] == stepped[1] == stepped[2]
    assert (stepped[0] > [1.0]) == ("maximize" in flags)


FUNCTIONS = sorted(name for name, module in flexops._PUBLIC.items() if module.startswith("ops."))


def test_type_checkers_see_what_is_public():
    block = next(
        node
        for node in ast.parse(Path(flexops.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {
        alias.asname: node.module or alias.name for node in imports for alias in node.names
    } == flexops._PUBLIC


def test_bindings_register_what_is_defined():
    defined = {
        spec.name: {
            op.partition("::")[2].partition(".")[0] for op in _register._families[spec.name]
        }
        for spec in catalog.CATALOG
    }
    assert {spec.name: set(spec.ops) for spec in catalog.CATALOG} == defined


def test_operators_have_the_gradients_that_are_declared():
    """Autograd learns of them when flexops is imported, before the modules that have them are."""
    _register.supply_all()
    for name, (_, declared) in families.OPERATORS.items():
        op = _register.operator_of(f"flexops::{name}")
        assert _register.has_gradient(op) == declared.gradient, name


def test_an_operator_works_before_its_module_is_imported():
    code = """
import sys, torch, flexops

def imported():
    return sorted(name for name in sys.modules if name.startswith("flexops.ops."))

print(imported())
x = torch.arange(1.0, 5.0).view(2, 2).requires_grad_()
torch.ops.flexops.causal_softmax(x[None].expand(2, 2, 2) * 1, 1.0)[0, 1, 0].backward()
print(x.grad.tolist() != torch.zeros(2, 2).tolist(), "flexops.ops.softmax" in imported())
q = torch.ones(1, 4, 2, 8)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch.ops.flexops.attention(q, q, q)
print(counter.get_total_flops())
"""
    environment = os.environ | {"FLEXOPS_JIT": "0"}
    said, errors = printed(code, environment)
    assert said.splitlines() == [
        "['flexops.ops._declared', 'flexops.ops._register']",
        "True True",
        str(2 * 2 * 2 * 4 * 4 * 8),
    ], errors
    code = """
import torch.utils.flop_counter, flexops
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    print(torch.ops.flexops.quantize(torch.empty(4, 64), 8, 32, -1, True)[1].shape)
print(flexops.ops.norm.__name__, hasattr(flexops.ops, "absent"))
compiled = torch.compile(lambda x: flexops.rms_norm(x), fullgraph=True, backend="aot_eager")
print(compiled(torch.ones(2, 4, requires_grad=True)).requires_grad)
"""
    said, errors = printed(code, environment)
    assert said.splitlines() == [
        "torch.Size([4, 2, 1])",
        "flexops.ops.norm False",
        "True",
    ], errors


def test_an_operator_is_declared_in_one_place():
    """Its schema and its family; whatever else needs them asks for them by the operator's name."""
    schema = re.compile(rf"\b({'|'.join(map(re.escape, families.OPERATORS))})\(Tensor\b")
    package = Path(flexops.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if schema.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"build/describe/families.py"}


def test_the_page_of_operators_has_them_all():
    table = (
        (Path(__file__).parents[2] / "docs/operators.md")
        .read_text()
        .partition("| --- | --- |\n")[2]
        .partition("\n\n")[0]
    )
    told = {name.removeprefix("flexops.optim.") for name in re.findall(r"`([\w.]+)`", table)}
    assert (
        told
        == {name for name in FUNCTIONS if inspect.isroutine(getattr(flexops, name))} | OPTIMIZERS
    )


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name not in ("QuantizedTensor", "Int4Weight")]
)
def test_nothing_in_place_of_a_tensor_is_rejected_by_name(name):
    function = getattr(flexops, name)
    first, *rest = (
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    )
    others: dict[str, Any] = {"lr": 0.1, "max_norm": 1.0, "rho": 0.1, "k": 2}
    with pytest.raises(
        TypeError, match=rf"^flexops(\.|::){name}: {first.name} must be an? .*, got NoneType"
    ):
        function(
            None,
            **{parameter.name: others.get(parameter.name, torch.ones(3)) for parameter in rest},
        )


class Seen(TorchDispatchMode):
    """The names of the operators of flexops that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flexops":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_a_dispatch_mode_sees_what_was_called(name, x):
    """With a gradient it is another overload of the same operator; that every operator is the same
    one is in the contract."""
    args = (x, x.clone()) if name.startswith("add") else (x,)
    expected = getattr(flexops, name)(*args)
    with Seen() as seen:
        torch.testing.assert_close(getattr(flexops, name)(*args), expected, rtol=0, atol=0)
        getattr(flexops, name)(x.requires_grad_(), *args[1:])
    assert seen.names == [f"flexops::{name}", f"flexops::{name}.forward"]


def test_the_name_without_an_overload_is_the_operator_for_users(x):
    assert isinstance(torch.ops.flexops.rms_norm(x, None, 1e-6, 0.0), Tensor)
    assert set(torch.ops.flexops.rms_norm.overloads()) <= {"default", "forward"}


def test_without_what_torch_keeps_private():
    """Of each thing in ``_torch.py`` what stands in for it."""
    code = """
import importlib.util, sys, torch, torch._compile
private = "_AutoDispatchBelowAutograd", "_any_requires_grad", "_are_functorch_transforms_active", "_dispatch_has_kernel_for_dispatch_key"
places = {name: torch._C for name in private} | {"_disable_dynamo": torch._compile, "_is_compiling_flag": torch.compiler}
places["_current_level"] = torch.autograd.forward_ad
kept = {name: vars(place).pop(name) for name, place in places.items() if name in vars(place)}  # torch 2.4 has not all of them
spec = importlib.util.spec_from_file_location("flexops._torch", PATH)
sys.modules[spec.name] = _torch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_torch)
for name, thing in kept.items():
    vars(places[name])[name] = thing
import flexops.optim
taken = {id(thing) for name, thing in kept.items() if name not in ("_is_compiling_flag", "_current_level")}
assert not [name for name, thing in vars(_torch).items() if id(thing) in taken] and _torch.not_compiled is torch.compiler.disable

x, weight = torch.randn(3, 8, requires_grad=True), torch.nn.Parameter(torch.rand(8))
for ours, theirs in (
    (lambda: flexops.rms_norm(x, weight), lambda: torch.nn.functional.rms_norm(x, [8], weight, 1e-6)),
    (lambda: flexops.scaled_masked_softmax(x), lambda: x.softmax(-1)),
    (lambda: flexops.linear_cross_entropy(x, torch.eye(8), torch.arange(3)), lambda: torch.nn.functional.cross_entropy(x, torch.arange(3))),
):
    results = [(result, *torch.autograd.grad(result.square().sum(), x)) for result in (ours(), theirs())]
    torch.testing.assert_close(*results)
    with torch.no_grad():
        torch.testing.assert_close(ours(), theirs())
params = [torch.nn.Parameter(weight.detach().clone()) for _ in range(2)]
for param, kind in zip(params, (flexops.optim.AdamW, torch.optim.AdamW)):
    param.grad = torch.ones(8)
    kind([param]).step()
torch.testing.assert_close(*params)
assert {"cpu"} == {op.device for op in flexops.status() if op.backend in ("jit", "cache", "aot")}, flexops.status()
"""
    path = Path(flexops.__file__).parent / "_torch.py"
    printed(code.replace("PATH", repr(str(path))), os.environ)


def test_the_reference_stands_in_for_a_kernel_that_is_not_available(monkeypatch):
    """As under ``FLEXOPS_JIT=0``, where kernels that few calls launch are not compiled; on the CPU,
    whose kernel says here what a launch does."""
    library = torch.library.Library("flexops_standing", "FRAGMENT")
    library.define("twice(Tensor x, *, float by) -> Tensor")
    op = functools.partial(torch.ops.flexops_standing.twice.default, by=2.0)

    def native(x: Tensor, *, by: float) -> Tensor:
        if x.numel() == 3:
            raise RuntimeError(f"{NO_CODE} twice<odd> for a GPU of capability 9.0")
        if x.numel() == 5:
            raise RuntimeError("x is too long")
        return x * by

    library.impl("twice", native, "CPU")
    torch.library.register_fake(
        "flexops_standing::twice", lambda x, **_: torch.empty_like(x), lib=library
    )
    monkeypatch.setitem(_register._libraries, "flexops_standing", library)
    monkeypatch.setitem(_register._families, "standing", [op.func.name()])
    monkeypatch.setitem(_register.references, op.func.name(), lambda x, by: x * by + 100)
    _register._stand_in("standing", "CPU")
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
    # before torch 2.9 the kernel whose place another takes is not available: what is lacking is said
    if not hasattr(torch.library, "get_kernel"):
        with pytest.raises(RuntimeError, match="twice<odd>"):
            op(torch.ones(3))
        return
    with pytest.warns(loader.FallbackWarning, match="twice<odd>"):
        assert torch.equal(op(torch.ones(3)), torch.full((3,), 102.0))
    assert torch.equal(
        torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(3)),
        torch.full((3,), 102.0),
    )
    with pytest.raises(RuntimeError, match="too long"):
        op(torch.ones(5))
    forbidding = settings.current()._replace(fallback="forbid")
    monkeypatch.setattr(settings, "current", lambda: forbidding)
    with pytest.raises(NativeUnavailableError, match="twice<odd>"):
        op(torch.ones(3))


X, ROWS = torch.randn(4, 64), torch.zeros(4, dtype=torch.int64)
QUERY = torch.randn(1, 2, 8, 16)
TABLE = torch.ones(8, 8)
NOT_NUMBERS = {
    "scaled_dot_product_attention": ((QUERY, QUERY, QUERY, "a"), {}, "attn_mask must be a tensor"),
    "attention": ((QUERY, QUERY, QUERY), {"scale": "a"}, "scale must be a number or None, got str"),
    "attention(softcap)": ((QUERY, QUERY, QUERY), {"softcap": "a"}, "softcap must be a number"),
    "attention(softcaps)": ((QUERY, QUERY, QUERY), {"softcap": X[0]}, "softcap must be a number"),
    "attention(score_mod)": (
        (QUERY, QUERY, QUERY), {"score_mod": lambda s: s}, r"be a function of \(score, b, h, q, k\)"
    ),
    "attention_with_kvcache": ((QUERY,) * 3, {"softcap": "a"}, "softcap must be a number"),
    "attention_with_kvcache(num_splits)": (
        (QUERY,) * 3, {"num_splits": "a"}, "num_splits must be a whole number, got 'a'"
    ),
    "gated_rms_norm": ((X, X), {"groups": "a"}, "groups must be a whole number, got 'a'"),
    "gated_rms_norm(eps)": ((X, X), {"eps": "a"}, "eps must be a number, got str"),
    "linear_logprobs": ((X, X, ROWS), {"chunk_size": "a"}, "chunk_size must be a whole number"),
    "quantize": ((X,), {"dim": "a"}, "dim must be a whole number, got 'a'"),
    "quantize(symmetric)": ((X,), {"symmetric": "a"}, "symmetric must be True or False, got str"),
    "cross_entropy": ((X, ROWS), {"ignore_index": "a"}, "ignore_index must be a whole number"),
    "cross_entropy(z_loss)": ((X, ROWS), {"z_loss": "a"}, "z_loss must be a number, got 'a'"),
    "linear_cross_entropy": ((X, X, ROWS), {"softcap": "a"}, "softcap must be a number, got 'a'"),
    "logprobs": ((X, ROWS), {"temperature": "a"}, "temperature must be a number, got 'a'"),
    "logprobs(softcap)": ((X, ROWS), {"softcap": "a"}, "softcap must be a number, got 'a'"),
    "route_tokens": ((X, 2.5), {}, "k must be a whole number, got float"),
    "rotary_embedding": (
        (QUERY, QUERY, TABLE, TABLE), {"interleaved": "a"}, "interleaved must be True or False"
    ),
    "lion_": (([X], [X], [X]), {"lr": 0.1, "beta1": "a", "beta2": 0.9, "weight_decay": 0.0},
              "beta1 must be a number, got 'a'"),
    "lion_(lr)": (([X], [X], [X]), {"lr": "a"}, "lr must be a number, got 'a'"),
    "grad_norm": (([X],), {"norm_type": "a"}, "norm_type must be a number, got 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("call", NOT_NUMBERS)
@pytest.mark.parametrize("differentiable", [False, True])
def test_what_is_no_number_is_named(call, differentiable):
    name = call.partition("(")[0]
    args, options, said = NOT_NUMBERS[call]
    first, *rest = args
    if differentiable and isinstance(first, Tensor):
        first = first.clone().requires_grad_()
    with pytest.raises(TypeError, match=rf"^flexops\.{name}: .*{said}"):
        getattr(flexops, name)(first, *rest, **options)


@pytest.mark.parametrize("cap", [-1.0, torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("attention", (QUERY,) * 3),
        ("attention_with_kvcache", (QUERY,) * 3),
        ("linear_cross_entropy", (X, X, ROWS)),
        ("linear_logprobs", (X, X, ROWS)),
        ("logprobs", (X, ROWS)),
    ],
)
def test_soft_caps_that_the_formula_and_kernels_read_differently(name, args, cap):
    with pytest.raises(ValueError, match=rf"^flexops\.{name}: softcap must be finite and greater"):
        getattr(flexops, name)(*args, softcap=cap)


def test_importing_collects_no_garbage_and_leaves_the_collector_as_it_was():
    code = """
import gc, os, torch
gc.collect()  # what is due after torch's import is not ours
for collects in (True, False):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    gc.enable() if collects else gc.disable()
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
    import flexops
    assert gc.isenabled() == collects and 2 not in seen, (gc.isenabled(), seen)
    break
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1200)


def test_importing_leaves_to_the_first_call_what_it_alone_needs():
    code = """
import sys, torch, flexops
late = "flexops.build.load.loader", "flexops.build.describe.schema", "flexops.settings"
assert not {*late} & {*sys.modules}, {*late} & {*sys.modules}
assert torch.ops.flexops.rms_norm.default and torch.ops.flexops.rms_norm_plain.default
flexops.bias_relu2(torch.ones(2, 8), torch.ones(8))
assert late[0] in sys.modules
"""
    printed(code, os.environ)


def test_a_compiled_call_asks_for_native_kernels():
    """Though what answers is imported inside. The first answer is not the compiler's to trace."""
    _register.has_native("grouped_linear", "cpu")
    ask = torch.compile(
        lambda x: x + _register.has_native("grouped_linear", "cpu"), fullgraph=True, backend="eager"
    )
    assert torch.equal(ask(torch.zeros(2)), torch.zeros(2))


def test_a_refusal_is_shown_once():
    """And not as an error during another one that says the same."""
    with pytest.raises(TypeError, match="rms_norm: ") as error:
        flexops.rms_norm(torch.ones(2, 8, dtype=torch.int32), torch.ones(8))
    assert (
        "".join(traceback.format_exception(error.value)).count("Traceback (most recent call last)")
        == 1
    )


def test_forward_mode_is_an_error_that_names_the_function_and_the_way():
    x, weight = torch.randn(5, 8), torch.ones(8)
    said = (
        r"flexops.rms_norm has no derivative in forward mode .*: use reverse mode: torch.func.vjp"
    )
    with pytest.raises(NotImplementedError, match=said):
        torch.func.jvp(lambda x: flexops.rms_norm(x, weight), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=said):
        flexops.rms_norm(forward_ad.make_dual(x, x), weight)
