"""Writes a family's binding from its operators' signatures: C++ text, which is part of the plan and so of the key.

The binding checks what the signatures say, allocates results, and calls launchers, whose declarations it makes; so does ``declarations``, which
each launcher's source gets to see first. ``docs/builder.md`` has the convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .schema import DTYPES, Argument, Dimensions, Schema, Signature, dimensions, in_words

ISA_LEVELS = {"avx512": "Isa::avx512", "avx2": "Isa::avx2"}

_SCALARS = {"float": "double", "int": "int64_t", "bool": "bool", "ScalarType": "flexops::Dtype"}
_ROW, _ROWS, _HOST_ROWS = "const flexops::TensorRow& row", "const flexops::TensorRow* rows, int64_t count", "flexops::TensorRow* rows, int64_t count"
_GRAIN = 16384  # elements that are worth a thread


def launcher(signature: Signature, device: str) -> str:
    """A launcher's declaration, as one writes it: what the schema asks for. Of ``device`` "host": the function that calls launchers of the family's own."""
    name, one_row = signature.schema.name, device == "cpu" and signature.split == "elements"
    parameters = [text for argument in signature.schema.arguments if (text := _parameter(signature, argument, one_row))]
    parameters += [f"const flexops::TensorView& {result}" for result in signature.schema.results]
    if device == "host":
        return f"void {name}_host({', '.join(['flexops::Host& host', *parameters])})"
    if device == "cuda":
        return f"const char* {name}_cuda({', '.join([*parameters, 'void* stream'])})"
    return f"void {name}_cpu({', '.join([*parameters, *(() if signature.split == 'whole' else ('int64_t begin', 'int64_t end'))])})"


def declarations(namespace: str, signatures: Sequence[Signature]) -> str:
    """The header that is included before each launcher's source: the launchers as the binding calls them."""
    lines = ["// Written by flexops: the launchers as the schemas want them.", "#pragma once", '#include "common/tensor_view.h"']
    lines += ['#include "common/multi_tensor.h"'] * any(one.rows for one in signatures) + ["#if defined(FLEXOPS_ISA)"]
    lines += [f"namespace {namespace}::FLEXOPS_ISA {{", *_declared(signatures, "cpu"), "}", "#elif FLEXOPS_DEVICE_CUDA"]
    lines += [f"namespace {namespace} {{", *_declared(signatures, "cuda"), "}", "#endif", ""]
    return "\n".join(lines)


def binding(namespace: str, family: str, signatures: Sequence[Signature], isa_levels: Sequence[str]) -> str:
    """The whole source."""
    lines = ["// Written by flexops from the schemas of its operators.", '#include "common/generated_binding.h"']
    lines += ['#include "common/multi_tensor_binding.h"'] * any(one.rows or one.numbers for one in signatures)
    if host := list(_declared(signatures, "host")):
        lines += ['#include "common/host.h"', f"namespace {namespace} {{", *host, "}", f'#include "{family}/{family}_host.h"']
    lines += ["", f"namespace {namespace} {{", "#if FLEXOPS_DEVICE_CUDA", *_declared(signatures, "cuda"), "#else"]
    for level in ("baseline", *(level for level in ISA_LEVELS if level in isa_levels)):
        lines += ["#if FLEXOPS_HAS_ISA_LEVELS"] * (level != "baseline")
        lines += [f"namespace {level} {{", *_declared(signatures, "cpu"), "}"]
        lines += ["#endif"] * (level != "baseline")
    lines += ["#endif", "", "namespace {", "using namespace flexops;"]
    for one in signatures:
        lines += ["", *_function(namespace, one, isa_levels)]
    lines += ["", "}  // namespace", f"}}  // namespace {namespace}", "", "namespace flexops {", "FLEXOPS_REGISTER(m) {"]
    lines += [f'  FLEXOPS_IMPL(m, "{one.schema.name}", ::{namespace}::bound_{one.schema.name});' for one in signatures]
    return "\n".join([*lines, "}", "}  // namespace flexops", ""])


def _declared(signatures: Sequence[Signature], device: str) -> Iterator[str]:
    return (f"{launcher(one, device)};" for one in signatures if (one.split == "host") == (device == "host"))


def _parameter(signature: Signature, argument: Argument, one_row: bool) -> str:
    if signature.rows and argument.name in signature.rows.every:
        return "" if argument.name != signature.first else _ROW if one_row else _HOST_ROWS if signature.split == "host" else _ROWS
    if argument.name in signature.numbers:
        return f"const float* {argument.name}"
    if argument.type == "Tensor":
        return f"const flexops::TensorView{'s' * argument.many}& {argument.name}"
    return f"const {_SCALARS[argument.type]}* {argument.name}" if argument.optional else f"{_SCALARS[argument.type]} {argument.name}"


def _taken(argument: Argument) -> str:
    """How torch hands it over."""
    if argument.many:
        return f"TensorList {argument.name}"
    kind = {"Tensor": "Tensor", "ScalarType": "int64_t"}.get(argument.type, _SCALARS.get(argument.type, ""))
    return f"std::optional<{kind}> {argument.name}" if argument.optional else f"{kind} {argument.name}"


def _function(namespace: str, signature: Signature, isa_levels: Sequence[str]) -> Iterator[str]:
    schema, first = signature.schema, signature.first
    result = {0: "void", 1: "Tensor"}.get(len(schema.results), f"std::tuple<{', '.join(['Tensor'] * len(schema.results))}>")
    yield f"{result} bound_{schema.name}({', '.join(map(_taken, schema.arguments))}) {{"
    yield f'  constexpr const char* kOp = "{namespace}::{schema.name}";'
    yield from _table(signature)
    for argument in _single(signature):
        if argument.type == "Tensor" and argument.name not in signature.numbers:
            yield from _each(argument, list(_checks(signature, argument)))
    for argument in schema.arguments:
        if argument.type == "ScalarType":
            yield f"  const Dtype {argument.name}_dtype = dtype_of_code({argument.name});"
    yield "#if FLEXOPS_DEVICE_CUDA"
    yield f"  DeviceGuard guard_({_place(signature)});"
    yield "#endif"
    for name, shape in signature.shapes:
        yield from _shape_check(signature, name, shape)
    yield from _contiguous(signature)
    for name, output in zip(schema.results, signature.outputs, strict=True):
        yield f"  Tensor {name} = {_shape(output.shape or first)}.make({_dtype(signature, output.dtype or first)}, {_place(signature)});"
    yield from _call(namespace, signature, isa_levels)
    for name in signature.writes:
        if name not in signature.strided:
            yield f"  {name}_work.finish();"
    if signature.rows:
        yield "  table_.finish();"
    if len(schema.results) == 1:
        yield f"  return {schema.results[0]};"
    elif schema.results:
        yield f"  return {{{', '.join(f'std::move({name})' for name in schema.results)}}};"
    yield "}"


def _single(signature: Signature) -> Iterator[Argument]:
    """The arguments that are no part of rows."""
    return (argument for argument in signature.schema.arguments if not signature.rows or argument.name not in signature.rows.every)


def _place(signature: Signature) -> str:
    """The tensor on whose device everything is."""
    return f"{signature.first}[0]" if signature.rows else signature.first


def _table(signature: Signature) -> Iterator[str]:
    """Lists that are rows: checked and laid out by ``TensorTable``."""
    rows = signature.rows
    if rows is None:
        return
    if signature.schema.results:
        yield f'  FLEXOPS_CHECK(!{signature.first}.empty(), kOp, ": {signature.first} must hold at least one tensor");'
    else:
        yield f"  if ({signature.first}.empty()) return;"
    columns = []
    for name in rows.lists:
        argument, allowed = signature.schema.find(name), dict(signature.dtypes)[name]
        known = dict(rows.written_if).get(name)
        written = f"{known}.has_value()" if known else _bool(bool(argument and argument.written))
        dtype = f"Dtype::{DTYPES[allowed[0]]}"
        columns.append(f'{{"{name}", {name}, {_bool(len(allowed) > 1)}, {written}, {dtype}, {_bool(name in rows.optional)}, {dict(rows.blocks).get(name, 0)}}}')
    steps = f"&{rows.steps}" if rows.steps else "nullptr"
    steps = f"{rows.steps}.empty() ? nullptr : {steps}" if rows.steps in rows.optional else steps
    yield f'  TensorTable table_(kOp, {{{", ".join(columns)}}}, "{rows.steps}", {steps}, {_bool(rows.row_major)});'
    for argument in _single(signature):
        if argument.many:
            yield f"  table_.hold({argument.name});"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _each(argument: Argument, checks: list[str]) -> Iterator[str]:
    """Checks of ``it_``, for each tensor that the argument brings."""
    if argument.many:
        yield f"  for (const Tensor& it_ : {argument.name}) {{"
    elif argument.optional:
        yield f"  if ({argument.name}) {{"
        yield f"    const Tensor& it_ = *{argument.name};"
    else:
        yield "  {"
        yield f"    const Tensor& it_ = {argument.name};"
    yield from (f"    {line}" for line in checks)
    yield "  }"


def _checks(signature: Signature, argument: Argument) -> Iterator[str]:
    name = argument.name
    allowed = dict(signature.dtypes)[name]
    yield f'check_device(kOp, "{name}", it_, "{_place(signature)}", {_place(signature)});'
    if allowed[0] in DTYPES:
        yield "const Dtype type_ = it_.dtype();"
        test = " || ".join(f"type_ == Dtype::{DTYPES[one]}" for one in allowed)
        yield f'FLEXOPS_CHECK({test}, kOp, ": {name} must be {in_words(allowed)}, got ", dtype_name(type_));'
    elif allowed != (name,):
        other = f"{allowed[0]}.dtype()"
        yield f'FLEXOPS_CHECK(it_.dtype() == {other}, kOp, ": {name} must be ", dtype_name({other}), ", as {allowed[0]}, got ", dtype_name(it_.dtype()));'


def _shape(text: str) -> str:
    return "Shape(kOp)" + "".join(_added(part) for part in dimensions(text))


def _added(part: Dimensions) -> str:
    if part.many:
        return f".add_all(static_cast<int64_t>({part.name}.size()))"
    if not part.name:
        return f".add({part.number})"
    if part.single:
        return f'.add("{part.name}", {part.name}, {part.first})'
    if part.first is None:
        return f".add_all({part.name})"
    return f".add({part.name}, {part.first}, {'INT64_MAX' if part.last is None else part.last})"


def _shape_check(signature: Signature, name: str, shape: str) -> Iterator[str]:
    argument = signature.schema.find(name)
    assert argument is not None
    yield from _each(
        argument,
        [
            f"const Shape wanted_ = {_shape(shape)};",
            f'FLEXOPS_CHECK(wanted_.is_of(it_), kOp, ": {name} must have shape ", wanted_.text(), ", got ", shape_text(it_));',
        ],
    )


def _contiguous(signature: Signature) -> Iterator[str]:
    for argument in _single(signature):
        name = argument.name
        if argument.type != "Tensor" or name in signature.strided or name in signature.numbers:
            continue
        if argument.written:
            yield f'  Written {name}_work(kOp, "{name}", {name});'
        elif argument.many:
            yield f"  for (Tensor& it_ : {name}) it_ = contiguous(it_);"
        else:
            yield f"  if ({name}) {name} = contiguous(*{name});" if argument.optional else f"  {name} = contiguous({name});"


def _dtype(signature: Signature, name: str) -> str:
    argument = signature.schema.find(name)
    if argument is None:
        return f"Dtype::{DTYPES[name]}"
    return f"{name}_dtype" if argument.type == "ScalarType" else f"{name}.dtype()"


def _passed(signature: Signature, argument: Argument) -> str:
    name = argument.name
    if argument.many:
        return f"ViewList({name}_work)" if argument.written and name not in signature.strided else f"ViewList({name})"
    if argument.type == "Tensor":
        return f"view_of({name}_work.tensor)" if argument.written and name not in signature.strided else f"view_of({name})"
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
            owner = "table_.number(" if of_rows else f'check_number(kOp, "{signature.first}", {signature.first}.device_index(), '
            yield f'  const float* {name}_number = {owner}"{name}", {name});'
            passed.append(f"{name}_number")
        elif argument.type == "Tensor":
            kind = "ViewList" if argument.many else "TensorView"
            yield f"  const {kind} {name}_view = {_passed(signature, argument)};"
            passed.append(f"{name}_view")
        else:
            passed.append(_passed(signature, argument))
    for name in schema.results:
        yield f"  const TensorView {name}_view = view_of({name});"
        passed.append(f"{name}_view")
    views = [f"{name}_view" for name in (schema.results or [one for one in signature.writes if not _is_list(schema, one)])]
    made = [f"{view}.numel > 0" for view in views]
    yield f"  if ({' || '.join(made)}) {{" if made else "  {"
    if signature.split == "host":
        yield f"    Host host_(kOp, {_place(signature)});"
        yield f"    ::{namespace}::{schema.name}_host({', '.join(['host_', *before, *passed])});"
    else:
        yield "#if FLEXOPS_DEVICE_CUDA"
        arguments = ", ".join([*before, *passed, f"current_stream({_place(signature)})"])
        yield f"    check_launch(kOp, ::{namespace}::{schema.name}_cuda({arguments}));"
        yield "#else"
        yield from _on_cpu(namespace, signature, isa_levels, before, passed, (views or [f"{signature.first}_view"])[0])
        yield "#endif"
    yield "  }"


def _on_cpu(namespace: str, signature: Signature, isa_levels: Sequence[str], before: list[str], passed: list[str], split: str) -> Iterator[str]:
    """The launcher of the best instruction set, for a part of the work on each thread: of the view ``split``, or of the rows."""
    name = signature.schema.name
    choice = f"::{namespace}::baseline::{name}_cpu"
    levels = "".join(f"cpu_isa() == {ISA_LEVELS[level]} ? ::{namespace}::{level}::{name}_cpu : " for level in ISA_LEVELS if level in isa_levels)
    yield "#if FLEXOPS_HAS_ISA_LEVELS"
    yield f"    const auto kernel_ = {levels}{choice};"
    yield "#else"
    yield f"    const auto kernel_ = {choice};"
    yield "#endif"
    part = ", ".join([*passed, "begin", "end"])
    if signature.split == "whole":
        yield f"    kernel_({', '.join([*before, *passed])});"
    elif signature.rows:
        yield f"    for_each_piece(table_.data(), table_.size(), 32, [&](size_t i, int64_t begin, int64_t end) {{ kernel_(table_.data()[i], {part}); }});"
    else:
        total = f"{split}.numel" if signature.split == "elements" else f"{split}.rows()"
        grain = f"{_GRAIN}" if signature.split == "elements" else f"{_GRAIN} / ({split}.columns() + 1) + 1"
        yield f"    parallel_for(0, {total}, {grain}, [&](int64_t begin, int64_t end) {{ kernel_({part}); }});"


def _is_list(schema: Schema, name: str) -> bool:
    argument = schema.find(name)
    return argument is not None and argument.many
