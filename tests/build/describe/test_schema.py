"""Schemas and what declarations say beside them: what is read, and what is rejected with its
reason."""

from __future__ import annotations

import pytest

from flexops.build.describe import binding, schema
from flexops.build.describe.declaration import Output, Rows
from flexops.build.describe.schema import Argument, Dimensions, declare, dimensions, parse
from flexops.errors import FlexopsError


def test_every_kind_of_argument_is_read():
    text = (
        "f(Tensor x, Tensor(a!) y, Tensor? mask, Tensor[] more, float s, int n, SymInt m, bool b,"
        " ScalarType t, float? o) -> (Tensor first, Tensor second)"
    )
    read = parse(text)
    assert read.name == "f"
    assert read.results == ("first", "second")
    assert read.arguments == (
        Argument("x", "Tensor"),
        Argument("y", "Tensor", written=True),
        Argument("mask", "Tensor", optional=True),
        Argument("more", "Tensor", many=True),
        Argument("s", "float"),
        Argument("n", "int"),
        Argument("m", "int"),
        Argument("b", "bool"),
        Argument("t", "ScalarType"),
        Argument("o", "float", optional=True),
    )
    assert parse("f(Tensor x) -> Tensor").results == ("out",)
    assert parse("f(Tensor x) -> (Tensor, Tensor)").results == ("out0", "out1")
    assert parse("f(Tensor(a!) x) -> ()").results == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scale Tensor x -> Tensor", "form"),
        ("scale(Tensor x)", "form"),
        ("scale(Tensor x, float factor=1.0) -> Tensor", "defaults"),
        ("scale(Tensor x, *, float factor) -> Tensor", "keyword-only"),
        ("scale(Tensor x, str mode) -> Tensor", "str mode"),
        ("scale(Tensor x) -> Tensor(a!)", "Tensor(a!)"),
        ("scale(Tensor x, float x) -> Tensor", "twice"),
        ("scale(Tensor x, int default) -> Tensor", "word of C++"),
        ("scale(Tensor x, float lambda) -> Tensor", "word of Python"),
        ("scale(float x) -> Tensor", "no argument of type Tensor"),
        ("scale(Tensor x, float nullptr) -> Tensor", "word of C++"),
        ("scale(Tensor x, int begin) -> Tensor", "begin is what the binding calls"),
        ("scale(Tensor contiguous) -> Tensor", "contiguous is what the binding calls"),
        ("scale(Tensor x) -> (Tensor x_view, Tensor y)", "x_view is what the binding calls"),
        ("scale(Tensor x, ScalarType? dtype) -> Tensor", "no argument that the builder knows"),
        ("scale(Tensor x, Tensor(a!)? y) -> Tensor", "y: contiguous"),
    ],
)
def test_what_is_no_schema_is_rejected_with_the_reason(text, said):
    with pytest.raises(FlexopsError) as caught:
        declare(text)
    assert said in caught.value.found
    assert caught.value.required
    assert caught.value.fix


def test_shapes():
    assert dimensions("x[:-1], 4, n, x[0]") == (
        Dimensions("x", 0, -1),
        Dimensions(number=4),
        Dimensions("n"),
        Dimensions("x", 0, single=True),
    )
    assert dimensions("x[1:]") == (Dimensions("x", 1),)
    assert dimensions("x[-1] // 2 + 1, n*4, n + 3") == (
        Dimensions("x", -1, single=True, over=2, plus=1),
        Dimensions("n", times=4),
        Dimensions("n", plus=3),
    )
    for wrong in ("x[", "x[]", "x[:-1] * 2", "x[0] / 2", "x[0] // 0"):
        with pytest.raises(ValueError):
            dimensions(wrong)


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ({"dtypes": {"y": "float32"}}, "y"),
        ({"dtypes": {"x": "float33"}}, "float33"),
        ({"shapes": {"x": "z[0]"}}, "z"),
        ({"shapes": {"x": "factor"}}, "factor"),
        ({"shapes": {"x": "x["}}, "x["),
        ({"strided": ("factor",)}, "factor"),
        ({"outputs": (Output(), Output())}, "2 outputs"),
        ({"outputs": (Output(dtype="factor"),)}, "factor"),
        ({"split": "columns"}, "columns"),
        ({"numbers": ("factor",)}, "factor"),
        ({"shapes": {"x": "len(factor)"}}, "factor"),
        ({"strided": {"x": "even rows"}}, "'even rows'"),
        ({"strided": {"x": "as x"}}, "'as x'"),
        ({"strided": {"x": "as factor"}}, "'as factor'"),
        ({"outputs": (Output(when="x"),)}, "when='x'"),
        ({"outputs": (Output(otherwise="4"),)}, "which says when"),
        ({"outputs": (Output("4", order="x"),)}, "order='x'"),
        ({"outputs": (Output("x * 2"),)}, "one dimension, or an int"),
        ({"dtypes": ["float32"]}, "a mapping"),
        ({"dtypes": {"x": ()}}, "one dtype or more"),
        ({"dtypes": {"x": "x"}}, "dtypes['x']"),
        ({"shapes": "x"}, "a mapping"),
        ({"shapes": {"x": 4}}, "text, such as"),
        ({"strided": "x"}, "several names: ('x',)"),
        ({"numbers": "x"}, "several names: ('x',)"),
        ({"rows": ("x",)}, "builder.Rows"),
    ],
)
def test_a_constraint_on_what_is_not_there_is_rejected(constraint, said):
    with pytest.raises(FlexopsError) as caught:
        declare("scale(Tensor x, float factor) -> Tensor", **constraint)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_what_may_not_be_there_is_no_measure_of_the_work_and_what_is_written_lies_as_it_does():
    some = Output(when="mask")
    for schema_, said, constraint in (
        (
            "f(Tensor x, Tensor? mask) -> Tensor",
            "elements of out, which may not be there",
            {"outputs": (some,)},
        ),
        (
            "f(Tensor x, Tensor? mask) -> Tensor",
            "bool, int or optional arguments, joined by and: mask",
            {"outputs": (Output(when="mask or x"),), "split": "whole"},
        ),
        ("f(Tensor(a!) x) -> ()", "since it is a list or written", {"strided": {"x": "rows"}}),
        (
            "f(Tensor x, Tensor[] more) -> Tensor",
            "since it is a list or written",
            {"strided": {"more": "aligned"}},
        ),
    ):
        with pytest.raises(FlexopsError) as caught:
            declare(schema_, **constraint)  # type: ignore[arg-type]
        assert said in str(caught.value)
    declare("f(Tensor x, Tensor? mask) -> (Tensor, Tensor)", outputs=(Output(), some))
    declare(
        "f(Tensor x, Tensor? mask) -> Tensor",
        outputs=(Output("x", when="mask", otherwise="x[:-1]"),),
    )


STEP = (
    "step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, Tensor[] more, float lr,"
    " Tensor? scale) -> Tensor norms"
)
NORMS = (Output("len(params)", "float32"),)


@pytest.mark.parametrize(
    ("rows", "constraint", "said"),
    [
        (Rows(("params", "scale")), {}, "found: scale"),
        (Rows(()), {}, "0 lists"),
        (Rows(("params", "grads"), optional=("params",)), {}, "params is optional"),
        (Rows(("params", "grads"), optional=("more",)), {}, "more is optional"),
        (
            Rows(("params", "grads"), written_if=(("grads", "lr"),)),
            {},
            "grads is written if lr is given",
        ),
        (Rows(("params", "grads"), blocks=(("more", 256),)), {}, "more in blocks of 256"),
        (Rows(("params", "grads"), blocks=(("grads", 0),)), {}, "grads in blocks of 0"),
        (
            Rows(("params", "grads")),
            {"dtypes": {"grads": ("float32", "float64")}},
            "float32 or float64",
        ),
        (Rows(("params", "grads")), {"split": "rows"}, "elements (of each row)"),
        (
            Rows(("params", "grads")),
            {"outputs": (Output("len(params)"),)},
            "a result as the first tensor",
        ),
    ],
)
def test_rows_that_cannot_be_are_rejected(rows, constraint, said):
    with pytest.raises(FlexopsError) as caught:
        declare(STEP, rows=rows, **{"outputs": NORMS, **constraint})
    assert said in str(caught.value)
    with pytest.raises(FlexopsError, match="an argument called count"):
        declare("step(Tensor[] params, int count) -> ()", rows=Rows(("params",)))


def test_rows_take_their_lists_place_in_the_launcher():
    def launchers(split: str, device: str) -> str:
        rows = Rows(("params", "grads"), "states", written_if=(("grads", "scale"),))
        return binding.launcher(
            declare(STEP, rows=rows, numbers=("scale",), split=split, outputs=NORMS), device
        )

    rest = (
        "const flexops::TensorViews& more, double lr, const float* scale, const"
        " flexops::TensorView& norms"
    )
    assert (
        launchers("elements", "cpu")
        == f"void step_cpu(const flexops::TensorRow& row, {rest}, int64_t begin, int64_t end)"
    )
    assert (
        launchers("elements", "cuda")
        == f"const char* step_cuda(const flexops::TensorRow* rows, int64_t count, {rest}, void*"
        " stream)"
    )
    assert (
        launchers("whole", "cpu")
        == f"void step_cpu(const flexops::TensorRow* rows, int64_t count, {rest})"
    )
    assert (
        launchers("host", "host")
        == f"void step_host(flexops::Host& host, flexops::TensorRow* rows, int64_t count, {rest})"
    )


def test_the_launchers_declaration_is_the_schemas():
    signature = declare(
        "f(Tensor x, Tensor? m, Tensor[] more, int n, float? o, ScalarType t) -> (Tensor y,"
        " Tensor z)",
        split="rows",
    )
    views = (
        "const flexops::TensorView& x, const flexops::TensorView& m, const flexops::TensorViews&"
        " more"
    )
    rest = (
        "int64_t n, const double* o, flexops::Dtype t, const flexops::TensorView& y, const"
        " flexops::TensorView& z"
    )
    assert (
        binding.launcher(signature, "cuda") == f"const char* f_cuda({views}, {rest}, void* stream)"
    )
    lines = binding.declarations("lib", [signature]).splitlines()
    assert f"void f_cpu({views}, {rest}, int64_t begin, int64_t end);" in lines
    assert f"const char* f_cuda({views}, {rest}, void* stream);" in lines
    whole = binding.declarations("lib", [declare("g(Tensor x) -> Tensor", split="whole")])
    assert "void g_cpu(const flexops::TensorView& x, const flexops::TensorView& out);" in whole


def test_a_changed_declaration_is_another_text():
    one, other = (
        binding.binding("lib", "f", [declare("f(Tensor x) -> Tensor", dtypes={"x": dtype})], ())
        for dtype in ("float32", "float64")
    )
    assert one != other
    assert set(schema.DTYPES) >= set(schema.FLOATS)
