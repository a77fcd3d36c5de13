"""Writes a family's binding from its operators' signatures: C++ text, which is part of the plan and
so of the key.

The binding checks what the signatures say, allocates results, and calls launchers, whose
declarations it makes; so does ``declarations``, which each launcher's source gets to see first.
``docs/builder.md`` has the convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .declaration import Output, in_words
from .schema import DTYPES, FLOATS, Argument, Dimensions, Schema, Signature, dimensions

ISA_LEVELS = {"avx512": "Isa::avx512", "avx2": "Isa::avx2"}

_SCALARS = {"float": "double", "int": "int64_t", "bool": "bool", "ScalarType": "flexops::Dtype"}
_ROW = "const flexops::TensorRow& row"
_ROWS = "const flexops::TensorRow* rows, int64_t count"
_HOST_ROWS = "flexops::TensorRow* rows, int64_t count"
_GRAIN = 16384  # elements that are worth a thread


def launcher(signature: Signature, device: str) -> str:
    """A launcher's declaration, as one writes it: what the schema asks for. Of ``device`` "host":
    the function that calls launchers of the family's own."""
    name, one_row = signature.schema.name, device == "cpu" and signature.split == "elements"
    parameters = [
        text
        for argument in signature.schema.arguments
        if (text := _parameter(signature, argument, one_row))
    ]
    parameters += [
        f"{'flexops::Tensor' if output.by_host else 'const flexops::TensorView'}& {result}"
        for result, output in zip(signature.schema.results, signature.outputs, strict=True)
    ]
    if device == "host":
        return f"void {name}_host({', '.join(['flexops::Host& host', *parameters])})"
    if device == "cuda":
        return f"const char* {name}_cuda({', '.join([*parameters, 'void* stream'])})"
    span = () if signature.split == "whole" else ("int64_t begin", "int64_t end")
    return f"void {name}_cpu({', '.join([*parameters, *span])})"


def declarations(namespace: str, signatures: Sequence[Signature]) -> str:
    """The header that is included before each launcher's source: the launchers as the binding calls
    them."""
    lines = [
        "// Written by flexops: the launchers as the schemas require them.",
        "#pragma once",
        '#include "common/tensor_view.h"',
    ]
    lines += ['#include "common/multi_tensor.h"'] * any(one.rows for one in signatures) + [
        "#if defined(FLEXOPS_ISA)"
    ]
    lines += [
        f"namespace {namespace}::FLEXOPS_ISA {{",
        *_declared(signatures, "cpu"),
        "}",
        "#elif FLEXOPS_DEVICE_CUDA",
    ]
    lines += [f"namespace {namespace} {{", *_declared(signatures, "cuda"), "}", "#endif", ""]
    return "\n".join(lines)


def binding(
    namespace: str, family: str, signatures: Sequence[Signature], isa_levels: Sequence[str]
) -> str:
    """The whole source."""
    lines = [
        "// Written by flexops from the schemas of its operators.",
        '#include "common/generated_binding.h"',
    ]
    lines += ['#include "common/multi_tensor_binding.h"'] * any(
        one.rows or one.numbers for one in signatures
    )
    if host := list(_declared(signatures, "host")):
        lines += [
            '#include "common/host.h"',
            f"namespace {namespace} {{",
            *host,
            "}",
            f'#include "{family}/{family}_host.h"',
        ]
    lines += [
        "",
        f"namespace {namespace} {{",
        *(f"FLEXOPS_CUDA_DECLARE({one.rstrip(';')})" for one in _declared(signatures, "cuda")),
    ]
    for level in ("baseline", *(level for level in ISA_LEVELS if level in isa_levels)):
        lines += ["#if FLEXOPS_HAS_ISA_LEVELS"] * (level != "baseline")
        lines += [
            f"namespace {level} {{",
            *(f"FLEXOPS_CPU_DECLARE({one.rstrip(';')})" for one in _declared(signatures, "cpu")),
            "}",
        ]
        lines += ["#endif"] * (level != "baseline")
    lines += ["", "namespace {", "using namespace flexops;"]
    for one in signatures:
        lines += ["", *_function(namespace, one, isa_levels)]
    lines += [
        "",
        "}  // namespace",
        f"}}  // namespace {namespace}",
        "",
        "namespace flexops {",
        "FLEXOPS_REGISTER(m) {",
    ]
    names = [
        (one.schema.name, f"{one.registered}{more}")
        for one in signatures
        for more in ("", *(("_plain",) if one.plain else ()))
    ]
    lines += [
        f'  FLEXOPS_IMPL(m, "{name}", ::{namespace}::bound_{function});' for function, name in names
    ]
    return "\n".join([*lines, "}", "}  // namespace flexops", ""])


def _declared(signatures: Sequence[Signature], device: str) -> Iterator[str]:
    return (
        f"{launcher(one, device)};"
        for one in signatures
        if (one.split == "host") == (device == "host")
    )


def _parameter(signature: Signature, argument: Argument, one_row: bool) -> str:
    if signature.rows and argument.name in signature.rows.every:
        return (
            ""
            if argument.name != signature.first
            else _ROW
            if one_row
            else _HOST_ROWS
            if signature.split == "host"
            else _ROWS
        )
    if argument.name in signature.numbers:
        return f"const float* {argument.name}"
    if argument.type == "Tensor":
        return f"const flexops::TensorView{'s' * argument.many}& {argument.name}"
    return (
        f"const {_SCALARS[argument.type]}* {argument.name}"
        if argument.optional
        else f"{_SCALARS[argument.type]} {argument.name}"
    )


def _taken(argument: Argument) -> str:
    """How torch hands it over."""
    if argument.many:
        return f"TensorList {argument.name}"
    kind = {"Tensor": "Tensor", "ScalarType": "int64_t"}.get(
        argument.type, _SCALARS.get(argument.type, "")
    )
    return (
        f"std::optional<{kind}> {argument.name}" if argument.optional else f"{kind} {argument.name}"
    )


def _function(namespace: str, signature: Signature, isa_levels: Sequence[str]) -> Iterator[str]:
    schema, first = signature.schema, signature.first
    result = {0: "void", 1: "Tensor"}.get(
        len(schema.results), f"std::tuple<{', '.join(['Tensor'] * len(schema.results))}>"
    )
    yield f"{result} bound_{schema.name}({', '.join(map(_taken, schema.arguments))}) {{"
    yield f'  constexpr const char* kOp = "{namespace}::{signature.registered.partition(".")[0]}";'
    yield from _table(signature)
    for argument in _viewed(signature):
        yield f"  TensorView {argument.name}_view = view_of({argument.name});"
    for argument in _single(signature):
        if (
            argument.type == "Tensor"
            and argument.name not in signature.numbers
            and (checks := list(_checks(signature, argument)))
        ):
            yield from _each(argument, checks)
    for argument in schema.arguments:
        if argument.type == "ScalarType":
            yield f"  const Dtype {argument.name}_dtype = dtype_of_code({argument.name});"
    yield f"  DeviceGuard guard_({_place(signature)});"
    for name, shape in signature.shapes:
        yield from _shape_check(signature, name, shape)
    yield from _made_alike(signature)
    yield from _laid_out(signature)
    for name, output in zip(schema.results, signature.outputs, strict=True):
        if output.by_host:
            yield f"  Tensor {name};"
            continue
        made = _made(signature, output.shape or first, output)
        if output.when:
            made = (
                f"{_condition(signature, output)} ? {made} :"
                f" {_made(signature, output.otherwise or '0', output)}"
            )
        yield f"  Tensor {name} = {made};"
    yield from _call(namespace, signature, isa_levels)
    for name in signature.writes:
        if not signature.layout(name):
            yield f"  {name}_work.finish();"
    if signature.rows:
        yield "  table_.finish();"
    for name, output in zip(schema.results, signature.outputs, strict=True):
        if (like := output.dtype or first) in signature.alike:
            yield f"  if ({name}.dtype() != {like}_given) {name} = cast({name}, {like}_given);"
    if len(schema.results) == 1:
        yield f"  return {schema.results[0]};"
    elif schema.results:
        yield f"  return {{{', '.join(f'std::move({name})' for name in schema.results)}}};"
    yield "}"


def _single(signature: Signature) -> Iterator[Argument]:
    """The arguments that are no part of rows."""
    return (
        argument
        for argument in signature.schema.arguments
        if not signature.rows or argument.name not in signature.rows.every
    )


def _viewed(signature: Signature) -> Iterator[Argument]:
    """Those of them of which a ``TensorView`` is made first of all: the rest asks it, and torch no
    more."""
    return (
        one
        for one in _single(signature)
        if one.type == "Tensor" and not one.many and one.name not in signature.numbers
    )


def _view(signature: Signature, name: str) -> str:
    return f"view_of({name})" if name in signature.numbers else f"{name}_view"


def _place(signature: Signature) -> str:
    """The tensor on whose device everything is."""
    return f"{signature.first}[0]" if signature.rows else signature.first


def _table(signature: Signature) -> Iterator[str]:
    """Lists that are rows: checked and laid out by ``TensorTable``."""
    rows = signature.rows
    if rows is None:
        return
    if signature.schema.results:
        yield (
            f'  FLEXOPS_CHECK(!{signature.first}.empty(), kOp, ": {signature.first} must hold at'
            ' least one tensor");'
        )
    else:
        yield f"  if ({signature.first}.empty()) return;"
    columns = []
    for name in rows.lists:
        argument, allowed = signature.schema.find(name), dict(signature.dtypes)[name]
        known = dict(rows.written_if).get(name)
        written = f"{known}.has_value()" if known else _bool(bool(argument and argument.written))
        dtype = f"Dtype::{DTYPES[allowed[0]]}"
        columns.append(
            f'{{"{name}", {name}, {_bool(len(allowed) > 1)}, {written}, {dtype},'
            f" {_bool(name in rows.optional)}, {dict(rows.blocks).get(name, 0)}}}"
        )
    steps = f"&{rows.steps}" if rows.steps else "nullptr"
    steps = f"{rows.steps}.empty() ? nullptr : {steps}" if rows.steps in rows.optional else steps
    yield (
        f'  TensorTable table_(kOp, {{{", ".join(columns)}}}, "{rows.steps}", {steps},'
        f" {_bool(rows.row_major)});"
    )
    for argument in _single(signature):
        if argument.many:
            yield f"  table_.hold({argument.name});"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _each(argument: Argument, checks: list[str]) -> Iterator[str]:
    """Checks for each tensor that the argument brings."""
    yield (
        f"  for (const Tensor& it_ : {argument.name}) {{"
        if argument.many
        else f"  if ({argument.name}) {{"
        if argument.optional
        else "  {"
    )
    yield from (f"    {line}" for line in checks)
    yield "  }"


def _checks(signature: Signature, argument: Argument) -> Iterator[str]:
    name = argument.name
    allowed = dict(signature.dtypes)[name]
    item, found = (
        ("it_", "it_.dtype()")
        if argument.many
        else (f"*{name}" if argument.optional else name, f"{name}_view.dtype")
    )
    if name != _place(signature):
        yield f'check_device(kOp, "{name}", {item}, "{_place(signature)}", {_place(signature)});'
    elif sum(one.type == "Tensor" for one in signature.schema.arguments) > 1:
        yield (
            f'FLEXOPS_CHECK(on_this_device_type({item}), kOp, ": {name} must be on the device of'
            ' the other tensors");'
        )
    if allowed == FLOATS:
        yield f'element_type(kOp, "{name}", {found});'
    elif allowed[0] in DTYPES:
        yield f"const Dtype type_ = {found};"
        test = " || ".join(f"type_ == Dtype::{DTYPES[one]}" for one in allowed)
        yield (
            f'FLEXOPS_CHECK({test}, kOp, ": {name} must be {in_words(allowed)}, got ",'
            " dtype_name(type_));"
        )
    elif allowed != (name,):
        yield (
            f'check_dtype(kOp, "{name}", {found}, "{allowed[0]}", {_dtype(signature, allowed[0])});'
        )


def _shape(signature: Signature, text: str) -> str:
    return "Shape(kOp)" + "".join(_added(signature, part) for part in dimensions(text))


def _added(signature: Signature, part: Dimensions) -> str:
    factor = f" * {part.times}" if part.times != 1 else f" / {part.over}" if part.over != 1 else ""
    factor += f" + {part.plus}" if part.plus else ""
    if part.many:
        return f".add(static_cast<int64_t>({part.name}.size()){factor})"
    if not part.name:
        return f".add({part.number})"
    argument = signature.schema.find(part.name)
    if argument is None or argument.type != "Tensor":
        return f".add({part.name}{factor})"
    view = _view(signature, part.name)
    if part.single:
        return f'.add(size_of(kOp, "{part.name}", {view}, {part.first}){factor})'
    return f".add({view}, {part.first or 0}, {'INT64_MAX' if part.last is None else part.last})"


def _whole(signature: Signature, shape: str) -> str:
    """The tensor whose shape this is, as it is."""
    argument = signature.schema.find(shape)
    return shape if argument and argument.type == "Tensor" else ""


def _shape_check(signature: Signature, name: str, shape: str) -> Iterator[str]:
    argument, other = signature.schema.find(name), _whole(signature, shape)
    assert argument is not None
    found = "view_of(it_)" if argument.many else _view(signature, name)
    if other:
        yield from _each(
            argument,
            [f'check_shape(kOp, "{name}", {found}, "{other}", {_view(signature, other)});'],
        )
    else:
        yield from _each(argument, [f'{_shape(signature, shape)}.check("{name}", {found});'])


def _made_alike(signature: Signature) -> Iterator[str]:
    """Casts; the dtypes before them are those that results have."""
    items = []
    for argument in filter(None, map(signature.schema.find, signature.alike)):
        name = argument.name
        yield f"  const Dtype {name}_given = {name}_view.dtype;"
        place = f"({name} ? &*{name} : nullptr)" if argument.optional else f"&{name}"
        items.append(f"{{{place}, &{name}_view}}")
    if items:
        yield f"  make_alike({{{', '.join(items)}}});"


def _laid_out(signature: Signature) -> Iterator[str]:
    """Copies of what lies otherwise than the launcher takes it."""
    for argument in _single(signature):
        name, layout = argument.name, signature.layout(argument.name)
        if argument.type != "Tensor" or layout == "any" or name in signature.numbers:
            continue
        if argument.written:
            yield f'  Written {name}_work(kOp, "{name}", {name});'
            yield f"  {name}_view = view_of({name}_work.tensor);"
        elif argument.many:
            yield f"  for (Tensor& it_ : {name}) it_ = contiguous(it_);"
        elif layout.startswith("as "):
            to = layout.removeprefix("as ")
            yield f"  int64_t {name}_strides[kMostDims];"
            yield (
                f'  broadcast(kOp, "{name}", {name}, {name}_view, "{to}", {_view(signature, to)},'
                f" {name}_strides);"
            )
        elif "columns" in layout:
            yield f"  take_columns({name}, {name}_view, {_bool('aligned' in layout)});"
        else:
            flags = f", {_bool('rows' in layout)}, {_bool('aligned' in layout)}" if layout else ""
            yield f"  take({name}, {name}_view{flags});"


def _made(signature: Signature, shape: str, output: Output) -> str:
    """A result."""
    dtype = _dtype(signature, output.dtype or signature.first)
    place = _place(signature)
    like = _whole(signature, shape)
    if output.order and shape == output.order:
        return f"empty_in_order({like}_view, {dtype}, {place})"
    if like and like not in signature.numbers:
        return f"empty({like}_view.sizes, {like}_view.dim, {dtype}, {place})"
    return f"{_shape(signature, shape)}.make({dtype}, {place})"


def _condition(signature: Signature, output: Output) -> str:
    arguments = (signature.schema.find(name) for name in output.conditions)
    return " && ".join(
        f"{one.name}.has_value()" if one.optional else one.name for one in arguments if one
    )


def _dtype(signature: Signature, name: str) -> str:
    argument = signature.schema.find(name)
    if argument is None:
        return f"Dtype::{DTYPES[name]}"
    if argument.type == "ScalarType":
        return f"{name}_dtype"
    view, first = f"{_view(signature, name)}.dtype", signature.first
    other = f"{first}_given" if first in signature.alike else f"{first}_view.dtype"
    return f"({name} ? {view} : {other})" if argument.optional else view


def _passed(argument: Argument) -> str:
    name = argument.name
    if argument.type == "ScalarType":
        return f"{name}_dtype"
    return f"pointer_to({name})" if argument.optional else name


def _call(namespace: str, signature: Signature, isa_levels: Sequence[str]) -> Iterator[str]:
    schema, of_rows = signature.schema, signature.rows.every if signature.rows else ()
    passed, before = [], []  # what every launcher gets, and what it gets first instead of a row
    for argument in schema.arguments:
        name = argument.name
        if name in of_rows:
            before += ["table_.data()", "table_.size()"] if name == signature.first else []
        elif name in signature.numbers:
            owner = (
                "table_.number("
                if of_rows
                else f'check_number(kOp, "{signature.first}", {signature.first}.device_index(), '
            )
            yield f'  const float* {name}_number = {owner}"{name}", {name});'
            passed.append(f"{name}_number")
        elif argument.type == "Tensor":
            if argument.many:
                yield f"  const ViewList {name}_view({name});"
            passed.append(f"{name}_view")
        else:
            passed.append(_passed(argument))
    for name, output in zip(schema.results, signature.outputs, strict=True):
        if output.by_host:
            passed.append(name)
            continue
        there = (
            f"{_condition(signature, output)} ? view_of({name}) : TensorView{{}}"
            if output.when and not output.otherwise
            else f"view_of({name})"
        )
        yield f"  const TensorView {name}_view = {there};"
        passed.append(f"{name}_view")
    views = [
        f"{name}_view"
        for name in schema.results or [one for one in signature.writes if not _is_list(schema, one)]
    ]
    made = [f"{view}.numel > 0" for view in views]
    # a host function may have checks of its own
    yield f"  if ({' || '.join(made)}) {{" if made and signature.split != "host" else "  {"
    if signature.split == "host":
        yield f"    Host host_(kOp, {_place(signature)});"
        yield f"    ::{namespace}::{schema.name}_host({', '.join(['host_', *before, *passed])});"
    else:
        arguments = ", ".join([*before, *passed, f"current_stream({_place(signature)})"])
        yield "    if (FLEXOPS_DEVICE_CUDA) {"
        yield f"      check_launch(kOp, ::{namespace}::{schema.name}_cuda({arguments}));"
        yield "    } else {"
        yield from _on_cpu(
            namespace,
            signature,
            isa_levels,
            before,
            passed,
            (views or [f"{signature.first}_view"])[0],
        )
        yield "    }"
    yield "  }"


def _on_cpu(
    namespace: str,
    signature: Signature,
    isa_levels: Sequence[str],
    before: list[str],
    passed: list[str],
    split: str,
) -> Iterator[str]:
    """The launcher of the best instruction set, for a part of the work on each thread: of the view
    ``split``, or of the rows."""
    name = signature.schema.name
    choice = f"::{namespace}::baseline::{name}_cpu"
    levels = "".join(
        f"cpu_isa() == {ISA_LEVELS[level]} ? ::{namespace}::{level}::{name}_cpu : "
        for level in ISA_LEVELS
        if level in isa_levels
    )
    yield "#if FLEXOPS_HAS_ISA_LEVELS"
    yield f"    const auto kernel_ = {levels}{choice};"
    yield "#else"
    yield f"    const auto kernel_ = {choice};"
    yield "#endif"
    part = ", ".join([*passed, "begin", "end"])
    if signature.split == "whole":
        yield f"    kernel_({', '.join([*before, *passed])});"
    elif signature.rows:
        yield (
            "    for_each_piece(table_.data(), table_.size(), 32, [&](size_t i, int64_t begin,"
            f" int64_t end) {{ kernel_(table_.data()[i], {part}); }});"
        )
    else:
        total = f"{split}.numel" if signature.split == "elements" else f"{split}.rows()"
        grain = (
            f"{_GRAIN}"
            if signature.split == "elements"
            else f"{_GRAIN} / ({split}.columns() + 1) + 1"
        )
        yield (
            f"    parallel_for(0, {total}, {grain}, [&](int64_t begin, int64_t end) {{"
            f" kernel_({part}); }});"
        )


def _is_list(schema: Schema, name: str) -> bool:
    argument = schema.find(name)
    return argument is not None and argument.many
