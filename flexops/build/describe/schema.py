"""An operator's schema and what else its declaration says, read without torch: from this its
binding is written, and its checks and fake kernel are made."""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...errors import FlexopsError
from .declaration import Declared, Output, Rows, in_words

DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "bool": "boolean",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
"""torch's names of the dtypes that bindings tell apart, and those of ``Dtype`` in
``csrc/common/tensor_view.h``."""
FLOATS = ("float32", "float16", "bfloat16")
SPLITS = ("elements", "rows", "whole", "host")

RESERVED = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t
    char32_t char8_t class co_await co_return co_yield compl concept const const_cast
    consteval constexpr constinit continue decltype default delete do double dynamic_cast
    else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public
    register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid
    typename union unsigned using virtual void volatile wchar_t while xor xor_eq""".split()  # noqa: SIM905
)
TAKEN_NAMESPACES = ("aten", "c10", "flexops", "higher_order", "prim", "prims", "std", "torch")
"""Namespaces of operators that no project may use."""
_BINDINGS = frozenset(
    """begin broadcast check_device check_dtype check_launch check_number check_shape contiguous
    cpu_isa current_stream dtype_name dtype_of_code element_type empty end flexops guard_
    Host host host_ it_ kernel_ kOp on_this_device_type parallel_for pointer_to Shape
    size_of std stream table_ take TensorTable type_ view_of""".split()  # noqa: SIM905
)
"""What bindings and launchers call so themselves, beside ``<argument>_view``, ``_work``,
``_strides`` and ``_dtype``."""

_SCHEMA = re.compile(
    r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*->\s*(\(.*\)|[^()]+(?:\([a-z]!?\))?[^()]*)\s*", re.DOTALL
)
_ARGUMENT = re.compile(
    r"(Tensor|SymInt|int|float|bool|ScalarType)(\([a-z]!\))?(\[\])?(\?)?\s+([A-Za-z_]\w*)"
)
_RESULT = re.compile(r"Tensor(?:\s+([A-Za-z_]\w*))?")
_DIMENSIONS = re.compile(
    r"(?:([A-Za-z_]\w*)(?:\[(-?\d+)?(?:(:)(-?\d+)?)?\])?|(\d+)|len\(([A-Za-z_]\w*)\))(?:\s*(\*|//)\s*([1-9]\d*))?(?:\s*\+\s*(\d+))?"
)
LAYOUTS = ("any", "columns", "rows", "aligned", "aligned columns", "aligned rows")
"""How a launcher takes a tensor that need not be contiguous; beside ``as x``, for what is broadcast
to x. ``columns``: elements of the last dimension are neighbours; other strides are any."""
MOST_ARRAYS = 6
"""Of a row: ``TensorRow::kMostArrays``."""
_EXAMPLE = "name(Tensor x, Tensor? mask, float factor) -> Tensor"


class Argument(NamedTuple):
    """One argument: ``type`` without what makes it written, optional or a list."""

    name: str
    type: str
    optional: bool = False
    many: bool = False
    written: bool = False


class Schema(NamedTuple):
    """``name(arguments) -> (results)``; results are tensors, by name."""

    name: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]

    def find(self, name: str) -> Argument | None:
        return next((argument for argument in self.arguments if argument.name == name), None)


def parse(text: str) -> Schema:
    """The schema in a text.

    Raises:
        FlexopsError: it is none, or has types that the builder does not know.
    """
    match = _SCHEMA.fullmatch(text)
    if match is None:
        raise _unread(text, "it has not the form name(arguments) -> results")
    arguments = tuple(_argument(text, one) for one in _split(match[2]))
    listed = match[3].strip()
    results = _split(listed[1:-1] if listed.startswith("(") else listed)
    names = []
    for number, result in enumerate(results):
        found = _RESULT.fullmatch(result)
        if found is None:
            raise _unread(
                text,
                f"{result!r} is no result that the builder knows: Tensor, several of them in"
                " parentheses, or ()",
            )
        names.append(found[1] or ("out" if len(results) == 1 else f"out{number}"))
    every = [argument.name for argument in arguments] + names
    if reserved := sorted(RESERVED.intersection(every)):
        raise _unread(
            text, f"{', '.join(reserved)} is a word of C++, in which the launcher is written"
        )
    if words := [one.name for one in arguments if keyword.iskeyword(one.name)]:
        raise _unread(
            text, f"{', '.join(words)} is a word of Python, in which the reference is written"
        )
    if used := sorted(
        _BINDINGS.union(
            f"{name}_{what}" for name in every for what in ("view", "work", "strides", "dtype")
        ).intersection(every)
    ):
        raise _unread(text, f"{', '.join(used)} is what the binding calls something else")
    if repeated := sorted({name for name in every if every.count(name) > 1}):
        raise _unread(text, f"{', '.join(repeated)} stands there twice")
    return Schema(match[1], arguments, tuple(names))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _argument(schema: str, text: str) -> Argument:
    if "=" in text or text == "*":
        raise _unread(
            schema,
            f"{text!r}: defaults and keyword-only arguments are the Python function's, not the"
            " schema's",
        )
    match = _ARGUMENT.fullmatch(text)
    if (
        match is None
        or ((match[2] or match[3]) and match[1] != "Tensor")
        or (match[3] and match[4])
        or (match[1] == "ScalarType" and match[4])
    ):
        known = (
            "Tensor, Tensor?, Tensor[], Tensor(a!), float, int, bool, ScalarType, and float?, int?,"
            " bool?"
        )
        raise _unread(schema, f"{text!r} is no argument that the builder knows: {known}")
    return Argument(
        match[5], match[1].replace("SymInt", "int"), bool(match[4]), bool(match[3]), bool(match[2])
    )


def _unread(schema: str, found: str) -> FlexopsError:
    return FlexopsError(
        f"the schema {schema!r} cannot be read",
        found=found,
        required=f"such as {_EXAMPLE}",
        fix="correct the schema",
    )


# ---- what a declaration says beside the schema ----


class Dimensions(NamedTuple):
    """A part of a shape: dimensions [first, last) of a tensor, one of them (``single``), the value
    of an argument, how many tensors it holds (``many``), or a number (no ``name``); ``times`` a
    number, and divided by one (``over``), and one added (``plus``)."""

    name: str = ""
    first: int | None = None
    last: int | None = None
    single: bool = False
    number: int = 0
    many: bool = False
    times: int = 1
    over: int = 1
    plus: int = 0


class Signature(NamedTuple):
    """An operator as it is declared. A NamedTuple, which is made faster than a dataclass: a first
    call needs it.

    Attributes:
        schema: its schema.
        dtypes: for tensor arguments, which dtypes they may have, or (one item, an argument's name)
            whose they must have.
        shapes: for tensor arguments, which shape they must have, in ``Output``'s words.
        strided: tensor arguments that the launcher takes otherwise than contiguous, and how: one of
            ``LAYOUTS``, or ``as x``.
        outputs: one for each result.
        split: what the CPU's launcher is given a part of: ``elements`` or ``rows`` of the first
            result (or of what is written), or the ``whole``; ``host``: a function of the family's
            own is called instead of launchers.
        rows: the lists that the launcher gets as rows.
        numbers: tensor arguments of one float32 element, whose address the launcher gets.
        plain: whether it is registered as ``<name>_plain``, too (``ops/_register.py``).
        alike: tensors of ``FLOATS`` that are cast to float32 unless they have one dtype; results of
            their dtypes are computed in float32 then, and cast.
        overload: which one it is of its operator: the end of ``schema.name``, after ``_``.
    """

    schema: Schema
    dtypes: tuple[tuple[str, tuple[str, ...]], ...]
    shapes: tuple[tuple[str, str], ...]
    strided: tuple[tuple[str, str], ...]
    outputs: tuple[Output, ...]
    split: str
    rows: Rows | None = None
    numbers: tuple[str, ...] = ()
    plain: bool = False
    alike: tuple[str, ...] = ()
    overload: str = ""

    @property
    def registered(self) -> str:
        """Its name in torch."""
        name, end = self.schema.name, self.overload
        return f"{name.removesuffix(f'_{end}')}.{end}" if end else name

    @property
    def first(self) -> str:
        """The tensor whose device, and without other word whose shape and dtype, counts; or the
        list, of rows, whose first one is that."""
        if self.rows:
            return self.rows.lists[0]
        return next(
            argument.name
            for argument in self.schema.arguments
            if argument.type == "Tensor" and not argument.optional and not argument.many
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.schema.arguments)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.schema.arguments if argument.written)

    def layout(self, name: str) -> str:
        """How the launcher takes a tensor: "" for contiguous, or one of ``LAYOUTS``, or ``as`` with
        another tensor's name."""
        return dict(self.strided).get(name, "")


def declare(
    schema: str,
    *,
    dtypes: Mapping[str, object] | None = None,
    shapes: Mapping[str, str] | None = None,
    strided: Sequence[str] | Mapping[str, str] = (),
    outputs: Sequence[Output] = (),
    split: str = "elements",
    rows: Rows | None = None,
    numbers: Sequence[str] = (),
    plain: bool = False,
    alike: Sequence[str] = (),
    overload: str = "",
) -> Signature:
    """A signature, complete and checked.

    Raises:
        FlexopsError: the schema cannot be read, or a constraint names what the schema has not.
    """
    read = parse(schema)
    _check_kinds(read, rows, dtypes=dtypes, shapes=shapes, strided=strided, numbers=numbers)
    tensors = [argument.name for argument in read.arguments if argument.type == "Tensor"]
    first = next(
        (
            argument.name
            for argument in read.arguments
            if argument.type == "Tensor" and not argument.optional and not argument.many
        ),
        None,
    )
    if rows:
        _check_rows(read, rows)
        first = rows.lists[0]
    if first is None:
        raise _unread(
            schema, "it has no argument of type Tensor, whose device would say which kernel runs"
        )
    asked = {name: _dtypes(value) for name, value in (dtypes or {}).items()}
    asked |= {name: ("float32",) for name in (*numbers, rows.steps if rows else "") if name}
    every = tuple(
        (name, asked.get(name, FLOATS if name == first or rows else (first,))) for name in tensors
    )
    if outputs and len(outputs) != len(read.results):
        raise FlexopsError(
            f"{read.name} declares {len(outputs)} outputs",
            required=f"one for each of its {len(read.results)} results",
            fix="correct outputs=",
        )
    if strange := [one for one in outputs if not isinstance(one, Output)]:
        fix = f"outputs=builder.Output({strange[0]!r})"
        raise FlexopsError(
            f"{read.name}: outputs cannot be understood",
            found=repr(strange[0]),
            required="builder.Output, one for each result",
            fix=fix,
        )
    made = tuple(
        one._replace(dtype=str(one.dtype).removeprefix("torch."))  # a torch.dtype, too
        for one in outputs or (Output(),) * len(read.results)
    )
    # no copy replaces them
    lists = {
        argument.name: "any" for argument in read.arguments if argument.many and argument.written
    }
    layouts = dict(strided) if isinstance(strided, Mapping) else dict.fromkeys(strided, "any")
    signature = Signature(
        read,
        every,
        tuple((shapes or {}).items()),
        tuple((layouts | lists).items()),
        made,
        split,
        rows,
        tuple(numbers),
        plain,
        tuple(alike),
        overload,
    )
    _check(signature, asked)
    return signature


@functools.cache
def signature_of(one: Declared) -> Signature:
    """Of an operator of flexops' own."""
    name, _, overload = one.name.partition(".")
    text = without_defaults(one.schema).replace(f"{name}.", f"{name}_", 1)
    return declare(text, overload=overload, **{"split": "host", **one.said})


def without_defaults(schema: str) -> str:
    """The schema as ``parse`` takes it: what the arguments are that a call leaves out, and which go
    by name only, is nothing to a binding."""
    return re.sub(r"\*, |=[^,)]+", "", schema)


def dimensions(text: str) -> tuple[Dimensions, ...]:
    """The parts of a shape; ``ValueError`` if it is none."""
    parts: list[Dimensions] = []
    for item in [] if text == "[]" else _split(text):
        match = _DIMENSIONS.fullmatch(item)
        if match is None:
            raise ValueError(item)
        name, begin, colon, end, number, counted, sign, factor, added = match.groups()
        if counted:
            part = Dimensions(counted, many=True)
        elif number:
            part = Dimensions(number=int(number))
        elif colon:
            part = Dimensions(name, int(begin or 0), None if end is None else int(end))
        elif begin:
            part = Dimensions(name, int(begin), single=True)
        else:
            part = Dimensions(name)
        if (not begin and not colon and "[" in item) or ((sign or added) and colon):
            raise ValueError(item)
        parts.append(
            part._replace(times=int(factor))
            if sign == "*"
            else part._replace(over=int(factor))
            if sign
            else part
        )
        parts[-1] = parts[-1]._replace(plus=int(added or 0))
    return tuple(parts)


def _dtypes(value: object) -> tuple[str, ...]:
    one = isinstance(value, str) or not isinstance(value, (tuple, list))
    return tuple(str(item).removeprefix("torch.") for item in ((value,) if one else value))  # type: ignore[attr-defined]


def _refused(schema: Schema, what: str, found: str, required: str) -> FlexopsError:
    return FlexopsError(
        f"{schema.name}: {what} cannot be understood",
        found=found,
        required=required,
        fix=f"correct {what.partition('[')[0]}=",
    )


def _check_kinds(schema: Schema, rows: object, **given: object) -> None:
    """Raise for what is no mapping, and for a text where several names are meant."""
    for what, value in given.items():
        mapping = isinstance(value, Mapping)
        if what in ("dtypes", "shapes") and value is not None and not mapping:
            raise _refused(schema, what, repr(value), "a mapping: tensor argument -> what it is")
        if what in ("strided", "numbers") and not mapping and not isinstance(value, (list, tuple)):
            raise _refused(schema, what, repr(value), f"several names: ({value!r},)")
        if what == "dtypes" and mapping and () in value.values():  # type: ignore[attr-defined]
            raise _refused(schema, what, repr(value), "one dtype or more for each")
        if what == "shapes" and mapping:
            for name, text in value.items():  # type: ignore[attr-defined]
                if not isinstance(text, str):
                    required = "text, such as 'x[:-1], 4'"
                    raise _refused(schema, what, f"{text!r} for {name}", required)
    if rows is not None and not isinstance(rows, Rows):
        raise _refused(schema, "rows", repr(rows), "builder.Rows(lists, steps)")


def _check_rows(schema: Schema, rows: Rows) -> None:
    lists = [argument.name for argument in schema.arguments if argument.many]
    for name in rows.every:
        if name not in lists:
            raise _refused(schema, "rows", name, f"lists of tensors: {', '.join(lists)}")
    if not rows.lists or len(rows.lists) > MOST_ARRAYS:
        raise _refused(schema, "rows", f"{len(rows.lists)} lists", f"from one to {MOST_ARRAYS}")
    if rows.lists[0] in rows.optional:
        raise _refused(
            schema,
            "rows",
            f"{rows.lists[0]} is optional",
            "a first list, whose tensors say the others' shapes and device",
        )
    if taken := sorted(
        {"row", "rows", "count"}.intersection(argument.name for argument in schema.arguments)
    ):
        raise _refused(
            schema,
            "rows",
            f"an argument called {taken[0]}",
            "other names: so the launcher's own are called",
        )
    for name in rows.optional:
        if name not in rows.every:
            raise _refused(
                schema, "rows", f"{name} is optional", f"lists among {', '.join(rows.every)}"
            )
    for name, other in rows.written_if:
        argument = schema.find(other)
        if name not in rows.lists or argument is None or not argument.optional:
            raise _refused(
                schema,
                "rows",
                f"{name} is written if {other} is given",
                f"a list among {', '.join(rows.lists)}, and an optional argument",
            )
    for name, size in rows.blocks:
        if name not in rows.lists[1:] or size < 1:
            raise _refused(
                schema,
                "rows",
                f"{name} in blocks of {size}",
                f"a list among {', '.join(rows.lists[1:])}, and at least 1",
            )


def _check(signature: Signature, asked: Mapping[str, tuple[str, ...]]) -> None:
    """Every name that a constraint uses is there."""
    schema = signature.schema
    refuse = functools.partial(_refused, schema)
    tensors = [argument.name for argument in schema.arguments if argument.type == "Tensor"]
    single = [
        argument.name
        for argument in schema.arguments
        if argument.type == "Tensor" and not argument.many
    ]
    always = [name for name in single if not (found := schema.find(name)) or not found.optional]
    for what, names in (
        ("dtypes", asked),
        ("shapes", dict(signature.shapes)),
        ("strided", dict(signature.strided)),
        ("numbers", signature.numbers),
        ("alike", signature.alike),
    ):
        for name in names:
            if name not in tensors:
                raise refuse(what, name, f"a tensor argument: {', '.join(tensors)}")
    for name in signature.rows.lists if signature.rows else ():
        allowed = dict(signature.dtypes)[name]
        if len(allowed) > 1 and set(allowed) != set(FLOATS):
            raise refuse(
                f"dtypes[{name!r}]",
                in_words(allowed),
                f"{in_words(FLOATS)}, or one dtype: rows know no others",
            )
    for name, allowed in signature.dtypes:
        for one in allowed:
            if one not in DTYPES and (
                one not in always or len(allowed) > 1 or _is_own(one, dict(signature.dtypes))
            ):
                raise refuse(
                    f"dtypes[{name!r}]",
                    one,
                    f"{', '.join(DTYPES)}; or a tensor that is always there: {', '.join(always)}",
                )
    _check_outputs(signature, refuse, single)
    _check_results(signature, refuse)
    _check_layouts(signature, refuse, always)
    _check_shapes(signature, refuse, always)
    if signature.split not in SPLITS:
        raise refuse("split", signature.split, " or ".join(SPLITS))
    if signature.rows and signature.split == "rows":
        raise refuse(
            "split", signature.split, "elements (of each row), whole or host, since rows= is given"
        )


def _is_own(name: str, dtypes: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a tensor's dtype is, by way of others, its own."""
    seen = [name]
    while (following := dtypes.get(seen[-1], ("",))[0]) and following not in seen:
        seen.append(following)
    return bool(following)


def _scalars(schema: Schema) -> dict[str, str]:
    return {
        argument.name: argument.type
        for argument in schema.arguments
        if argument.type != "Tensor" and not argument.optional
    }


def _check_outputs(
    signature: Signature, refuse: Callable[[str, str, str], FlexopsError], single: list[str]
) -> None:
    """Results have a dtype, and with rows a shape, of their own or of a single tensor."""
    scalars = _scalars(signature.schema)
    for output in signature.outputs:
        if signature.rows and not (output.shape and output.dtype):
            raise refuse(
                "outputs",
                "a result as the first tensor",
                'shape and dtype, such as Output("len(params)", "float32"): there are rows of'
                " tensors",
            )
        if output.by_host and (signature.split != "host" or output != Output(by_host=True)):
            raise refuse("outputs", "by_host", "split=host, and nothing else of this result")
        if output.order and output.order != output.shape:
            raise refuse("outputs", f"order={output.order!r}", "the tensor that shape= names")
        if (
            output.dtype
            and output.dtype not in (*DTYPES, *single)
            and scalars.get(output.dtype) != "ScalarType"
        ):
            raise refuse(
                "outputs",
                output.dtype,
                f"a dtype; or an argument that has one: {', '.join(single)}",
            )


def _check_shapes(
    signature: Signature, refuse: Callable[[str, str, str], FlexopsError], always: list[str]
) -> None:
    """Shapes can be read, and name ints and tensors that are always there."""
    schema, scalars = signature.schema, _scalars(signature.schema)
    for shape, given in (
        *((shape, ()) for shape in dict(signature.shapes).values()),
        *(
            (shape, there)
            for output in signature.outputs
            for shape, there in ((output.shape, output.conditions), (output.otherwise, ()))
        ),
    ):
        try:
            parts = dimensions(shape)
        except ValueError as error:
            raise refuse(
                "shapes" if shape in dict(signature.shapes).values() else "outputs",
                str(error),
                "dimensions such as x[:-1], 4",
            ) from None
        for part in parts:
            plain = part.first is None and scalars.get(part.name) == "int"
            if part.many and (found := schema.find(part.name)) and found.many:
                continue
            if (part.times, part.over, part.plus) != (1, 1, 0) and not part.single and not plain:
                raise refuse(
                    "outputs or shapes",
                    shape,
                    "one dimension, or an int, where it is multiplied, divided or added to",
                )
            if part.name and not plain and part.name not in (*always, *given):
                raise refuse(
                    "outputs or shapes",
                    part.name,
                    f"an int, or a tensor that is always there: {', '.join(always)}",
                )


def _check_results(signature: Signature, refuse: Callable[[str, str, str], FlexopsError]) -> None:
    """Of results that are there only sometimes: what they depend on."""
    conditions = [
        argument.name
        for argument in signature.schema.arguments
        if argument.optional or argument.type in ("bool", "int")
    ]
    for number, output in enumerate(signature.outputs):
        for name in output.conditions:
            if name not in conditions:
                raise refuse(
                    "outputs",
                    f"when={output.when!r}",
                    "bool, int or optional arguments, joined by and:"
                    f" {', '.join(conditions) or 'there are none'}",
                )
        if output.otherwise and not output.when:
            raise refuse(
                "outputs",
                f"otherwise={output.otherwise!r}",
                "when=, which says when the other shape counts",
            )
        if (
            output.when
            and not output.otherwise
            and number == 0
            and signature.split in ("elements", "rows")
        ):
            raise refuse(
                "split",
                f"{signature.split} of {signature.schema.results[0]}, which may not be there",
                "another result first, or whole or host",
            )


def _check_layouts(
    signature: Signature, refuse: Callable[[str, str, str], FlexopsError], always: Sequence[str]
) -> None:
    """Of tensors that the launcher takes as they lie: how."""
    for name, layout in signature.strided:
        argument = signature.schema.find(name)
        to = layout.removeprefix("as ") if layout.startswith("as ") else ""
        if layout not in LAYOUTS and (to not in always or to == name):
            raise refuse(
                "strided",
                f"{name}: {layout!r}",
                f"{in_words(LAYOUTS)}, or as and another tensor that is always there, for what is"
                " broadcast to it",
            )
        if layout != "any" and argument and (argument.many or argument.written):
            raise refuse(
                "strided",
                f"{name}: {layout!r}",
                "any, or no word, since it is a list or written: no copy that is laid out so takes"
                " its place",
            )
    for argument in signature.schema.arguments:
        if argument.optional and argument.written and signature.layout(argument.name) != "any":
            raise refuse("strided", f"{argument.name}: contiguous", "any: it is optional, written")
