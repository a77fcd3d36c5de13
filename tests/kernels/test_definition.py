"""``flexops.kernel``: what is read from a source, what its parameters get, and what is wrong with a
definition. Compiles nothing."""

from __future__ import annotations

import ctypes
import struct
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.errors import FlexopsError, NativeUnavailableError
from flexops.kernels import launch
from flexops.kernels.signature import ELEMENTS, Parameter, TemplateParameter, kernels

SCALE = """
template <typename T> __global__ void scale(const T* x, T* out, float factor, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * factor);
}"""
SCHEMA = "scale(Tensor x, float factor) -> Tensor"


def define(source: str = SCALE, schema: str = SCHEMA, **options: Any) -> flexops.Kernel:
    return flexops.kernel(source, schema, **options)


def refusal(source: str = SCALE, schema: str = SCHEMA, **options: Any) -> str:
    with pytest.raises(FlexopsError) as caught:
        define(source, schema, **options)
    return str(caught.value)


def test_what_a_source_says_of_its_kernels():
    source = """
    // __global__ void no(int a) {}
    #define KERNEL __global__ void nor(int a)
    namespace mine { namespace inner {
    struct Pair { float a, b; };
    template <typename T, int N = 4, bool kLast = (1 > 0)>
    __global__ void __launch_bounds__(256, (2 + 1)) first(const T* __restrict__ x, flexops::bf16* out, unsigned long long n, float const y[], Pair* pairs) {}
    }  // inner
    extern "C" __global__ void second() { const char* text = "__global__ void third(int a)"; }
    }
    static __global__ void last(void) {}
    """
    first, second, last = kernels(source)
    assert (first.name, second.name, last.name) == ("mine::inner::first", "mine::second", "last")
    assert first.template == (
        TemplateParameter("T", "typename", False),
        TemplateParameter("N", "int", True),
        TemplateParameter("kLast", "bool", True),
    )
    assert first.parameters == (
        *(
            Parameter("x", "T", True, const=True),
            Parameter("out", "bf16", True),
            Parameter("n", "unsigned long long", False),
        ),
        *(Parameter("y", "float", True, const=True), Parameter("pairs", "Pair", True)),
    )
    assert (second.parameters, last.parameters, second.template) == ((), (), ())
    assert (first.line, first.bounds, second.bounds) == (7, "256", "")


def test_attributes_forward_declarations_and_pointers_to_pointers():
    source = """
    template <typename T> __global__ void first(const T*, int);
    template <typename T> struct Other { T x; };
    __global__ void second(const float* const* lists, float* one);
    template <typename T>
    __launch_bounds__(256) __global__ void first(const T* x, int n) {}
    __global__ void second(const float* const* lists, float* one) {}
    """
    first, second = kernels(source)
    assert (first.template, first.parameters[0], first.line) == (
        (TemplateParameter("T", "typename", False),),
        Parameter("x", "T", True, const=True),
        6,
    )
    assert (second.template, second.line) == ((), 7)
    assert second.parameters[0].type not in ELEMENTS  # addresses: a tensor of int64, say
    assert second.parameters[1] == Parameter("one", "float", True)


def test_parameters_lie_where_cpp_has_them():
    """A pointer, a char, a double, a short and an int: as struct { void* a; char b; double c; short
    d; int e; }."""
    format_ = launch.layout(["Q", "b", "d", "h", "i"])
    packed = struct.pack(format_, *(0,) * 10, 1, 2, 3.0, 4, 5)
    config = struct.calcsize("=" + launch.CONFIG)
    assert config == 56
    assert struct.unpack_from("<Q b 7x d h 2x i", packed, config) == (1, 2, 3.0, 4, 5)


def test_an_op_is_registered_and_its_results_are_known_without_a_kernel():
    scale = define()
    assert scale.op is torch.ops.flexops_kernels.scale.default
    made = scale(torch.empty(3, 4, dtype=torch.bfloat16, device="meta").t(), 2.0)
    assert (made.shape, made.dtype, made.is_contiguous(), made.device.type) == (
        (4, 3),
        torch.bfloat16,
        True,
        "meta",
    )
    with torch._subclasses.FakeTensorMode():
        assert scale(torch.empty(5, device="cuda"), factor=2.0).shape == (5,)
    assert scale.expression(torch.empty(3, dtype=torch.float16), 2.0) == "scale<float16>"


def test_the_reference_serves_the_cpu_and_torchs_own_checks():
    def reference(x: Tensor, factor: float) -> Tensor:
        return x * factor

    scale = define(
        reference=reference, schema="unit_kernels::scale(Tensor x, float factor=2.0) -> Tensor"
    )
    x = torch.randn(4)
    assert torch.equal(scale(x), x * 2)
    assert torch.equal(scale(x, factor=3.0), x * 3)
    assert torch.equal(torch.ops.unit_kernels.scale(x), x * 2)
    torch.library.opcheck(scale.op, (x, 2.0))
    assert torch.equal(
        torch.compile(lambda x: scale(x, 2.0) + 1, fullgraph=True, backend="aot_eager")(x),
        x * 2 + 1,
    )


def test_written_arguments_and_a_gradient():
    source = "__global__ void axpy(float* y, const float* x, float a, int n) {}"
    axpy = define(
        source,
        "axpy(Tensor(a!) y, Tensor x, float a) -> ()",
        reference=lambda y, x, a: y.add_(x, alpha=a),
    )
    y, x = torch.ones(3), torch.ones(3)
    assert axpy(y, x, 2.0) is None
    assert torch.equal(y, torch.full((3,), 3.0))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor, ctx.shape = inputs[1], output.shape

    scale = define(
        schema="unit_kernels::scale_with_gradient(Tensor x, float factor) -> Tensor",
        name="scale",
        reference=lambda x, factor: x * factor,
        backward=lambda ctx, grad: (grad * ctx.factor * torch.ones(ctx.shape), None),
        setup_context=setup,
    )
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: scale(x, 3.0), (x,))
    assert torch.equal(
        torch.autograd.grad(
            torch.compile(scale, fullgraph=True, backend="aot_eager")(x, 3.0).sum(), x
        )[0],
        torch.full_like(x, 3.0),
    )


def test_several_results_by_a_function():
    source = (
        "template <typename T> __global__ void stats(const T* x, float* mean, float* out1, int64_t"
        " rows, int64_t x_size1) {}"
    )
    stats = define(
        source,
        "stats(Tensor x) -> (Tensor mean, Tensor)",
        args={"rows": lambda x: x.shape[0]},
        grid=lambda x: x.shape[0],
        out=lambda x: (
            x.new_empty(x.shape[0], dtype=torch.float32),
            x.new_empty(x.shape[0], dtype=torch.float32),
        ),
    )
    mean, rest = stats(torch.empty(4, 5, dtype=torch.bfloat16, device="meta"))
    assert (mean.shape, mean.dtype, rest.shape) == ((4,), torch.float32, (4,))
    assert stats.expression(torch.empty(4, 5).double()) == "stats<double>"
    with pytest.raises(TypeError, match=r"mean must be float32 \(float\*\), got float64"):
        define(
            source,
            "stats(Tensor x) -> (Tensor mean, Tensor)",
            args={"rows": 1},
            out=lambda x: (x, x),
        ).expression(torch.empty(4, 5).double())


def test_a_cell_that_is_run_again_changes_what_its_operator_does():
    compiled = torch.compile(lambda x: torch.ops.flexops_kernels.scale(x, 2.0), backend="eager")
    define(reference=lambda x, factor: x * factor)
    assert compiled(torch.ones(1)).item() == 2
    define(reference=lambda x, factor: x * factor + 1)
    assert compiled(torch.ones(1)).item() == 3
    other = define(
        schema="scale(Tensor x, float factor, int twice=1) -> Tensor",
        reference=lambda x, factor, twice: x * factor * twice,
    )
    assert other(torch.ones(1), 2.0, 3).item() == 6


def test_another_modules_operator_is_not_replaced():
    define()
    namespace = {"flexops": flexops, "SCALE": SCALE, "SCHEMA": SCHEMA, "__name__": "other.module"}
    with pytest.raises(
        FlexopsError, match="there is an operator flexops_kernels::scale already"
    ) as caught:
        exec("flexops.kernel(SCALE, SCHEMA)", namespace)
    assert __name__ in str(caught.value)
    assert 'a namespace of your own: "other::scale(' in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"schema": "scale(Tensor x, float factor -> Tensor"},
            ["the schema cannot be read", "such as: scale(Tensor x"],
        ),
        ({"schema": "scale(float factor) -> Tensor"}, ["no argument that is a Tensor"]),
        (
            {"schema": "scale(Tensor(a!) x, float factor) -> Tensor(a!)"},
            ["a result that is an argument"],
        ),
        ({"schema": "scale(Tensor x, float factor) -> float"}, ["a result float"]),
        (
            {"schema": "other(Tensor x, float factor) -> Tensor"},
            ["scale (line 2)", "one kernel called other", "name="],
        ),
        (
            {"schema": "scale(Tensor x) -> Tensor"},
            ["the parameter factor of scale (line 2)", "x, out", "args={'factor': lambda x: ...}"],
        ),
        (
            {"schema": "scale(Tensor x, Tensor factor) -> Tensor"},
            ["a tensor, whose pointer it would be"],
        ),
        ({"args": {"m": 1}}, ["args names m", "x, out, factor, n"]),
        ({"template": {"U": "float"}}, ["template names U", "scale: T"]),
        ({"grid": lambda y: y}, ["for grid asks for y", "x, factor, out"]),
        ({"out": "y"}, ["out is 'y'", "one of x"]),
        ({"block": "many"}, ["block is 'many'"]),
        (
            {
                "source": (
                    "template <int N> __global__ void scale(const float* x, float* out, float"
                    " factor) {}"
                )
            },
            ["the template's int N", "template={'N': ...}"],
        ),
        (
            {"source": "__global__ void scale(const float* x, float* out, Pair factor) {}"},
            ["the parameter Pair factor cannot be passed by value"],
        ),
        ({"source": "void scale(float* x) {}"}, ["no __global__ function"]),
        (
            {"schema": "scale(Tensor x, float lambda) -> Tensor"},
            ["an argument called lambda", "no word of Python"],
        ),
        ({"schema": "scale(Tensor x, float await) -> Tensor"}, ["an argument called await"]),
        ({"schema": "scale(Tensor x, float _op) -> Tensor"}, ["no name that begins with _"]),
        (
            {"schema": "scale(Tensor x, float größe) -> Tensor"},
            ["the schema cannot be read", "names are of ASCII letters"],
        ),
        (
            {"schema": "scale(Tensor x, float factor=1e999) -> Tensor"},
            ["the schema cannot be read", "a number that no double holds"],
        ),
        (
            {"schema": "scale(Tensor x, int factor=99999999999999999999) -> Tensor"},
            ["a number that no int64_t holds"],
        ),
        (
            {"schema": "scale.out(Tensor x, float factor, Tensor(a!) out) -> ()"},
            ["an overload: flexops_kernels::scale.out", "without a dot"],
        ),
        (
            {"schema": "aten::scale(Tensor x, float factor) -> Tensor"},
            ["the namespace aten", "mylib::name"],
        ),
        (
            {"schema": "scale(Tensor x, float template) -> Tensor"},
            ["an argument called template", "no word of C++"],
        ),
        (
            {"source": SCALE.replace("const T* x", "T* x")},
            ["T* x is not const, but x is only read", "Tensor(a!) x", "write const T* x"],
        ),
        (
            {"source": SCALE.replace("T* out", "const T* out")},
            ["const T* out is const", "a result"],
        ),
        (
            {"source": SCALE.replace("x, T*", "x T*")},
            ["T x T * out among the parameters of scale (line 2)", "add the missing comma"],
        ),
        ({"source": SCALE[:-1]}, ["{ in line 2, which is never closed"]),
        ({"source": SCALE.replace("x[i])", "x[i]]")}, ["] in line 4, but ( of line 4 is open"]),
        (
            {
                "source": SCALE.replace("typename T>", "typename T, int factor>").replace(
                    "float factor, ", ""
                )
            },
            ["the template's int factor and the argument float factor", "an int or a bool"],
        ),
        (
            {
                "source": SCALE.replace("typename T>", "typename T, int kWidth>"),
                "template": {"kWidth": 2.5},
            },
            ["the template's int kWidth cannot be 2.5", "a whole number that int holds"],
        ),
        (
            {"source": SCALE.replace("float factor", "int factor")},
            ["the parameter int factor receives the argument float factor", "int in the schema"],
        ),
        (
            {"schema": "scale(Tensor x, str factor) -> Tensor"},
            ["the parameter float factor receives the argument str factor", "args={...}"],
        ),
        ({"grid": (1, 70000)}, ["grid (1, 70000, 1)", "grid y from 0 to 65535"]),
        ({"grid": (0, 2)}, ["grid (0, 2, 1), which launches nothing"]),
        ({"grid": (1, 2, 3, 4)}, ["grid is (1, 2, 3, 4)", "up to three"]),
        ({"block": 2048}, ["block x from 1 to 1024"]),
        ({"block": (64, 32)}, ["which is 2048 threads", "at most 1024 threads"]),
        (
            {"source": SCALE.replace("void", "void __launch_bounds__(128)")},
            ["which is 256 threads", "at most 128, as the kernel's __launch_bounds__(128) says"],
        ),
        ({"shared": -1}, ["shared -1"]),
        ({"reference": 3}, ["reference is 3", "a function"]),
        ({"backward": 3}, ["backward is 3", "a function"]),
        ({"setup_context": print}, ["setup_context without backward"]),
        ({"args": ["factor"]}, ["args is ['factor']", "a mapping of names"]),
        ({"constants": [1.0]}, ["constants is [1.0]", "a mapping of names"]),
        ({"constants": {"float": [1.0]}}, ["constants cannot hold float"]),
        ({"candidates": 5}, ["candidates is 5", "a list of mappings"]),
        ({"candidates": [{"args": 5}]}, ["args is 5", "a mapping of names"]),
        ({"candidates": [{}], "candidate": "0"}, ["candidate is '0'", "a number"]),
        ({"steps": "scale"}, ["steps is 'scale'", "a list of mappings"]),
        ({"options": "-G"}, ["options is '-G'", "a list: ['-G']"]),
        ({"include": "."}, ["include is '.'", "a list: ['.']"]),
        ({"options": [3]}, ["options is [3]", "a list of text"]),
        ({"include": [3]}, ["include is [3]", "a list of paths"]),
        ({"cooperative": "yes"}, ["cooperative is 'yes'", "True or False"]),
        ({"include": ["nowhere"]}, ["include names nowhere", "directories that exist"]),
        ({"shared": "48K"}, ["shared is '48K'", "a number of bytes"]),
        ({"cluster": (4, 8)}, ["cluster is (4, 8)", "at most 16"]),
        ({"schema": f"{'a' * 250}(Tensor x, float factor) -> Tensor"}, ["at most 150"]),
    ],
)
def test_a_definition_whose_parts_do_not_fit_is_refused_in_words(options, said):
    text = refusal(**options)
    for part in said:
        assert part in text


@pytest.mark.parametrize("name", ["self", "run", "print", "values"])
def test_an_argument_may_have_the_name_of_a_part_of_the_call(name):
    schema = f"scale(Tensor x, float {name}) -> Tensor"
    source = SCALE.replace("factor", name)
    scale = define(source, schema, reference=lambda *args: args[0] * args[1])
    assert scale(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
    assert scale(torch.ones(2), **{name: 3.0}).tolist() == [3.0, 3.0]


def test_two_tensors_of_one_type_must_agree():
    source = (
        "template <typename T, int N, bool causal> __global__ void add(const T* x, const T* y, T*"
        " out, int n) {}"
    )
    add = define(
        source,
        "add(Tensor x, Tensor y, bool causal) -> Tensor",
        template={"N": lambda x: x.shape[0]},
    )
    assert add.expression(torch.empty(3), torch.empty(3), True) == "add<float, 3, true>"
    with pytest.raises(
        TypeError, match=r"add: y must be float32 like x \(both are T\*\), got bfloat16"
    ):
        add.expression(torch.empty(3), torch.empty(3).bfloat16(), True)


def test_a_templates_value_has_its_kind():
    source = "template <int N, bool causal> __global__ void add(const float* x, float* out) {}"
    for n, causal, said in (
        (2.5, True, "int N cannot be 2.5: a whole number that int holds"),
        (2**31, True, "int N cannot be 2147483648"),
        (torch.float32, True, "int N cannot be torch.float32"),
        (2, 5, "bool causal cannot be 5: True or False"),
    ):
        template = {"N": n, "causal": causal}
        with pytest.raises(FlexopsError, match=rf"add: the template's {said}"):
            define(source, "add(Tensor x) -> Tensor", template=template)
    template["N"] = lambda x: x.shape[0] / 2
    add = define(source, "add(Tensor x) -> Tensor", template=template | {"causal": True})
    with pytest.raises(TypeError, match=r"add: the template's int N cannot be 1\.5"):
        add.expression(torch.empty(3))


def test_tensors_that_are_missing_or_elsewhere():
    source = "__global__ void add(const float* x, const float* y, float* out, int n) {}"
    add = define(source, "add(Tensor x, Tensor y) -> Tensor", reference=lambda x, y: x + y)
    x = torch.ones(3)
    for call in (add, add.op):
        with pytest.raises(TypeError, match=r"add: x must be a tensor, got None"):
            call(None, x)
        with pytest.raises(ValueError, match=r"add: y must be on the device of x, cpu, got meta"):
            call(x, x.to("meta"))


def test_what_out_returns_is_verified():
    source = "__global__ void pair(const float* x, float* one, float* two) {}"
    schema = "pair(Tensor x) -> (Tensor one, Tensor two)"
    for out, found in (
        (lambda: None, "NoneType"),
        (lambda x: x.new_empty(2, 3), "Tensor"),
        (lambda x: (x, 1), "Tensor, int"),
    ):
        pair = define(source, schema, out=out)
        with pytest.raises(TypeError, match=f"pair: out must return one, two, got {found}"):
            pair(torch.ones(3, device="meta"))
    one = define(out=lambda x: (x,))
    with pytest.raises(TypeError, match=r"scale: out must return out, got Tensor"):
        one(torch.ones(3, device="meta"), 2.0)


def test_a_factory_and_several_steps_that_do_not_fit():
    ramp = "__global__ void ramp(float* out, int n) {}"
    with pytest.raises(FlexopsError, match="required: a function that returns the result"):
        define(ramp, "ramp(int n, *, Device device) -> Tensor")
    source = "__global__ void first(float* room) {}"
    for workspace, steps, said in (
        ({"x": torch.empty_like}, [{"name": "first"}], "a workspace called x"),
        ({"room": torch.empty_like}, [{"grid": 1}], "a step with grid"),
    ):
        with pytest.raises(FlexopsError, match=said):
            define(source, "both(Tensor x) -> Tensor", workspace=workspace, steps=steps)
    both = define(
        source, "both(Tensor x) -> Tensor", workspace={"room": 3}, steps=[{"name": "first"}]
    )
    with pytest.raises(TypeError, match=r"both: the workspace room must be a tensor.*got int"):
        both.expression(torch.ones(3))


def test_without_a_reference_other_devices_are_refused():
    with pytest.raises(NativeUnavailableError, match="a kernel for GPUs only"):
        define()(torch.ones(1), 2.0)
    with pytest.raises(TypeError, match="factor"):
        define()(torch.ones(1))


@pytest.mark.parametrize(
    "options",
    [{}, {"block": (32, 4)}, {"block": lambda: 128}],
    ids=["default", "two dimensions", "function"],
)
def test_a_call_with_tensors_of_a_known_shape_launches_what_the_first_did(
    options,
):
    """The Python of a call with the driver stood in for: grid, block, pointers and numbers of every
    launch; twice, for what is remembered of the first."""
    code = define(schema="again(Tensor x, float factor) -> Tensor", name="scale", **options)._code
    launched: list[tuple[Any, ...]] = []
    unpack = struct.Struct(launch.layout(code.bound.letters))

    def record(
        config: ctypes.c_void_p, kernel: int, parameters: None, extra: ctypes.c_void_p
    ) -> int:
        assert (parameters, bool(extra)) == (None, True)
        launched.append((kernel, *unpack.unpack(ctypes.string_at(config, unpack.size))))
        return 0

    def prepare(key: tuple[Any, ...], *_: Any) -> int:
        code.names["_kernels"][key] = len(code.names["_kernels"]) + 1
        return len(code.names["_kernels"])

    allocate = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    code.names |= {
        "_launch": record,
        "_prepare": prepare,
        "_current_device": lambda: -1,
        "_stream": lambda _: 7,
        "_empty_strided": allocate,
    }
    exec(code.bound.text.replace(".is_cuda", ".is_cpu"), code.names)
    call = code.names["__call__"]
    whole = torch.ones(40, 30)
    for x in (
        torch.ones(7),
        whole,
        whole.double(),
        whole[:, ::2],
        torch.ones(30, 40),
        torch.ones(()),
    ):
        for factor in (2.0, 3.0):
            out = call(None, x, factor)
            assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, x.dtype, True)
            kernel, grid, *dimensions, stream, attributes, count, pointer, result, given, n = (
                launched.pop()
            )
            assert kernel == 1 + (x.dtype == torch.float64)
            assert (n, result, given) == (x.numel(), out.data_ptr(), factor)
            assert grid == -(-n // (128 if options else 256))
            assert dimensions == [
                1,
                1,
                *(
                    (32, 4, 1)
                    if isinstance(options.get("block"), tuple)
                    else (128 if options else 256, 1, 1)
                ),
                0,
            ]
            assert (stream, attributes, count) == (7, 0, 0)
            assert (pointer == x.data_ptr()) == x.is_contiguous()
        assert call(None, torch.ones(0, 3), 2.0).shape == (0, 3)
        assert not launched


NO_GRADIENT = r"has no gradient: call it under torch.no_grad\(\), or on detached tensors"
FILL = "template <typename T> __global__ void fill(T* y, float value, int64_t n) { y[0] = value; }"


def test_a_kernel_without_a_backward_has_no_gradient_in_eager_and_in_compiled_calls():
    """torch would differentiate the reference in eager calls, and give None in compiled ones."""
    scale = define(
        schema="no_gradient::scale(Tensor x, float factor) -> Tensor",
        reference=lambda x, factor: x * factor,
    )
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        scale(x, 2.0).sum().backward()
    with pytest.raises(Exception, match=NO_GRADIENT):
        torch.compile(lambda x: scale(x, 2.0), fullgraph=True, backend="aot_eager")(
            x
        ).sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert scale(x, 2.0).tolist() == [2.0, 2.0, 2.0]
    assert scale(x, 2.0).tolist() == [2.0, 2.0, 2.0], "nothing asks for a gradient"


def test_a_kernel_that_writes_has_no_gradient_in_eager_and_in_compiled_calls():
    fill = define(
        FILL,
        "no_gradient::fill(Tensor(a!) y, float value) -> ()",
        reference=lambda y, value: y.fill_(value),
    )
    x = torch.ones(3, requires_grad=True)

    def filled(x: Tensor) -> Tensor:
        y = x * 2
        fill(y, 5.0)
        return y

    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        filled(x)
    with pytest.raises(Exception, match=NO_GRADIENT):
        torch.compile(filled, fullgraph=True, backend="aot_eager")(x)
    with torch.no_grad():
        assert filled(x).tolist() == [5.0, 5.0, 5.0]
        compiled = torch.compile(filled, fullgraph=True, backend="aot_eager")
        assert compiled(x).tolist() == [5.0, 5.0, 5.0]
    saved = x * 2
    loss = saved.square().sum()
    fill(saved.detach(), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for results in ("()", "Tensor"):
        schema = f"no_gradient::fill(Tensor(a!) y, float value) -> {results}"
        said = refusal(FILL, schema, backward=lambda *_: None)
        assert "writes its arguments, which has no gradient here" in said


def test_a_gradient_may_be_given_later_and_taken_back():
    """As a notebook's cell that is run again: the operator is the same one."""

    def again(**options: Any) -> flexops.Kernel:
        return define(
            schema="no_gradient::again(Tensor x, float factor) -> Tensor",
            name="scale",
            reference=lambda x, factor: x * factor,
            **options,
        )

    x = torch.ones(3, requires_grad=True)
    first = again()
    second = again(backward=lambda _, grad: (grad * 7, None))
    assert second.op is first.op
    assert torch.autograd.grad(second(x, 2.0).sum(), x)[0].tolist() == [7.0, 7.0, 7.0]
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        again()(x, 2.0).sum().backward()


@pytest.mark.parametrize("by_a_kernel", [False, True])
def test_a_gradient_penalty_is_right_or_rejected(by_a_kernel):
    """A backward pass of torch's functions has derivatives; one by a kernel without a gradient has
    none."""
    times = define(
        schema="no_gradient::times(Tensor x, float factor) -> Tensor",
        name="scale",
        reference=lambda x, factor: x * factor,
    )

    def gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return 2 * grad * (times(x, 1.0) if by_a_kernel else x), None

    square = define(
        schema=f"no_gradient::square_{by_a_kernel}(Tensor x, float factor) -> Tensor",
        name="scale",
        reference=lambda x, factor: factor * x * x,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),  # noqa: ARG005
        backward=gradient,
    )
    x = torch.arange(3.0).requires_grad_()
    (of_x,) = torch.autograd.grad(square(x, 1.0).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_GRADIENT) if by_a_kernel else nullcontext():
        (second,) = torch.autograd.grad(of_x.square().sum(), x)
        assert second.tolist() == [0.0, 8.0, 16.0]


def test_gradients_by_transforms_and_no_derivative_in_forward_mode():
    """torch.library's gradient is none for transforms, and in forward mode a GPU's kernel would
    leave the derivative out."""
    func = torch.func

    def setup(
        ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
    ) -> None:
        assert output.shape == inputs[0].shape
        ctx.factor = keyword_only_inputs["factor"]

    def gradient(ctx: Any, grad: Tensor) -> Tensor:
        return scale(grad, factor=ctx.factor)

    schema = "transforms::scale(Tensor x, *, float factor) -> Tensor"
    scale = define(
        schema=schema,
        reference=lambda x, factor: x * factor,
        backward=gradient,
        setup_context=setup,
    )
    x = torch.ones(3, 4)

    def call(x: Tensor) -> Tensor:
        return scale(x, factor=2.0)

    def loss(x: Tensor) -> Tensor:
        return call(x).square().sum()

    assert torch.equal(func.grad(loss)(x), torch.full_like(x, 8.0))
    assert torch.equal(func.vmap(func.grad(loss))(x), torch.full_like(x, 8.0))
    assert torch.equal(func.grad(lambda x: func.grad(loss)(x).sum())(x), torch.full_like(x, 8.0))
    leaf = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(loss(leaf), leaf)[0], torch.full_like(x, 8.0))
    said = "transforms::scale has no derivative in forward mode"
    with pytest.raises(NotImplementedError, match=said):
        func.jvp(call, (x,), (x,))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        assert torch.equal(call(x), 2 * x), "nothing asks for a derivative"
        with pytest.raises(NotImplementedError, match=said):
            call(forward_ad.make_dual(x, x))
    fill = define(
        FILL,
        "transforms::fill(Tensor(a!) y, float value) -> ()",
        reference=lambda y, value: y.fill_(value),
    )
    with forward_ad.dual_level():
        fill(x.clone(), 3.0)
        with pytest.raises(NotImplementedError, match="transforms::fill has no derivative"):
            fill(forward_ad.make_dual(x.clone(), x), 3.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shapes": {"y": "x"}}, "shapes names y"),
        ({"shapes": {"x": "x[-1"}}, "shapes says 'x[-1' of x"),
        ({"shapes": {"x": "z[-1]"}}, "shapes says 'z[-1]' of x"),
        ({"check": 3}, "check is 3"),
        ({"check": lambda other: other}, "asks for other"),
    ],
)
def test_shapes_and_checks_that_do_not_fit_the_schema(options, words):
    assert words in refusal(**options)
