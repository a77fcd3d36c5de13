"""The Python of a call, written once when a kernel is defined.

The text for ``scale(Tensor x, float factor) -> Tensor`` and ``scale(const T* x, T* out, float
factor, int64_t n)`` is, in short,

    out = empty_like(x)
    kernel = kernels.get((device, x.dtype)) or prepare(...)
    pack_into(memory, 0, grid, 1, 1, 256, 1, 1, 0, stream, ...,
              x.data_ptr(), out.data_ptr(), factor, out.numel())
    launch(config, kernel, None, extra)

so that a call costs what these lines cost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..build.describe.schema import Dimensions, dimensions
from ..errors import FlexopsError
from .options import KernelOptions
from .schema import KernelArgument, KernelSchema

Function = Callable[..., Any]


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


def written(
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
        said = evaluated("_reference", reference, schema, bound.functions, inputs)
        refer = [
            *_checked(schema, options, bound.functions, inputs),
            f"{'return ' if schema.results else ''}{said}",
        ]
    common = {
        "fake": [*made, returned(schema)],
        "complete": [f"return {{{', '.join(f'{name!r}: {name}' for name in inputs)}}}"],
        "refer": refer,
    }
    text = "".join(
        defined(name, schema, lines) for name, lines in (*pieces.items(), *common.items()) if lines
    )
    return bound._replace(text=text + call(schema, again or pieces["run"]))


def run(
    made: Sequence[str],
    schema: KernelSchema,
    options: KernelOptions,
    bound: Bound,
    known: Sequence[str],
) -> Iterable[str]:
    inputs, functions = [argument.name for argument in schema.arguments], bound.functions
    yield from on_its_device(schema)
    yield from made
    yield f"_key = ({_key(schema, bound)},)"
    yield "_kernel = _kernels.get(_key)"
    yield "if _kernel is None:"
    everything = ", ".join(f"{name!r}: {name}" for name in known)
    template = ", ".join(f"{name!r}: {text}" for name, text in bound.template)
    yield f"    _kernel = _prepare(_key, _device, {{{everything}}}, {{{template}}})"
    yield from _dimensions("_block", options.block, schema, functions, inputs)
    if options.grid is None:
        count = f"{counted(schema)}.numel()"
        yield f"_grid_x, _grid_y, _grid_z = -(-{count} // (_block_x * _block_y * _block_z)), 1, 1"
    else:
        yield from _dimensions("_grid", options.grid, schema, functions, known)
    yield f"if _grid_x * _grid_y * _grid_z == 0: {returned(schema)}"
    yield f"_shared = {evaluated('_shared_of', options.shared, schema, functions, known)}"
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


def run_again(
    pointers: Container[str], schema: KernelSchema, options: KernelOptions, bound: Bound
) -> Iterable[str]:
    """The same where all but the values follows from dtypes and the first result's shape: that is
    worked out once for each. Nothing, where it does not."""
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
    yield from on_its_device(schema)
    checks = [argument.name for argument in schema.arguments]
    yield from _checked(schema, options, bound.functions, checks)
    yield from _contiguous(schema, pointers)
    yield f"_key = ({_key(schema, bound)}, {like}.shape)"
    yield "_plan = _plans.get(_key)"
    yield (
        f"if _plan is None: return _remember(_key, {like},"
        f" run({', '.join(argument.name for argument in schema.arguments)}))"
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


def on_its_device(schema: KernelSchema) -> Iterable[str]:
    place = f"{schema.first}.get_device()" if schema.first else f"_index_of({schema.device})"
    yield f"_device = {place}"
    if schema.inner:
        return
    yield "if _device != _current_device():"
    yield (
        "    with _guard(_device): return"
        f" run({', '.join(argument.name for argument in schema.arguments)})"
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
    yield returned(schema)


def made_first(
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
        made = evaluated("_out", options.out, schema, functions, inputs)
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
            raise mismatch(schema, f"shapes names {name}", f"tensors: {', '.join(optional)}")
        there = f"{name} is not None and " if optional[name] else ""
        if text.startswith("as "):
            yield _broadcast(name, text.removeprefix("as "), there, schema)
            continue
        try:
            parts = dimensions(text)
        except ValueError as error:
            found = f"shapes says {text!r} of {name}: {error}"
            raise mismatch(schema, found, "such as x, x[-1], x[:-1], 3") from None
        sizes = []
        for part in parts:
            if part.name and (part.many or part.name not in inputs or optional.get(part.name)):
                found = f"shapes says {text!r} of {name}"
                raise mismatch(
                    schema, found, f"arguments that are always given: {', '.join(inputs)}"
                )
            whole = part.name in optional and not part.single
            if part.name in optional and part.single:
                at = part.first or 0
                least = -at if at < 0 else at + 1
                yield f"if {part.name}.dim() < {least}: _refuse_dims({part.name!r}, {least})"
            sizes.append(_size(part, whole, part.name in optional))
        wanted = f"({''.join(f'{size}, ' for size in sizes)})"
        yield f"if {there}{name}.shape != {wanted}: _refuse_shape({name!r}, {wanted}, {name}.shape)"
    if options.check is not None:
        yield evaluated("_check", options.check, schema, functions, inputs)


def _broadcast(name: str, other: str, there: str, schema: KernelSchema) -> str:
    """The line that expands a tensor to another one's shape."""
    found = {one.name: one for one in schema.tensors}
    if other not in found or found[other].optional or found[name].mutable or other == name:
        raise mismatch(
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
        raise mismatch(
            schema, f"out is {options.out!r}", f"{like}a function that returns the result(s)"
        )
    return str(given)


def returned(schema: KernelSchema) -> str:
    return f"return {', '.join(schema.results)}".rstrip()


def _dimensions(
    label: str, given: Any, schema: KernelSchema, functions: dict[str, Any], known: Sequence[str]
) -> Iterable[str]:
    """Lines that give ``<label>_x``, ``_y`` and ``_z`` from a number, up to three of them, or a
    function that returns such."""
    names = ", ".join(f"{label}_{axis}" for axis in "xyz")
    if not callable(given):
        yield f"{names} = {', '.join(map(str, three_of(label.strip('_'), given, schema)))}"
        return
    text = evaluated(f"{label}_of", given, schema, functions, known)
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


def call(schema: KernelSchema, launch: Iterable[str]) -> str:
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


def defined(name: str, schema: KernelSchema, lines: Iterable[str]) -> str:
    declared = ", ".join(map(_declared, schema.arguments))
    return f"def {name}({declared}):\n" + "".join(f"    {line}\n" for line in lines)


def evaluated(
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
        raise mismatch(
            schema,
            f"the function given for {what} asks for {', '.join(unknown)}",
            f"names of the schema: {', '.join(known)}",
        )
    by_name = {
        one.name: f"{one.name}={one.name}" if one.kind is one.KEYWORD_ONLY else one.name
        for one in parameters
    }
    return f"{label}({', '.join(text for name, text in by_name.items() if name in known)})"


def counted(schema: KernelSchema) -> str:
    """The tensor whose elements a kernel goes through if nothing else is said."""
    mutable = [tensor.name for tensor in schema.tensors if tensor.mutable]
    return [*schema.results, *mutable, schema.first][0]


def three_of(label: str, given: Any, schema: KernelSchema) -> tuple[int, int, int]:
    sizes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int) for size in sizes):
        raise mismatch(
            schema,
            f"{label} is {given!r}",
            "a whole number, up to three of them, or a function that returns such",
        )
    return (*sizes, 1, 1)[:3]


def mismatch(
    schema: KernelSchema, found: str, required: str, fix: str = "see docs/kernels.md"
) -> FlexopsError:
    what = f"flexops.kernel: {schema.text} and its kernel do not fit together"
    return FlexopsError(what, found=found, required=required, fix=fix)
