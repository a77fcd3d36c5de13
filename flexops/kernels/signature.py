"""What a source text says of its kernels. Reads text; runs nothing, and needs no compiler."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..build.describe.cpp_text import blanked, closing, parts
from ..errors import FlexopsError

SCALARS: dict[str, str] = {
    **dict.fromkeys(("bool",), "?"),
    **dict.fromkeys(("char", "signed char", "int8_t", "i8"), "b"),
    **dict.fromkeys(("unsigned char", "uint8_t", "u8"), "B"),
    **dict.fromkeys(("short", "int16_t", "i16"), "h"),
    **dict.fromkeys(("unsigned short", "uint16_t", "u16"), "H"),
    **dict.fromkeys(("int", "int32_t", "i32"), "i"),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t", "u32"), "I"),
    **dict.fromkeys(("long", "long int", "long long", "int64_t", "i64", "ptrdiff_t"), "q"),
    **dict.fromkeys(
        ("unsigned long", "unsigned long long", "uint64_t", "u64", "size_t", "uintptr_t"), "Q"
    ),
    **dict.fromkeys(("float",), "f"),
    **dict.fromkeys(("double",), "d"),
}
"""Types that a kernel takes by value, and the letters of Python's ``struct`` for them."""

ELEMENTS: dict[str, str] = {
    **dict.fromkeys(("float",), "float32"),
    **dict.fromkeys(("double",), "float64"),
    **dict.fromkeys(("bfloat16", "bf16", "__nv_bfloat16"), "bfloat16"),
    **dict.fromkeys(("float16", "f16", "__half", "half"), "float16"),
    **dict.fromkeys(("signed char", "int8_t", "i8"), "int8"),
    **dict.fromkeys(("short", "int16_t", "i16"), "int16"),
    **dict.fromkeys(("int", "int32_t", "i32"), "int32"),
    **dict.fromkeys(("long", "long long", "int64_t", "i64"), "int64"),
    **dict.fromkeys(("bool",), "bool"),
    **dict.fromkeys(("e4m3",), "float8_e4m3fn"),
    **dict.fromkeys(("e5m2",), "float8_e5m2"),
}
"""The dtypes that pointers to these types are for. Others (``void``, ``uint8_t``, ``float4``, a
struct) take any."""

CPP_TYPES: dict[str, str] = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "bool": "bool",
    "float8_e4m3fn": "flexops::e4m3",
    "float8_e5m2": "flexops::e5m2",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
}
"""What a template's type parameter becomes for a tensor of a dtype."""

_IGNORED = {
    "const",
    "volatile",
    "__restrict__",
    "restrict",
    "__restrict",
    "__grid_constant__",
    "struct",
    "typename",
    "class",
    "enum",
    "FLEXOPS_GRID_CONSTANT",
}


_BUILTIN_WORDS = {"unsigned", "signed", "short", "int", "long", "char", "double", "*"}
"""Words of which a type may have several."""


class Parameter(NamedTuple):
    """A kernel's parameter: ``type`` without qualifiers, reference and namespace of ours;
    ``const``: what it points to is not written."""

    name: str
    type: str
    pointer: bool
    const: bool = False

    @property
    def plain(self) -> bool:
        """Whether the text is one type and one name. A missing comma leaves more words."""
        words = re.sub(r"<[^>]*>", "", self.type).split()
        return len(words) == 1 or (len(words) > 1 and _BUILTIN_WORDS.issuperset(words[1:]))

    def __str__(self) -> str:
        return f"{self.type}{'*' if self.pointer else ''} {self.name}"


class TemplateParameter(NamedTuple):
    """``kind`` is ``typename``, or the type of a value."""

    name: str
    kind: str
    has_default: bool


class CudaSignature(NamedTuple):
    """A kernel as its source declares it.

    Attributes:
        name: with its namespaces.
        line: of the source, from 1.
        bounds: the threads in ``__launch_bounds__``, as text; "" without it.
    """

    name: str
    template: tuple[TemplateParameter, ...]
    parameters: tuple[Parameter, ...]
    line: int
    bounds: str = ""


def kernels(source: str) -> list[CudaSignature]:
    """Every ``__global__`` function in a source text, in its order; one that is declared first and
    defined later, where it is defined."""
    text = blanked(source)
    found, defined = [], set()
    for match in re.finditer(r"\b__global__\b", text):
        head = _head(text, match.end())
        if head is None:
            continue
        name, opening, bounds = head
        end = closing(text, opening)
        own = text[opening + 1 : end]
        namespaces = _namespaces(text[: match.start()])
        parameters = tuple(
            _parameter(part) for part in parts(own) if part.strip() not in ("", "void")
        )
        found.append(
            CudaSignature(
                "::".join([*namespaces, name]),
                _template(text[: match.start()]),
                parameters,
                text.count("\n", 0, match.start()) + 1,
                bounds,
            )
        )
        if text[end + 1 :].lstrip()[:1] == "{":
            defined.add(found[-1])
    names = {one.name for one in defined}
    return [one for one in found if one in defined or one.name not in names]


def _head(text: str, position: int) -> tuple[str, int, str] | None:
    """The name behind ``__global__``, where its parameters open, and its launch bounds: ``void``,
    attributes and launch bounds stand between."""
    bounds = ""
    while match := re.compile(r"\s*(\w+)\s*").match(text, position):
        word, position = match[1], match.end()
        opens = text[position : position + 1] == "("
        if opens and word.startswith("__"):
            end = closing(text, position)
            if word == "__launch_bounds__":
                bounds = next(parts(text[position + 1 : end])).strip()
            position = end + 1
        elif opens:
            return word, position, bounds
    return None


def _template(before: str) -> tuple[TemplateParameter, ...]:
    """The template's parameters, if what stands directly before a kernel is a template's head."""
    # a comparison in parentheses closes nothing
    before = re.sub(r"\([^()]*\)", lambda match: " " * len(match[0]), before)
    start = before.rfind("template")
    opening = before.find("<", start)
    if start < 0 or opening < 0:
        return ()
    depth, end = 0, opening
    for end in range(opening, len(before)):
        depth += {"<": 1, ">": -1}.get(before[end], 0)
        if depth == 0:
            break
    if depth or re.search("[;{}]", before[end + 1 :]):  # it is another declaration's
        return ()
    parameters = []
    for part in parts(before[opening + 1 : end]):
        declared, equals, _ = part.partition("=")
        *kind, name = declared.split()
        parameters.append(
            TemplateParameter(
                name,
                "typename" if kind in (["typename"], ["class"]) else " ".join(kind),
                bool(equals),
            )
        )
    return tuple(parameters)


def _namespaces(before: str) -> list[str]:
    """Those that are open at the end of a text."""
    stack: list[str] = []
    for match in re.finditer(r"\bnamespace\s+([\w:]+)\s*\{|([{}])", before):
        if match[2] == "}":
            if stack:
                stack.pop()
        else:
            stack.append(match[1] or "")
    return [name for name in stack if name]


def _parameter(text: str) -> Parameter:
    declared = text.partition("=")[0]
    pointer = "*" in declared or "[" in declared
    words = [
        word
        for word in re.findall(r"[\w:]+(?:<[^>]*>)?", declared.partition("[")[0])
        if word not in _IGNORED
    ]
    *kind, name = words
    # a pointer to pointers, which tensors of any dtype may hold
    kind += ["*"] * (declared.count("*") > 1)
    type_ = " ".join(kind).replace("std::", "").removeprefix("flexops::")
    pointee = declared.rpartition("*")[0] or declared.partition("[")[0]
    return Parameter(name, type_, pointer, pointer and bool(re.search(r"\bconst\b", pointee)))


def unclosed(source: str) -> str:
    """Where a brace or parenthesis has no partner; "" if all have one, or if macros or branches of
    the preprocessor may bring it."""
    if re.search(r"^\s*#\s*(if|define)", source, re.MULTILINE):
        return ""
    stack: list[tuple[str, int]] = []
    text = blanked(source)
    for match in re.finditer(r"[(){}\[\]]", text):
        character, line = match[0], text.count("\n", 0, match.start()) + 1
        if character in "({[":
            stack.append((character, line))
        elif not stack or stack[-1][0] + character not in ("()", "{}", "[]"):
            opened = f", but {stack[-1][0]} of line {stack[-1][1]} is open" if stack else ""
            return f"{character} in line {line}{opened or ', which closes nothing'}"
        else:
            stack.pop()
    return f"{stack[-1][0]} in line {stack[-1][1]}, which is never closed" if stack else ""


def the_kernel(source: str, name: str, schema: str) -> CudaSignature:
    if not isinstance(source, str) or (gap := unclosed(source)):
        raise FlexopsError(
            f"flexops.kernel: the source of {schema} cannot be read",
            found=gap if isinstance(source, str) else type(source).__name__,
            required="C++ text, whose brackets are in pairs",
            fix="correct the source",
        )
    found = kernels(source)
    chosen = [one for one in found if name in (one.name, one.name.rpartition("::")[2])]
    if len(chosen) != 1:
        there = (
            ", ".join(f"{one.name} (line {one.line})" for one in found) or "no __global__ function"
        )
        required = (
            f"one kernel called {name}"
            if not chosen
            else f"one kernel called {name}, not {len(chosen)}"
        )
        raise FlexopsError(
            f"flexops.kernel: {schema} needs one kernel of its name",
            found=there,
            required=required,
            fix="name=<the kernel's name>",
        )
    return chosen[0]
