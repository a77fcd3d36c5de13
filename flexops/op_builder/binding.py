"""Writes a family's binding from its operators' signatures: C++ text, which is part of the plan and so of the key.

The binding checks what the signatures say, allocates results, and calls launchers, whose declarations it makes; so does ``declarations``, which
each launcher's source gets to see first. ``docs/builder.md`` has the convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .schema import DTYPES, Argument, Dimensions, Schema, Signature, dimensions

ISA_LEVELS = {"avx512": "Isa::avx512", "avx2": "Isa::avx2"}

_SCALARS = {"float": "double", "int": "int64_t", "bool": "bool", "ScalarType": "flexops::Dtype"}
_GRAIN = 16384  # elements that are worth a thread


def launcher(namespace: str, schema: Schema, device: str) -> str:
    """A launcher's declaration, as one writes it: what the schema asks for."""
    parameters = [_parameter(argument) for argument in schema.arguments] + [f"const flexops::TensorView& {name}" for name in schema.results]
    if device == "cuda":
        return f"const char* {namespace}::{schema.name}_cuda({', '.join([*parameters, 'void* stream'])})"
    return f"void {namespace}::FLEXOPS_ISA::{schema.name}_cpu({', '.join([*parameters, 'int64_t begin', 'int64_t end'])})"


def declarations(namespace: str, signatures: Sequence[Signature]) -> str:
    """The header that is included before each launcher's source: the launchers as the binding calls them."""
    lines = ["// Written by flexops: the launchers as the schemas want them.", "#pragma once", '#include "common/tensor_view.h"', "#if defined(FLEXOPS_ISA)"]
    lines += [f"namespace {namespace}::FLEXOPS_ISA {{", *(_declared(one, "cpu") for one in signatures), "}", "#elif FLEXOPS_DEVICE_CUDA"]
    lines += [f"namespace {namespace} {{", *(_declared(one, "cuda") for one in signatures), "}", "#endif", ""]
    return "\n".join(lines)


def binding(namespace: str, signatures: Sequence[Signature], isa_levels: Sequence[str]) -> str:
    """The whole source."""
    lines = ["// Written by flexops from the schemas of its operators.", '#include "common/generated_binding.h"', "", f"namespace {namespace} {{"]
    lines += ["#if FLEXOPS_DEVICE_CUDA", *(_declared(one, "cuda") for one in signatures), "#else"]
    for level in ("baseline", *(level for level in ISA_LEVELS if level in isa_levels)):
        lines += ["#if FLEXOPS_HAS_ISA_LEVELS"] * (level != "baseline")
        lines += [f"namespace {level} {{", *(_declared(one, "cpu") for one in signatures), "}"]
        lines += ["#endif"] * (level != "baseline")
    lines += ["#endif", "", "namespace {", "using namespace flexops;"]
    for one in signatures:
        lines += ["", *_function(namespace, one, isa_levels)]
    lines += ["", "}  // namespace", f"}}  // namespace {namespace}", "", "namespace flexops {", "FLEXOPS_REGISTER(m) {"]
    lines += [f'  FLEXOPS_IMPL(m, "{one.schema.name}", ::{namespace}::bound_{one.schema.name});' for one in signatures]
    return "\n".join([*lines, "}", "}  // namespace flexops", ""])


def _declared(signature: Signature, device: str) -> str:
    text = launcher("", signature.schema, device).replace("::FLEXOPS_ISA::", "").replace(" ::", " ")
    return f"{text.removesuffix(', int64_t begin, int64_t end)') + ')' if device == 'cpu' and signature.split == 'whole' else text};"


def _parameter(argument: Argument) -> str:
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
    for argument in schema.arguments:
        if argument.type == "Tensor":
            yield from _each(argument, list(_checks(signature, argument)))
    for argument in schema.arguments:
        if argument.type == "ScalarType":
            yield f"  const Dtype {argument.name}_dtype = dtype_of_code({argument.name});"
    yield "#if FLEXOPS_DEVICE_CUDA"
    yield f"  DeviceGuard guard_({first});"
    yield "#endif"
    for name, shape in signature.shapes:
        yield from _shape_check(signature, name, shape)
    yield from _contiguous(signature)
    for name, output in zip(schema.results, signature.outputs, strict=True):
        yield f"  Tensor {name} = {_shape(output.shape or first)}.make({_dtype(signature, output.dtype or first)}, {first});"
    yield from _call(namespace, signature, isa_levels)
    for name in signature.writes:
        if name not in signature.strided:
            yield f"  {name}_work.finish();"
    if len(schema.results) == 1:
        yield f"  return {schema.results[0]};"
    elif schema.results:
        yield f"  return {{{', '.join(f'std::move({name})' for name in schema.results)}}};"
    yield "}"


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
    yield f'check_device(kOp, "{name}", it_, "{signature.first}", {signature.first});'
    if allowed[0] in DTYPES:
        yield "const Dtype type_ = it_.dtype();"
        test = " || ".join(f"type_ == Dtype::{DTYPES[one]}" for one in allowed)
        yield f'FLEXOPS_CHECK({test}, kOp, ": {name} must be {in_words(allowed)}, got ", dtype_name(type_));'
    elif allowed != (name,):
        other = f"{allowed[0]}.dtype()"
        yield f'FLEXOPS_CHECK(it_.dtype() == {other}, kOp, ": {name} must be ", dtype_name({other}), ", as {allowed[0]}, got ", dtype_name(it_.dtype()));'


def in_words(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def _shape(text: str) -> str:
    return "Shape(kOp)" + "".join(_added(part) for part in dimensions(text))


def _added(part: Dimensions) -> str:
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
    for argument in signature.schema.arguments:
        name = argument.name
        if argument.type != "Tensor" or name in signature.strided:
            continue
        if argument.written:
            yield f"  Written {name}_work({name});"
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
    schema = signature.schema
    passed = []
    for argument in schema.arguments:
        if argument.type == "Tensor":
            kind = "ViewList" if argument.many else "TensorView"
            yield f"  const {kind} {argument.name}_view = {_passed(signature, argument)};"
            passed.append(f"{argument.name}_view")
        else:
            passed.append(_passed(signature, argument))
    for name in schema.results:
        yield f"  const TensorView {name}_view = view_of({name});"
        passed.append(f"{name}_view")
    made = [f"{name}_view" for name in (schema.results or [one for one in signature.writes if not _is_list(schema, one)])]
    if made:
        yield f"  if ({' || '.join(f'{view}.numel > 0' for view in made)}) {{"
    else:
        yield "  {"
    arguments = ", ".join(passed)
    yield "#if FLEXOPS_DEVICE_CUDA"
    yield f"    check_launch(kOp, ::{namespace}::{schema.name}_cuda({arguments}, current_stream({signature.first})));"
    yield "#else"
    choice = f"::{namespace}::baseline::{schema.name}_cpu"
    yield "#if FLEXOPS_HAS_ISA_LEVELS"
    levels = "".join(f"cpu_isa() == {ISA_LEVELS[level]} ? ::{namespace}::{level}::{schema.name}_cpu : " for level in ISA_LEVELS if level in isa_levels)
    yield f"    const auto kernel_ = {levels}{choice};"
    yield "#else"
    yield f"    const auto kernel_ = {choice};"
    yield "#endif"
    split = (made or [f"{signature.first}_view"])[0]
    if signature.split == "whole":
        yield f"    kernel_({arguments});"
    else:
        total = f"{split}.numel" if signature.split == "elements" else f"{split}.rows()"
        grain = f"{_GRAIN}" if signature.split == "elements" else f"{_GRAIN} / ({split}.columns() + 1) + 1"
        yield f"    parallel_for(0, {total}, {grain}, [&](int64_t begin, int64_t end) {{ kernel_({arguments}, begin, end); }});"
    yield "#endif"
    yield "  }"


def _is_list(schema: Schema, name: str) -> bool:
    argument = schema.find(name)
    return argument is not None and argument.many
