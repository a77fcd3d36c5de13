"""Which of an operator's arguments and results each parameter of a kernel gets, and the Python of a
call, written once when a kernel is defined.

The text of a call for ``scale(Tensor x, float factor) -> Tensor`` and ``scale(const T* x, T* out,
float factor, int64_t n)`` is, in short,

    out = empty_like(x)
    kernel = kernels.get((device, x.dtype)) or prepare(...)
    pack_into(memory, 0, grid, 1, 1, 256, 1, 1, 0, stream, ...,
              x.data_ptr(), out.data_ptr(), factor, out.numel())
    launch(config, kernel, None, extra)

so that a call costs what these lines cost. Everything that can be wrong with a definition is found
here, before anything is compiled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..build.describe.schema import Dimensions, dimensions
from ..errors import FlexopsError
from .limits import launch_error
from .options import KernelOptions
from .schema import KernelArgument, KernelSchema
from .signature import ELEMENTS, SCALARS, CudaSignature, Parameter
from .structs import StructType

Function = Callable[..., Any]
_DERIVED = re.compile(r"(\w+)_(numel|size(\d)|stride(\d))")


class Bound(NamedTuple):
    """What a definition comes to.

    Attributes:
        values: the Python expression of each parameter's value.
        letters: of ``struct``, for each parameter.
        typed: (tensor, type of the pointer that it becomes, or the template's parameter) for each
            pointer.
        template: (name, expression) of each of the kernel's template arguments that is a value.
        functions: what expressions call.
        text: the Python of ``run`` (the launch), ``fake``, ``values`` (of the template),
            ``complete`` (the arguments by name), ``refer`` (if there is a reference) and
            ``__call__(self, ...)``.
    """

    values: tuple[str, ...]
    letters: tuple[str, ...]
    typed: tuple[tuple[str, str], ...]
    template: tuple[tuple[str, str], ...]
    functions: dict[str, Any]
    text: str


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
            raise _wrong(
                schema,
                f"the parameter {parameter} cannot be passed by value",
                f"one of {', '.join(SCALARS)}, a pointer, CUtensorMap, or a struct of the source"
                " that has only such members and arrays of them",
            )
        if unfit := _unfit(parameter, schema, options):
            raise _wrong(schema, *unfit)
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
        raise _wrong(
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
    made = list(_made(_pointers(signature), schema, options, functions))
    launch = list(_run(made, schema, options, bound, known))
    chosen = ", ".join(f"{name!r}: {text}" for name, text in template)
    return _written(
        {"run": launch, "values": [f"return {{{chosen}}}"]},
        made, schema, options, bound, reference,
        list(_run_again(signature, schema, options, bound)),
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
    made = list(_made(pointers, schema, options, bound.functions))
    names = [one.name for one in step_schema(schema, options).arguments]
    inputs = [one.name for one in schema.arguments]
    room = [
        f"{name} = _room({name!r},"
        f" {_evaluated(f'_workspace_{name}', given, schema, bound.functions, inputs)})"
        for name, given in options.workspace.items()
    ]
    steps = [f"_step{number}({', '.join(names)})" for number in range(len(signatures))]
    run = [*_on_its_device(schema), *made, *room, *steps, _returned(schema)]
    everything = [*made, *room, f"return ({', '.join(names)},)"]
    pieces = {"run": run, "everything": everything}
    return _written(pieces, made, schema, options, bound, reference)


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
        pieces.append(f"repr({_evaluated('_key_of', options.key, schema, bound.functions, names)})")
    place, *elsewhere = _on_its_device(schema)
    run = [
        place,
        *elsewhere,
        f"_key = ({', '.join(pieces)},)",
        "_candidate = _choices.get(_key)",
        f"if _candidate is None: _candidate = _choose(_key, ({', '.join(names)},))",
        f"return _candidate({', '.join(names)})",
    ]
    key = [place, f"return ({', '.join(pieces)},)"]
    text = first.text + _defined("run", schema, run) + _defined("key", schema, key)
    return bound._replace(text=text + _call(schema, run))


def _written(
    pieces: Mapping[str, Sequence[str]],
    made: Sequence[str],
    schema: KernelSchema,
    options: KernelOptions,
    bound: Bound,
    reference: Function | None,
    again: Sequence[str] = (),
) -> Bound:
    """``bound`` with its text: ``pieces``, and what every operator has."""
    inputs = [argument.name for argument in schema.arguments]
    refer: list[str] = []
    if reference is not None:
        said = _evaluated("_reference", reference, schema, bound.functions, inputs)
        refer = [
            *_checked(schema, options, bound.functions, inputs),
            f"{'return ' if schema.results else ''}{said}",
        ]
    common = {
        "fake": [*made, _returned(schema)],
        "complete": [f"return {{{', '.join(f'{name!r}: {name}' for name in inputs)}}}"],
        "refer": refer,
    }
    text = "".join(
        _defined(name, schema, lines) for name, lines in (*pieces.items(), *common.items()) if lines
    )
    return bound._replace(text=text + _call(schema, again or pieces["run"]))


def _defined(name: str, schema: KernelSchema, lines: Iterable[str]) -> str:
    declared = ", ".join(map(_declared, schema.arguments))
    return f"def {name}({declared}):\n" + "".join(f"    {line}\n" for line in lines)


def _pointers(signature: CudaSignature) -> set[str]:
    return {parameter.name for parameter in signature.parameters if parameter.pointer}


def _check_parameter(
    parameter: Parameter, signature: CudaSignature, schema: KernelSchema, written: Container[str]
) -> None:
    """A parameter is one type and one name, and is const exactly if the schema only reads it."""
    name = parameter.name
    if not parameter.plain:
        found = f"{parameter.type} {name} among the parameters of {signature.name}"
        raise _wrong(
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
        raise _wrong(
            schema,
            f"the parameter const {parameter} is const, but {name} is {what}",
            f"{parameter}",
            fix="remove const, or correct the schema",
        )
    if any(tensor.name == name for tensor in schema.tensors):
        raise _wrong(
            schema,
            f"the parameter {parameter} is not const, but {name} is only read",
            f"const {parameter}; or Tensor(a!) {name} in the schema, if the kernel writes it",
            fix=f"write const {parameter}",
        )


def _check_launch(schema: KernelSchema, options: KernelOptions, signature: CudaSignature) -> None:
    """A grid and a block that are constants are within CUDA's limits."""
    grid, block = (
        None if given is None or callable(given) else _three_of(label, given, schema)
        for label, given in (("grid", options.grid), ("block", options.block))
    )
    found, required = launch_error(grid, block, signature.bounds)
    if not found and isinstance(options.shared, int) and options.shared < 0:
        found, required = f"shared {options.shared}", "a number of bytes"
    if not found and grid and 0 in grid:
        found, required = f"grid {grid}, which launches nothing", "at least one block"
    if found:
        raise _wrong(schema, found, required, fix="correct grid=, block= or shared=")


def _three_of(label: str, given: Any, schema: KernelSchema) -> tuple[int, int, int]:
    sizes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int) for size in sizes):
        raise _wrong(
            schema,
            f"{label} is {given!r}",
            "a whole number, up to three of them, or a function that returns such",
        )
    return (*sizes, 1, 1)[:3]


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
        return _evaluated(f"_args_{name}", options.args[name], schema, functions, known)
    found = next((argument for argument in schema.arguments if argument.name == name), None)
    if found and found.tensor != pointer:
        what = "a tensor, whose pointer it would be" if found.tensor else "no tensor"
        raise _wrong(
            schema,
            f"the parameter {name} of {signature.name} and the argument {found.type} {name} do not"
            f" fit: that is {what}",
            "one of their kind",
        )
    if found and found.tensor and found.optional:
        return f"(0 if {name} is None else {name}.data_ptr())"
    if found or name in schema.results:
        if not found and not pointer:
            raise _wrong(schema, f"the parameter {name} is a result, and no pointer", f"T* {name}")
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
        return f"{_counted(schema)}.numel()"
    one = schema.first or schema.results[0]
    sizes = f"{one}_numel, {one}_size0, {one}_stride0, n (elements of {_counted(schema)})"
    raise _wrong(
        schema,
        f"nothing says what the parameter {name} of {signature.name} (line {signature.line}) gets",
        f"a name of the schema ({', '.join(known)}), a size ({sizes}), or args={{{name!r}: lambda"
        f" {', '.join(a.name for a in schema.arguments)}: ...}}",
    )


def _counted(schema: KernelSchema) -> str:
    """The tensor whose elements a kernel goes through if nothing else is said."""
    mutable = [tensor.name for tensor in schema.tensors if tensor.mutable]
    return [*schema.results, *mutable, schema.first][0]


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
                _evaluated(
                    f"_template_{one.name}", options.template[one.name], schema, functions, inputs
                ),
            )
        elif one.kind != "typename" and one.name in inputs:
            given = next(a.type for a in schema.arguments if a.name == one.name)
            if given not in ("int", "bool", "SymInt"):
                raise _wrong(
                    schema,
                    f"the template's {one.kind} {one.name} and the argument {given} {one.name}",
                    "an argument that is an int or a bool; each of its values is a kernel",
                    fix=f"make {one.name} a parameter of the kernel",
                )
            yield one.name, one.name
        elif one.kind != "typename" and not one.has_default:
            raise _wrong(
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
            raise _wrong(schema, f"no tensor determines the template's type {one.name}", required)
    if unknown := sorted(set(options.template) - {one.name for one in signature.template}):
        have = ", ".join(one.name for one in signature.template) or "none"
        raise _wrong(
            schema,
            f"template names {', '.join(unknown)}",
            f"the template's parameters of {signature.name}: {have}",
        )


def _deduced(name: str, signature: CudaSignature, schema: KernelSchema) -> bool:
    tensors = {*(tensor.name for tensor in schema.tensors), *schema.results}
    return any(
        one.pointer and one.type == name and one.name in tensors for one in signature.parameters
    )


def _evaluated(
    label: str, given: Any, schema: KernelSchema, functions: dict[str, Any], known: Sequence[str]
) -> str:
    """A constant, or a call of what was given by name with those of ``known`` that it asks for."""
    functions[label] = given
    if not callable(given):
        return label
    try:
        parameters = list(inspect.signature(given).parameters.values())
    except (TypeError, ValueError):  # some built-in functions
        parameters = None
    if parameters is None or any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return f"{label}({', '.join(argument.name for argument in schema.arguments)})"
    if unknown := [
        one.name for one in parameters if one.name not in known and one.default is one.empty
    ]:
        what = label.strip("_").removesuffix("_of").replace("_", " of ", 1)
        raise _wrong(
            schema,
            f"the function given for {what} asks for {', '.join(unknown)}",
            f"names of the schema: {', '.join(known)}",
        )
    by_name = {
        one.name: f"{one.name}={one.name}" if one.kind is one.KEYWORD_ONLY else one.name
        for one in parameters
    }
    return f"{label}({', '.join(text for name, text in by_name.items() if name in known)})"


def _run(
    made: Sequence[str],
    schema: KernelSchema,
    options: KernelOptions,
    bound: Bound,
    known: Sequence[str],
) -> Iterable[str]:
    inputs, functions = [argument.name for argument in schema.arguments], bound.functions
    yield from _on_its_device(schema)
    yield from made
    yield f"_key = ({_key(schema, bound)},)"
    yield "_kernel = _kernels.get(_key)"
    yield "if _kernel is None:"
    everything = ", ".join(f"{name!r}: {name}" for name in known)
    template = ", ".join(f"{name!r}: {text}" for name, text in bound.template)
    yield f"    _kernel = _prepare(_key, _device, {{{everything}}}, {{{template}}})"
    yield from _dimensions("_block", options.block, schema, functions, inputs)
    if options.grid is None:
        count = f"{_counted(schema)}.numel()"
        yield f"_grid_x, _grid_y, _grid_z = -(-{count} // (_block_x * _block_y * _block_z)), 1, 1"
    else:
        yield from _dimensions("_grid", options.grid, schema, functions, known)
    yield f"if _grid_x * _grid_y * _grid_z == 0: {_returned(schema)}"
    yield f"_shared = {_evaluated('_shared_of', options.shared, schema, functions, known)}"
    if callable(options.shared) or options.shared > 0:
        yield "if _shared > _WITHOUT_ASKING: _allow(_kernel, _shared, _device)"
    yield from _launched(
        schema,
        options,
        bound.values,
        "_grid_x, _grid_y, _grid_z",
        "_block_x, _block_y, _block_z",
        "_shared",
    )


def _run_again(
    signature: CudaSignature, schema: KernelSchema, options: KernelOptions, bound: Bound
) -> Iterable[str]:
    """The same where all but the values follows from dtypes and the first result's shape: that is
    worked out once for each. Nothing, where it does not."""
    pointers = _pointers(signature)
    functions = (options.grid, options.block, options.shared, options.out)
    if (
        any(map(callable, functions))
        or options.grid is not None
        or len(schema.results) != 1
        or not schema.tensors
        or options.strided
        or _like(schema, options) not in pointers
    ):
        return
    like = _like(schema, options)
    yield from _on_its_device(schema)
    checks = [argument.name for argument in schema.arguments]
    yield from _checked(schema, options, bound.functions, checks)
    yield from _contiguous(schema, pointers)
    yield f"_key = ({_key(schema, bound)}, {like}.shape)"
    yield "_plan = _plans.get(_key)"
    yield (
        f"if _plan is None: return _remember(_key, {like},"
        f" _run({', '.join(argument.name for argument in schema.arguments)}))"
    )
    yield "_kernel, _grid_x, _n, _size, _stride = _plan"
    yield f"{schema.results[0]} = _empty_strided(_size, _stride, {like}.dtype)"
    values = ["_n" if value == f"{schema.results[0]}.numel()" else value for value in bound.values]
    block = (
        *(options.block if isinstance(options.block, (tuple, list)) else (options.block,)),
        1,
        1,
    )[:3]
    yield from _launched(
        schema, options, values, "_grid_x, 1, 1", ", ".join(map(str, block)), str(options.shared)
    )


def _on_its_device(schema: KernelSchema) -> Iterable[str]:
    place = f"{schema.first}.get_device()" if schema.first else f"_index_of({schema.device})"
    yield f"_device = {place}"
    if schema.inner:
        return
    yield "if _device != _current_device():"
    yield (
        "    with _guard(_device): return"
        f" _run({', '.join(argument.name for argument in schema.arguments)})"
    )


def _launched(
    schema: KernelSchema,
    options: KernelOptions,
    values: Sequence[str],
    grid: str,
    block: str,
    shared: str,
) -> Iterable[str]:
    given = "".join(f"{value}, " for value in values)
    yield "_memory, _config, _attribute, _parameters, _extra = _buffers.all"
    yield "try:"
    attributes = bool(options.cluster) + options.cooperative
    attribute = f"_attribute, {attributes}" if attributes else "0, 0"
    yield (
        f"    _pack(_memory, 0, {grid}, {block}, {shared}, _stream(_device), {attribute}, {given})"
    )
    yield "except _NOT_PACKED:"
    yield f"    _explain(({grid}), ({block}), {shared}, ({given}))"
    yield "    raise"
    yield "_status = _launch(_config, _kernel, _parameters, _extra)"
    yield (
        "if _status: _failed(_status, _device, (_config, _kernel, _parameters, _extra),"
        f" ({grid}), ({block}), {shared})"
    )
    written = (tensor.name for tensor in schema.tensors if tensor.mutable and not tensor.local)
    yield from (f"_count_write({name})" for name in written)
    yield _returned(schema)


def _made(
    pointers: Container[str],
    schema: KernelSchema,
    options: KernelOptions,
    functions: dict[str, Any],
) -> Iterable[str]:
    """Lines that check the arguments, make contiguous what becomes a pointer, and make the results:
    of fake tensors, too."""
    inputs = [argument.name for argument in schema.arguments]
    yield from _checked(schema, options, functions, inputs)
    if not options.strided:
        yield from _contiguous(schema, pointers)
    if callable(options.out):
        made = _evaluated("_out", options.out, schema, functions, inputs)
        yield f"{', '.join(schema.results)} = _results({made})"
    elif schema.results:
        yield f"{schema.results[0]} = _empty_like({_like(schema, options)})"


def _checked(
    schema: KernelSchema, options: KernelOptions, functions: dict[str, Any], inputs: Sequence[str]
) -> Iterable[str]:
    """Lines that raise for shapes that are not as ``shapes`` says, and call ``check``."""
    optional = {tensor.name: tensor.optional for tensor in schema.tensors}
    for name, text in options.shapes.items():
        if name not in optional:
            raise _wrong(schema, f"shapes names {name}", f"tensors: {', '.join(optional)}")
        there = f"{name} is not None and " if optional[name] else ""
        if text.startswith("as "):
            yield _broadcast(name, text.removeprefix("as "), there, schema)
            continue
        try:
            parts = dimensions(text)
        except ValueError as error:
            found = f"shapes says {text!r} of {name}: {error}"
            raise _wrong(schema, found, "such as x, x[-1], x[:-1], 3") from None
        sizes = []
        for part in parts:
            if part.name and (part.many or part.name not in inputs or optional.get(part.name)):
                found = f"shapes says {text!r} of {name}"
                raise _wrong(schema, found, f"arguments that are always given: {', '.join(inputs)}")
            whole = part.name in optional and not part.single
            if part.name in optional and part.single:
                at = part.first or 0
                least = -at if at < 0 else at + 1
                yield f"if {part.name}.dim() < {least}: _refuse_dims({part.name!r}, {least})"
            sizes.append(_size(part, whole, part.name in optional))
        wanted = f"({''.join(f'{size}, ' for size in sizes)})"
        yield f"if {there}{name}.shape != {wanted}: _refuse_shape({name!r}, {wanted}, {name}.shape)"
    if options.check is not None:
        yield _evaluated("_check", options.check, schema, functions, inputs)


def _broadcast(name: str, other: str, there: str, schema: KernelSchema) -> str:
    """The line that expands a tensor to another one's shape."""
    found = {one.name: one for one in schema.tensors}
    if other not in found or found[other].optional or found[name].mutable or other == name:
        raise _wrong(
            schema,
            f"shapes says 'as {other}' of {name}",
            "a tensor that is only read, and another one that is always given",
        )
    unlike = f"{there}{name}.shape != {other}.shape"
    return f"if {unlike}: {name} = _broadcast({name!r}, {name}, {other!r}, {other}.shape)"


def _size(part: Dimensions, whole: bool, tensor: bool) -> str:
    """A part of a shape in Python."""
    if not part.name:
        return str(part.number)
    if whole:
        first, last = part.first or "", "" if part.last is None else part.last
        return f"*{part.name}.shape[{first}:{last}]"
    one = f"{part.name}.shape[{part.first or 0}]" if tensor else part.name
    return f"{one} * {part.times} // {part.over} + {part.plus}"


def _contiguous(schema: KernelSchema, pointers: Container[str]) -> Iterable[str]:
    for tensor in schema.tensors:
        if tensor.name in pointers and (tensor.local or not schema.inner):
            there = f"{tensor.name} is not None and " if tensor.optional else ""
            yield f"if {there}not {tensor.name}.is_contiguous():"
            yield (
                f"    _refuse_strides({tensor.name!r})"
                if tensor.mutable
                else f"    {tensor.name} = {tensor.name}.contiguous()"
            )


def _like(schema: KernelSchema, options: KernelOptions) -> str:
    """The tensor that the one result is like."""
    given = options.out or schema.first
    names = [tensor.name for tensor in schema.tensors if not tensor.optional]
    if len(schema.results) != 1 or given not in names:
        like = f"one of {', '.join(names)}, which the one result is like, or " if names else ""
        raise _wrong(
            schema, f"out is {options.out!r}", f"{like}a function that returns the result(s)"
        )
    return str(given)


def _returned(schema: KernelSchema) -> str:
    return f"return {', '.join(schema.results)}".rstrip()


def _dimensions(
    label: str, given: Any, schema: KernelSchema, functions: dict[str, Any], known: Sequence[str]
) -> Iterable[str]:
    """Lines that give ``<label>_x``, ``_y`` and ``_z`` from a number, up to three of them, or a
    function that returns such."""
    names = ", ".join(f"{label}_{axis}" for axis in "xyz")
    if not callable(given):
        yield f"{names} = {', '.join(map(str, _three_of(label.strip('_'), given, schema)))}"
        return
    text = _evaluated(f"{label}_of", given, schema, functions, known)
    yield f"{label} = {text}"
    yield f"if type({label}) is int: {names} = {label}, 1, 1"
    yield f"else: {names} = _three({label.strip('_')!r}, {label})"


def _key(schema: KernelSchema, bound: Bound) -> str:
    """What decides which compiled kernel a call takes, and all that is checked of its tensors: a
    new combination is looked at by ``_prepare``."""
    pieces = ["_device"]
    if not schema.tensors:
        pieces += [f"{result}.dtype" for result in schema.results]
    for tensor in schema.tensors:
        alone = (
            f"{tensor.name}.dtype"
            if tensor.name == schema.first
            else f"{tensor.name}.dtype, {tensor.name}.get_device()"
        )
        pieces.append(
            f"(None if {tensor.name} is None else ({alone}))" if tensor.optional else alone
        )
    return ", ".join([*pieces, *(text for _, text in bound.template)])


def _call(schema: KernelSchema, launch: Iterable[str]) -> str:
    """``__call__``: past the dispatcher where nothing but the kernel would come of it, else by it.
    The launch stands in it once more: a call costs."""
    positional = [_declared(argument) for argument in schema.arguments if not argument.keyword_only]
    keywords = [_declared(argument) for argument in schema.arguments if argument.keyword_only]
    declared = ", ".join(["_self", *positional, *(["*", *keywords] if keywords else [])])
    forwarded = ", ".join(
        f"{one.name}={one.name}" if one.keyword_only else one.name for one in schema.arguments
    )
    if not schema.tensors:
        default = f"    if {schema.device} is None: {schema.device} = _usual_device()\n"
        return f"def __call__({declared}):\n{default}    return _op({forwarded})\n"
    names = ", ".join(argument.name for argument in schema.arguments)
    conditions = []
    nones = "".join(
        f"        if {one.name} is None: _refuse_none({one.name!r})\n"
        for one in schema.tensors
        if not one.optional
    )
    for tensor in schema.tensors:
        plain = f"type({tensor.name}) in _PLAIN and {tensor.name}.is_cuda"
        conditions.append(
            f"not ({tensor.name} is None or {plain})" if tensor.optional else f"not ({plain})"
        )
    grads = " or ".join(
        (
            f"({one.name} is not None and {one.name}.requires_grad)"
            if one.optional
            else f"{one.name}.requires_grad"
        )
        for one in schema.tensors
    )
    conditions += ["_modes()", f"(({grads}) and _is_grad_enabled())"]
    return (
        f"def __call__({declared}):\n"
        "    if _is_compiling() or _compiler._is_compiling_flag:\n"
        f"        return _op({forwarded})\n"
        "    if _is_transforming() or _forward_mode._current_level >= 0:\n"
        f"        return _transformed({names})\n"
        f"    if {' or '.join(conditions)}:\n"
        f"{nones}"
        f"        return _op({forwarded})\n"
        "    try:\n"
        f"{''.join(f'        {line}' + chr(10) for line in launch)}"
        "    except _MISSING as error:\n"
        f"        return _fall_back(error, ({names},))\n"
    )


def _declared(argument: KernelArgument) -> str:
    return f"{argument.name}=_default_{argument.name}" if argument.has_default else argument.name


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


def _wrong(
    schema: KernelSchema, found: str, required: str, fix: str = "see docs/kernels.md"
) -> FlexopsError:
    what = f"flexops.kernel: {schema.text} and its kernel do not fit together"
    return FlexopsError(what, found=found, required=required, fix=fix)
