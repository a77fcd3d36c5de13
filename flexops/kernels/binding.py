"""Which of an operator's arguments and results each parameter of a kernel gets.

Everything that can be wrong with a definition is found here, before anything is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from . import call_text
from .call_text import Bound, Function, counted, evaluated, mismatch, three_of
from .limits import launch_error
from .options import KernelOptions
from .schema import KernelArgument, KernelSchema
from .signature import ELEMENTS, SCALARS, CudaSignature, Parameter
from .structs import StructType

_DERIVED = re.compile(r"(\w+)_(numel|size(\d)|stride(\d))")


def bind(
    signature: CudaSignature,
    schema: KernelSchema,
    options: KernelOptions,
    reference: Function | None = None,
    structs: Mapping[str, StructType] | None = None,
) -> Bound:
    """``structs`` are those of the source that can be passed by value.

    Raises ``FlexopsError`` for a definition whose parts do not fit together.
    """
    functions: dict[str, Any] = {}
    inputs = [argument.name for argument in schema.arguments]
    known = [*inputs, *schema.results]
    values, letters = [], []
    written = {*schema.results, *(one.name for one in schema.tensors if one.mutable)}
    for parameter in signature.parameters:
        _check_parameter(parameter, signature, schema, written)
        by_value = (structs or {}).get(parameter.type) if not parameter.pointer else None
        if not parameter.pointer and not by_value and parameter.type not in SCALARS:
            raise mismatch(
                schema,
                f"the parameter {parameter} cannot be passed by value",
                f"one of {', '.join(SCALARS)}, a pointer, CUtensorMap, or a struct of the source"
                " that has only such members and arrays of them",
            )
        if unfit := _unfit(parameter, schema, options):
            raise mismatch(schema, *unfit)
        value = _value(
            parameter.name, parameter.pointer, schema, options, functions, known, signature
        )
        if by_value:
            functions[f"_pack_{by_value.name}"] = by_value.pack
            value = f"_pack_{by_value.name}({value})"
        kind = by_value.letter if by_value else SCALARS.get(parameter.type, "Q")
        letters.append("Q" if parameter.pointer else kind)
        values.append(value)
    if unused := sorted(set(options.args) - {parameter.name for parameter in signature.parameters}):
        raise mismatch(
            schema,
            f"args names {', '.join(unused)}",
            f"parameters of {signature.name}:"
            f" {', '.join(one.name for one in signature.parameters)}",
        )
    _check_launch(schema, options, signature)
    template = tuple(_template(signature, schema, options, functions, inputs))
    tensors = {*(tensor.name for tensor in schema.tensors), *schema.results}
    typed = tuple(
        (one.name, one.type) for one in signature.parameters if one.pointer and one.name in tensors
    )
    bound = Bound(tuple(values), tuple(letters), typed, template, functions, "")
    made = list(call_text.made_first(_pointers(signature), schema, options, functions))
    launch = list(call_text.run(made, schema, options, bound, known))
    chosen = ", ".join(f"{name!r}: {text}" for name, text in template)
    return call_text.written(
        {"run": launch, "values": [f"return {{{chosen}}}"]},
        made, schema, options, bound, reference,
        list(call_text.run_again(_pointers(signature), schema, options, bound)),
    )  # fmt: skip


def bind_steps(
    signatures: Sequence[CudaSignature],
    schema: KernelSchema,
    options: KernelOptions,
    reference: Function | None,
) -> Bound:
    """A call of several kernels: ``_step0``, ``_step1``, ... take the arguments of
    :func:`step_schema`."""
    bound = Bound((), (), (), (), {}, "")
    pointers = set().union(*map(_pointers, signatures))
    made = list(call_text.made_first(pointers, schema, options, bound.functions))
    names = [one.name for one in step_schema(schema, options).arguments]
    inputs = [one.name for one in schema.arguments]
    room = [
        f"{name} = _room({name!r},"
        f" {evaluated(f'_workspace_{name}', given, schema, bound.functions, inputs)})"
        for name, given in options.workspace.items()
    ]
    steps = [f"_step{number}({', '.join(names)})" for number in range(len(signatures))]
    run = [*call_text.on_its_device(schema), *made, *room, *steps, call_text.returned(schema)]
    everything = [*made, *room, f"return ({', '.join(names)},)"]
    pieces = {"run": run, "everything": everything}
    return call_text.written(pieces, made, schema, options, bound, reference)


def step_schema(schema: KernelSchema, options: KernelOptions) -> KernelSchema:
    """What one of several kernels has for arguments: results, the operator's, and workspaces."""
    results, rooms = (
        [KernelArgument(name, "Tensor", mutable=True, local=True) for name in names]
        for names in (schema.results, options.workspace)
    )
    own = (one._replace(keyword_only=False, has_default=False) for one in schema.arguments)
    return schema._replace(arguments=(*results, *own, *rooms), results=())


def bind_candidates(schema: KernelSchema, options: KernelOptions, first: Bound) -> Bound:
    """A call that one of several candidates serves, by what ``key`` says of the arguments. The rest
    is the first candidate's."""
    bound = first._replace(functions=dict(first.functions))
    names = [one.name for one in schema.arguments]
    pieces = ["_is_deterministic()", "_device"]
    for one in schema.arguments:
        if one.tensor:
            known = f"{one.name}.dtype" if options.key else f"{one.name}.dtype, {one.name}.shape"
            pieces.append(f"(None if {one.name} is None else ({known}))" if one.optional else known)
        elif not options.key and one.type in ("int", "bool", "Optional[int]", "Optional[bool]"):
            pieces.append(one.name)
    if options.key:
        pieces.append(f"repr({evaluated('_key_of', options.key, schema, bound.functions, names)})")
    place, *elsewhere = call_text.on_its_device(schema)
    run = [
        place,
        *elsewhere,
        f"_key = ({', '.join(pieces)},)",
        "_candidate = _choices.get(_key)",
        f"if _candidate is None: _candidate = _choose(_key, ({', '.join(names)},))",
        f"return _candidate({', '.join(names)})",
    ]
    key = [place, f"return ({', '.join(pieces)},)"]
    text = (
        first.text + call_text.defined("run", schema, run) + call_text.defined("key", schema, key)
    )
    return bound._replace(text=text + call_text.call(schema, run))


def _pointers(signature: CudaSignature) -> set[str]:
    return {parameter.name for parameter in signature.parameters if parameter.pointer}


def _check_parameter(
    parameter: Parameter, signature: CudaSignature, schema: KernelSchema, written: Container[str]
) -> None:
    """A parameter is one type and one name, and is const exactly if the schema only reads it."""
    name = parameter.name
    if not parameter.plain:
        found = f"{parameter.type} {name} among the parameters of {signature.name}"
        raise mismatch(
            schema,
            f"{found} (line {signature.line})",
            "one type and one name for each parameter",
            fix="add the missing comma or parenthesis",
        )
    made = any(one.name == name and one.local for one in schema.arguments)
    if not parameter.pointer or made or (name not in written) == parameter.const:
        return
    if name in written:
        what = "a result" if name in schema.results else "written"
        raise mismatch(
            schema,
            f"the parameter const {parameter} is const, but {name} is {what}",
            f"{parameter}",
            fix="remove const, or correct the schema",
        )
    if any(tensor.name == name for tensor in schema.tensors):
        raise mismatch(
            schema,
            f"the parameter {parameter} is not const, but {name} is only read",
            f"const {parameter}; or Tensor(a!) {name} in the schema, if the kernel writes it",
            fix=f"write const {parameter}",
        )


def _check_launch(schema: KernelSchema, options: KernelOptions, signature: CudaSignature) -> None:
    """A grid and a block that are constants are within CUDA's limits."""
    grid, block = (
        None if given is None or callable(given) else three_of(label, given, schema)
        for label, given in (("grid", options.grid), ("block", options.block))
    )
    found, required = launch_error(grid, block, signature.bounds)
    if not found and isinstance(options.shared, int) and options.shared < 0:
        found, required = f"shared {options.shared}", "a number of bytes"
    if not found and grid and 0 in grid:
        found, required = f"grid {grid}, which launches nothing", "at least one block"
    if found:
        raise mismatch(schema, found, required, fix="correct grid=, block= or shared=")


def expression_of(signature: CudaSignature, arguments: Mapping[str, str]) -> str:
    """The kernel as C++ names it, with its template's arguments; what has a default may be left out
    at the end."""
    given = [arguments.get(one.name, "") for one in signature.template]
    while given and not given[-1]:
        given.pop()
    return f"{signature.name}<{', '.join(given)}>" if given else signature.name


def _unfit(
    parameter: Parameter, schema: KernelSchema, options: KernelOptions
) -> tuple[str, str] | None:
    """An argument that a parameter by value can never receive, and what is required."""
    found = next((one for one in schema.arguments if one.name == parameter.name), None)
    if found is None or found.name in options.args or parameter.pointer:
        return None
    what = f"the parameter {parameter} receives the argument {found.type} {found.name}"
    if found.type in ("str", "Device"):
        return what, "a number; or args={...}, a function of it that returns one"
    if found.type == "float" and SCALARS.get(parameter.type, "d") in "bBhHiIqQ":
        return what, f"float {found.name} or double {found.name}; or an int in the schema"
    return None


def _value(
    name: str,
    pointer: bool,
    schema: KernelSchema,
    options: KernelOptions,
    functions: dict[str, Any],
    known: Sequence[str],
    signature: CudaSignature,
) -> str:
    """The expression of one parameter: what ``args`` says, an argument or result of its name, a
    size of one, or the number of elements."""
    if name in options.args:
        return evaluated(f"_args_{name}", options.args[name], schema, functions, known)
    found = next((argument for argument in schema.arguments if argument.name == name), None)
    if found and found.tensor != pointer:
        what = "a tensor, whose pointer it would be" if found.tensor else "no tensor"
        raise mismatch(
            schema,
            f"the parameter {name} of {signature.name} and the argument {found.type} {name} do not"
            f" fit: that is {what}",
            "one of their kind",
        )
    if found and found.tensor and found.optional:
        return f"(0 if {name} is None else {name}.data_ptr())"
    if found or name in schema.results:
        if not found and not pointer:
            raise mismatch(
                schema, f"the parameter {name} is a result, and no pointer", f"T* {name}"
            )
        return f"{name}.data_ptr()" if pointer else name
    derived = _DERIVED.fullmatch(name)
    if (
        derived
        and derived[1] in (*(tensor.name for tensor in schema.tensors), *schema.results)
        and not pointer
    ):
        return (
            f"{derived[1]}.numel()"
            if derived[2] == "numel"
            else f"{derived[1]}.{derived[2][:-1]}({derived[2][-1]})"
        )
    if name == "n" and not pointer:
        return f"{counted(schema)}.numel()"
    one = schema.first or schema.results[0]
    sizes = f"{one}_numel, {one}_size0, {one}_stride0, n (elements of {counted(schema)})"
    raise mismatch(
        schema,
        f"nothing says what the parameter {name} of {signature.name} (line {signature.line}) gets",
        f"a name of the schema ({', '.join(known)}), a size ({sizes}), or args={{{name!r}: lambda"
        f" {', '.join(a.name for a in schema.arguments)}: ...}}",
    )


def _template(
    signature: CudaSignature,
    schema: KernelSchema,
    options: KernelOptions,
    functions: dict[str, Any],
    inputs: Sequence[str],
) -> Iterable[tuple[str, str]]:
    for one in signature.template:
        if one.name in options.template:
            yield (
                one.name,
                evaluated(
                    f"_template_{one.name}", options.template[one.name], schema, functions, inputs
                ),
            )
        elif one.kind != "typename" and one.name in inputs:
            given = next(a.type for a in schema.arguments if a.name == one.name)
            if given not in ("int", "bool", "SymInt"):
                raise mismatch(
                    schema,
                    f"the template's {one.kind} {one.name} and the argument {given} {one.name}",
                    "an argument that is an int or a bool; each of its values is a kernel",
                    fix=f"make {one.name} a parameter of the kernel",
                )
            yield one.name, one.name
        elif one.kind != "typename" and not one.has_default:
            raise mismatch(
                schema,
                f"nothing says what the template's {one.kind} {one.name} is",
                f"template={{{one.name!r}: ...}}, or an argument of that name",
            )
        elif (
            one.kind == "typename"
            and not one.has_default
            and not _deduced(one.name, signature, schema)
        ):
            required = (
                f"a parameter {one.name}* of a tensor's name, or template={{{one.name!r}: 'float'}}"
            )
            raise mismatch(schema, f"no tensor determines the template's type {one.name}", required)
    if unknown := sorted(set(options.template) - {one.name for one in signature.template}):
        have = ", ".join(one.name for one in signature.template) or "none"
        raise mismatch(
            schema,
            f"template names {', '.join(unknown)}",
            f"the template's parameters of {signature.name}: {have}",
        )


def _deduced(name: str, signature: CudaSignature, schema: KernelSchema) -> bool:
    tensors = {*(tensor.name for tensor in schema.tensors), *schema.results}
    return any(
        one.pointer and one.type == name and one.name in tensors for one in signature.parameters
    )


def check_types(
    signature: CudaSignature, bound: Bound, dtypes: Mapping[str, str | None]
) -> dict[str, str]:
    """The dtype of each of the template's types, told by the tensors (their dtypes by name, None
    for one that is not there).

    Raises:
        TypeError: a tensor has another dtype than its pointer says, or two of one type differ.
    """
    types = {one.name for one in signature.template if one.kind == "typename"}
    found: dict[str, tuple[str, str]] = {}
    for tensor, type_ in bound.typed:
        dtype = dtypes.get(tensor)
        if dtype is None:
            continue
        if type_ in types:
            name, before = found.setdefault(type_, (tensor, dtype))
            if before != dtype:
                raise TypeError(
                    f"{signature.name}: {tensor} must be {before} like {name} (both are {type_}*),"
                    f" got {dtype}"
                )
        elif ELEMENTS.get(type_, dtype) != dtype:
            raise TypeError(
                f"{signature.name}: {tensor} must be {ELEMENTS[type_]} ({type_}*), got {dtype}"
            )
    return {type_: dtype for type_, (_, dtype) in found.items()}
