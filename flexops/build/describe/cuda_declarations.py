"""Reads a `.cu`: its own headers with it, its macros as far as they are attributes, its
declarations, and what at a launch is the kernel.

Nothing is guessed. What is not understood with certainty raises ``Unsplittable``;
nvcc compiles it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from . import cpp_text
from .cpp_text import Token, Unclear, after_angles, before_angles, brackets
from .cuda_names import DEVICE_NAMES, HOST_NAMESPACES

# ---- names ----

_ATTRIBUTES = {
    "__global__": "global",
    "__device__": "device",
    "__host__": "host",
    "constexpr": "constexpr",
    "consteval": "constexpr",
    "C10_DEVICE": "device",
    "C10_HOST": "host",
    "C10_HOST_DEVICE": "host device",
    "AT_HOST_DEVICE": "host device",
    "AT_DEVICE": "device",
}
_WITH_PARENTHESES = frozenset(
    [
        "__launch_bounds__",
        "__attribute__",
        "__align__",
        "__builtin_align__",
        "alignas",
        "noexcept",
        "decltype",
        "throw",
        "explicit",
        "requires",
        "__maxnreg__",
        "C10_LAUNCH_BOUNDS_0",
        "C10_LAUNCH_BOUNDS_1",
        "C10_LAUNCH_BOUNDS_2",
        "__cluster_dims__",
        "typeof",
        "sizeof",
    ]
)
_CLASS = ("class", "struct", "union")
_BEFORE_A_CLASS = ("typedef", "static", "const", "constexpr", "inline", "extern")
_TYPES = frozenset(
    [
        "void",
        "bool",
        "char",
        "short",
        "int",
        "long",
        "float",
        "double",
        "unsigned",
        "signed",
        "const",
        "volatile",
        "auto",
        "size_t",
        "int32_t",
        "int64_t",
        "uint8_t",
        "uint32_t",
        "uint64_t",
    ]
)

_NEVER = frozenset(
    [
        "USE_ROCM",
        "__HIPCC__",
        "__HCC__",
        "__HIP_PLATFORM_AMD__",
        "__HIP_PLATFORM_HCC__",
        "__HIP_DEVICE_COMPILE__",
        "__HIP__",
        "_WIN32",
        "_WIN64",
        "WIN32",
        "_MSC_VER",
        "__APPLE__",
    ]
)
"""Macros of other systems: the branches of conditions on one of them alone are decided."""

# What conditions may ask for: defined alike in both passes, or in neither.
KNOWN = _NEVER | frozenset(
    [
        "defined",
        "__CUDACC__",
        "__NVCC__",
        "__CUDA_ARCH__",
        "__CUDA_ARCH_FEAT_SM90_ALL",
        "__CUDA_ARCH_FEAT_SM100_ALL",
        "__CUDA_ARCH_SPECIFIC__",
        "__cplusplus",
        "__cpp_inline_variables",
        "__linux__",
        "__x86_64__",
        "CUDA_VERSION",
        "CUDART_VERSION",
        "__CUDACC_VER_MAJOR__",
        "__CUDACC_VER_MINOR__",
        "TORCH_VERSION_MAJOR",
        "TORCH_VERSION_MINOR",
        "TORCH_VERSION_PATCH",
        "HIP_VERSION",
        "true",
        "false",
        "and",
        "or",
        "not",
        "__CUDA_NO_HALF_OPERATORS__",
        "__CUDA_NO_HALF_CONVERSIONS__",
        "__CUDA_NO_BFLOAT16_CONVERSIONS__",
        "__CUDA_NO_HALF2_OPERATORS__",
    ]
)

# Which of the standard's macros nvcc has from the first line on, as extension_device.cuh has them;
# and which only once a header has been read.
OF_MATHEMATICS = re.compile(r"M_\w+|INFINITY|NAN|(?:U?INT|LONG|LLONG)_(?:MAX|MIN)")
OF_LIMITS = re.compile(r"U?INT(?:8|16|32|64)_(?:MAX|MIN|C)|(?:FLT|DBL)_\w+")

# ---- what there is no surely faithful translation of ----

_REFUSED = (
    (re.compile(r"__constant__|__managed__"), "a variable in constant or managed memory"),
    (re.compile(r"cuda\w*Symbol\w*"), "a variable on the device that the host reads or writes"),
    (
        re.compile(r"cudaFunc(?!SetAttribute$|Attribute)\w+|cudaOccupancy\w+|cudaGetKernel\w*"),
        "CUDA's runtime asked about a kernel",
    ),
    (
        re.compile(
            r"cudaFuncAttribute(?!MaxDynamicSharedMemorySize$|PreferredSharedMemoryCarveout$|s$)\w+"
        ),
        "an attribute of a kernel",
    ),
    (
        re.compile(r"cudaLaunch\w+|cudaGraph\w*Kernel\w*|cuLaunch\w+|cuModule\w+|cuLibrary\w+"),
        "a kernel launched by a call, or as a cluster or together",
    ),
    (
        re.compile(
            r"this_grid|grid_group|this_multi_grid|multi_grid_group|this_cluster|cluster_group"
        ),
        "a cooperative launch or a cluster",
    ),
    (re.compile(r"thrust"), "thrust"),
    (re.compile(r"texture|surface|tex[123]D\w*|surf[123]D\w*"), "a texture or a surface"),
    (re.compile(r"gpu_kernel\w*|GPU_LAMBDA"), "torch's own kernel templates"),
    (
        re.compile(r"__nv_(?!bfloat16|fp[468])\w+|__nvcc_\w+|__NVCC_\w+"),
        "what is nvcc's own",
    ),
    (
        re.compile(r"__COUNTER__"),
        "a number that torch's headers, which the device's half has not, have a part in",
    ),
)
_FOLLOWED_BY = {"thrust": "::", "texture": "<", "surface": "<"}

# ---- headers ----

FOR_BOTH = re.compile(
    r"cuda_(?:fp16|bf16|fp8|fp6|fp4)\.h|math_constants\.h|mma\.h|cuComplex\.h"
    r"|cooperative_groups(?:/[\w/]+)?\.h|curand_kernel\.h"
)
FOR_THE_DEVICE = {
    re.compile(r"(?:cub|cuda|nv)/[\w/.-]+|cuda_(?:awbarrier|pipeline)\w*\.h"): "",
    re.compile(r"ATen/cuda/(?:Atomic|CUDAApplyUtils)\.cuh|THC/THCAtomics\.cuh"): (
        "ATen/cuda/Atomic.cuh"
    ),
    re.compile(
        r"ATen/cuda/detail/(?:IndexUtils|TensorInfo)\.cuh"
    ): "ATen/cuda/detail/TensorInfo.cuh",
}
IN_PLACE_ON_THE_HOST = {"ATen/cuda/CUDAApplyUtils.cuh": "ATen/cuda/ApplyGridUtils.cuh"}
"""A header with kernels: what it includes that the host compiler can read."""
"""Headers of which the device's half includes what stands behind them, or else they themselves. The
host compiler is given those of torch's that it can read."""
FOR_NEITHER = re.compile(r"thrust/[\w/.-]+|ATen/[\w/.-]+\.cuh")
"""Headers of which neither half is given anything: what uses them does not compile."""
FOR_THE_HOST = re.compile(
    r"(?:torch|ATen|c10|caffe2|pybind11|TH|THC)/[\w/.-]+\.h"
    r"|ATen/cuda/(?:detail/(?:IndexUtils|TensorInfo)|ApplyGridUtils)\.cuh|Python\.h"
    r"|cuda(?:_runtime\w*|_profiler_api|_device_runtime_api)?\.h|device_launch_parameters\.h"
    r"|device_functions\.h|vector_(?:types|functions)\.h|driver_types\.h"
    r"|cu(?:blas|sparse|solver|dnn|fft|rand)\w*\.h|nccl\.h|nvToolsExt\.h|nvtx3/[\w./]+|omp\.h"
    r"|(?:sys/)?(?!cuda_(?:awbarrier|pipeline))[a-z0-9_]+(?:\.h)?"  # C's, C++'s and the system's
)


class Unsplittable(Exception):
    """What stands where, and is nvcc's."""

    def __init__(self, what: str, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}: {what}")
        self.what, self.path, self.line = what, path, line


class Item(NamedTuple):
    """A declaration, as numbers of tokens. ``open``, ``close``: the braces of its body, -1 if it
    has none; ``body``: where that begins, with a constructor's initialisers; ``parameters``: a
    function's opening parenthesis, else -1."""

    kind: Literal["function", "prototype", "class", "scope", "other", "directive"]
    start: int
    end: int
    open: int = -1
    close: int = -1
    body: int = -1
    parameters: int = -1


class Macros(NamedTuple):
    """Of all files: what each macro that stands for attributes is (``HD``: host device), every name
    that is defined, those that the command defines, and those that define device code."""

    attributes: dict[str, frozenset[str]]
    defined: frozenset[str]
    commands: frozenset[str] = frozenset()
    of_device_code: frozenset[str] = frozenset()


class File(NamedTuple):
    path: str
    text: str
    tokens: list[Token]
    partner: dict[int, int]
    included: dict[int, File]


# ---- files and macros ----


_ALONE = re.compile(
    r"#\s*(?:(?P<yes>ifdef)\s+|(?P<no>ifndef)\s+|(?:el)?if\s+(?P<not>!)?\s*defined\s*\(?\s*)"
    r"(?P<name>\w+)\s*\)?"
)


def _living(text: str) -> str:
    """A text whose lines in branches for other systems are empty."""
    branches: list[tuple[bool, bool]] = []  # of each condition: it is dead, so are all that follow
    pieces, position, start = [], 0, 0
    for token in cpp_text.tokens_of(text):
        if token.directive not in ("if", "ifdef", "ifndef", "elif", "else", "endif"):
            continue
        was = any(dead for dead, _ in branches)
        match = _ALONE.fullmatch(cpp_text.without_comments(token.text).strip())
        never = bool(match and match["name"] in _NEVER)
        negated = bool(match and (match["no"] or match["not"]))
        if token.directive in ("if", "ifdef", "ifndef"):
            branches.append((never and not negated, never and negated))
        elif branches:
            _, rest = branches.pop()
            if token.directive != "endif":
                branches.append((rest or (never and not negated), rest or (never and negated)))
        now = any(dead for dead, _ in branches)
        if now and not was:
            start = token.end
        elif was and not now:
            pieces += [text[position:start], "\n" * text.count("\n", start, token.start)]
            position = token.start
    return "".join([*pieces, text[position:]])


def read(path: str, text: str, include_dirs: Sequence[str], above: tuple[str, ...] = ()) -> File:
    """A source with the headers of the user's that it includes. ``above``: the files that include
    this one."""
    try:
        text = _living(text)
        tokens = cpp_text.tokens_of(text)
        partner = brackets(tokens)
    except Unclear as problem:
        raise Unsplittable(problem.what, path, problem.line) from None
    included = {}
    for place, token in enumerate(tokens):
        if token.directive not in ("include", "include_next", "import"):
            continue
        if not token.includes:
            raise Unsplittable("an #include of a name that is a macro", path, token.line)
        name, quoted = token.includes[1:-1], token.includes[0] == '"'
        found = cpp_text.resolve(name, os.path.dirname(path) if quoted else None, include_dirs)
        if found and found not in above and found != path:
            with open(found, encoding="utf-8", errors="surrogateescape") as stream:
                included[place] = read(found, stream.read(), include_dirs, (*above, path))
        elif found is None and not any(
            one.fullmatch(name) for one in (FOR_BOTH, FOR_THE_HOST, FOR_NEITHER, *FOR_THE_DEVICE)
        ):
            raise Unsplittable(f"the header {name}", path, token.line)
    return File(path, text, tokens, partner, included)


def files_of(file: File) -> Iterator[File]:
    """A file and all that it includes."""
    yield file
    for one in file.included.values():
        yield from files_of(one)


def macros_of(files: Sequence[File], defined: frozenset[str]) -> Macros:
    """``defined``: those of the command.

    Raises:
        Unsplittable: one has a name that is known to be something else.
    """
    bodies: dict[str, set[str]] = {}
    for file in files:
        for token in file.tokens:
            if name := token.defines:
                rest = cpp_text.without_comments(
                    token.text.partition("define")[2].partition(name)[2]
                )
                body = set(re.findall(r"[A-Za-z_]\w*|\{", rest))
                bodies.setdefault(name, set()).update(body)
                if name in _ATTRIBUTES or name in KNOWN:
                    raise Unsplittable(f"a macro {name} of its own", file.path, token.line)
    attributes: dict[str, frozenset[str]] = {
        name: frozenset(words.split()) for name, words in _ATTRIBUTES.items()
    }
    for _ in range(len(bodies) + 1):
        found = {
            name: frozenset(one for word in body for one in attributes.get(word, ()))
            for name, body in bodies.items()
        }
        if all(attributes.get(name, frozenset()) == value for name, value in found.items()):
            break
        attributes.update(found)
    of_device_code: frozenset[str] = frozenset()
    for _ in range(len(bodies)):
        more = frozenset(
            name
            for name, body in bodies.items()
            if ("{" in body and attributes.get(name, frozenset()) & {"global", "device"})
            or body & of_device_code
        )
        if more == of_device_code:
            break
        of_device_code = more
    return Macros(
        {name: value for name, value in attributes.items() if value},
        defined | bodies.keys(),
        defined,
        of_device_code,
    )


def refuse(file: File) -> None:
    """Raises ``Unsplittable`` where a file names what has no surely faithful translation."""
    for number, token in enumerate(file.tokens):
        words = (
            [token.text]
            if token.kind == "word"
            else re.findall(r"[A-Za-z_]\w*", token.text)
            if token.directive == "define"
            else ()
        )
        following = file.tokens[number + 1].text if number + 1 < len(file.tokens) else ""
        for word in words:
            what = next((what for pattern, what in _REFUSED if pattern.fullmatch(word)), "")
            if what and (
                token.kind == "directive" or _FOLLOWED_BY.get(word, following) == following
            ):
                raise Unsplittable(f"{what} ({word})", file.path, token.line)


# ---- declarations ----


def items_of(file: File, first: int, last: int) -> Iterator[Item]:
    """The declarations of a namespace or class, in their order."""
    number = first
    while number < last:
        token = file.tokens[number]
        if token.kind == "directive":
            yield Item("directive", number, number + 1)
            number += 1
        elif token.text == ";":
            number += 1
        elif (
            token.text in ("public", "private", "protected") and file.tokens[number + 1].text == ":"
        ):
            number += 2
        else:
            item = _item(file, number, last)
            yield item
            number = item.end


def _item(file: File, first: int, last: int) -> Item:
    tokens, partner = file.tokens, file.partner
    number = first
    while tokens[number].text == "template" and tokens[number + 1].text == "<":
        try:
            number = after_angles(tokens, partner, number + 1)
        except Unclear as problem:
            raise Unsplittable(problem.what, file.path, problem.line) from None
    head, colon, assigned = number, -1, False
    groups: list[int] = []
    while number < last:
        token = tokens[number]
        text = token.text if token.kind in ("punctuation", "word") else ""
        if text == ";":
            if groups and not assigned and tokens[head].text != "typedef":
                return Item("prototype", first, number + 1, parameters=groups[-1])
            return Item("other", first, number + 1)
        if text == "(":
            # what follows a colon are a constructor's initialisers
            if tokens[number - 1].text not in _WITH_PARENTHESES and colon < 0:
                groups.append(number)
            elif tokens[number - 1].text == "requires":
                raise Unsplittable("a constraint", file.path, token.line)
            number = partner[number]
        elif text == "[":
            number = partner[number]
        elif text == "=" and not _is_of_operator(tokens, number):
            assigned = True
        elif text == ":" and groups and colon < 0:
            colon = number
        elif text in (")", "]", "}"):
            break
        elif text == "{":
            words = [one.text for one in tokens[head:number] if one.kind != "directive"]
            opened = _braces(file, words, groups, number, assigned, colon)
            close = partner[number]
            if opened == "scope":
                return Item("scope", first, close + 1, number, close)
            if opened == "function":
                return Item(
                    "function",
                    first,
                    close + 1,
                    number,
                    close,
                    colon if colon >= 0 else number,
                    groups[-1],
                )
            if opened == "class":
                end = next((one for one in range(close + 1, last) if tokens[one].text == ";"), -1)
                if end < 0 or any(one.kind == "directive" for one in tokens[close:end]):
                    raise Unsplittable("a class that is not understood", file.path, token.line)
                return Item("class", first, end + 1, number, close)
            number = close
        number += 1
    raise Unsplittable("a declaration that is not understood", file.path, tokens[first].line)


def _is_of_operator(tokens: Sequence[Token], number: int) -> bool:
    """Whether a token belongs to an operator's name: ``operator<<=``, in pieces."""
    while tokens[number].kind == "punctuation" and tokens[number].text not in ("(", ")"):
        number -= 1
    return tokens[number].text == "operator"


def _braces(
    file: File, words: list[str], groups: list[int], number: int, assigned: bool, colon: int
) -> str:
    """What a brace in a declaration begins."""
    if (
        words[:1] == ["namespace"]
        or words[:2] == ["inline", "namespace"]
        or (len(words) == 2 and words[0] == "extern" and words[1].startswith('"'))
    ):
        return "scope"
    if assigned:
        return "value"
    first = next((word for word in words if word not in _BEFORE_A_CLASS), "")
    if first == "enum":
        return "value"
    before = file.tokens[number - 1]
    if first in _CLASS and not (groups and file.partner[groups[-1]] == number - 1):
        return "class"
    if not groups:
        return "value"
    return "value" if colon >= 0 and (before.kind == "word" or before.text == ">") else "function"


def attributes_of(file: File, item: Item, macros: Macros) -> frozenset[str]:
    """Of a function or variable: where it runs."""
    found: set[str] = set()
    number, stop = item.start, item.body if item.body >= 0 else item.end
    while number < stop:
        token = file.tokens[number]
        if token.kind == "punctuation" and token.text in ("(", "[", "{"):
            number = file.partner[number]
        found |= macros.attributes.get(token.text, frozenset()) if token.kind == "word" else set()
        number += 1
    return frozenset(found)


def name_of(file: File, item: Item) -> Token | None:
    """What a declaration declares, as far as that is simple."""
    if item.parameters >= 0:
        number = item.parameters - 1
        if file.tokens[number].text == ">":
            number = before_angles(file.tokens, file.partner, number)
        return (
            file.tokens[number]
            if number >= item.start and file.tokens[number].kind == "word"
            else None
        )
    start = item.start
    while item.kind == "class" and file.tokens[start].text == "template":
        start = after_angles(file.tokens, file.partner, start + 1)
    words = [file.tokens[one] for one in range(start, item.open if item.open >= 0 else item.end)]
    if words[0].text == "using" or item.kind == "class":
        others = (*_CLASS, *_BEFORE_A_CLASS, "using", "namespace", "template", "typename")
        return next(
            (word for word in words if word.kind == "word" and word.text not in others), None
        )
    ends = (
        (")",)
        if words[0].text == "typedef" and "(" in (word.text for word in words)
        else ("=", "{", "[", ";")
    )
    stop = next((number for number, word in enumerate(words) if word.text in ends), len(words))
    return next((word for word in reversed(words[:stop]) if word.kind == "word"), None)


def is_qualified(file: File, item: Item, name: Token) -> bool:
    """Whether it defines what a class or namespace has declared: ``A::f() {}`` makes no name."""
    number = next(one for one in range(item.start, item.end) if file.tokens[one] is name)
    number -= file.tokens[number - 1].text == "~"
    return number > item.start and file.tokens[number - 1].text == "::"


# ---- launches, parameters, variables ----


def is_closed(tokens: Sequence[Token], number: int) -> bool:
    three = tokens[number : number + 3]
    return (
        [one.text for one in three] == [">"] * 3
        and three[0].end == three[1].start
        and three[1].end == three[2].start
        and tokens[number + 3].text == "("
    )


def launched(file: File, number: int) -> int:
    """The first token of the kernel that is launched at ``<<<``.

    Raises:
        Unsplittable: it is none that is understood.
    """
    tokens, partner = file.tokens, file.partner
    place = number - 1
    first = -1
    while place >= 0:
        text = tokens[place].text
        if text == ">":
            place = before_angles(tokens, partner, place)
        elif text in (")", "]"):
            first = partner[place]
            place = first - 1
            if text == ")" and not (
                place >= 0
                and (tokens[place].kind == "word" or tokens[place].text in (">", ")", "]"))
            ):
                break
            continue
        if (
            place < 0
            or tokens[place].kind != "word"
            or tokens[place].text in ("return", "else", "do", "if", "while", "for", "case")
        ):
            break
        first = place
        place -= 1
        if place >= 0 and tokens[place].text == "template":
            place -= 1
        if place < 0 or tokens[place].text not in ("::", ".", "->"):
            break
        first = (
            place
            if tokens[place].text == "::"
            and (
                place == 0
                or not (tokens[place - 1].kind == "word" or tokens[place - 1].text == ">")
            )
            else first
        )
        if first == place:
            place -= 1
            break
        place -= 1
    before = tokens[place] if place >= 0 else None
    allowed = (";", "{", "}", ")", "(", ",", ":", "?", "else", "do", "return", "&&", "||")
    if first < 0 or not (before is None or before.text in allowed or before.kind == "directive"):
        raise Unsplittable(
            "a launch of something that is not understood", file.path, tokens[number].line
        )
    return first


def parameters_of(file: File, item: Item) -> Iterator[str]:
    """The names of a kernel's parameters, a pack's with its dots.

    Raises:
        Unsplittable: one has none, or is not understood.
    """
    tokens, partner = file.tokens, file.partner
    last = partner[item.parameters]
    number, begin = item.parameters + 1, item.parameters + 1
    default = -1
    while number <= last:
        token = tokens[number]
        if token.kind == "directive":
            raise Unsplittable("a condition among a kernel's parameters", file.path, token.line)
        if token.text == "<" and default < 0:
            try:
                number = after_angles(tokens, partner, number)
            except Unclear as problem:
                raise Unsplittable(problem.what, file.path, problem.line) from None
            continue
        if number == last or token.text == ",":
            words = tokens[begin : default if default >= 0 else number]
            if words and [word.text for word in words] != ["void"]:
                yield _parameter(file, words)
            begin, default = number + 1, -1
        elif token.text == "=" and default < 0:
            default = number
        elif token.text in ("(", "[", "{"):
            number = partner[number]
        number += 1


def _parameter(file: File, words: list[Token]) -> str:
    place = len(words) - 1
    while place > 0 and words[place].text == "]":
        place = next((one for one in range(place, -1, -1) if words[one].text == "["), 0) - 1
    name = words[place] if place > 0 else words[0]
    if (
        place <= 0
        or name.kind != "word"
        or name.text in _TYPES
        or words[place - 1].text in ("::", "struct", "class", "typename", "enum")
    ):
        raise Unsplittable(
            "a kernel's parameter without a name, or a function's pointer", file.path, words[0].line
        )
    return f"{name.text}..." if any(word.text == "..." for word in words) else name.text


def variables_of(file: File, item: Item, *, member: bool) -> list[Token]:
    """The host's variables that a class brings, which device code would have one more of: those
    declared with it, and of its members the static ones."""
    tokens = file.tokens[item.close + 1 if item.kind == "class" else item.start : item.end]
    words = [
        token.text
        for token in file.tokens[item.start : item.open if item.kind == "class" else item.end]
    ]
    if (
        {"const", "constexpr", "typedef", "using"} & set(words)
        or (member and "static" not in words)
        or not (member or item.kind == "class")
    ):
        return []
    named = itertools.pairwise(tokens)
    return [
        token
        for token, after in named
        if item.kind in ("class", "other")
        and token.kind == "word"
        and after.text in (",", "=", "[", "{", ";")
    ]


def is_host_variable(tokens: Sequence[Token], where: frozenset[str]) -> bool:
    """Whether it is a variable, and none that device code may read: a constant of a number."""
    first = (
        next((number for number, token in enumerate(tokens) if token.text == ">"), -1) + 1
        if tokens[0].text == "template"
        else 0
    )
    words = [token.text for token in tokens[first:] if token.kind == "word"] or [""]
    if "constexpr" in where or words[0] in (
        "using",
        "typedef",
        "static_assert",
        "friend",
        "enum",
        *_CLASS,
    ):
        return False
    stop = next(
        (number for number, token in enumerate(tokens) if token.text in ("=", "{", "[", ";", "(")),
        len(tokens),
    )
    kinds = [token.text for token in tokens[: stop - 1]]
    return "const" not in kinds or not all(
        kind in _TYPES or kind in ("static", "inline") for kind in kinds
    )


def mentions_host(tokens: Sequence[Token]) -> bool:
    """Whether a declaration is of something that device code has no definition of: torch's,
    pybind11's, most of the standard library's."""
    texts = [token.text for token in tokens]
    if texts[:1] == ["namespace"] or (
        texts[:2] == ["using", "namespace"] and texts[2] in ("pybind11", "py")
    ):
        return True
    for number, text in enumerate(texts[:-2]):
        if (
            text in HOST_NAMESPACES
            and texts[number + 1] == "::"
            and texts[number + 2] not in DEVICE_NAMES.get(text, frozenset())
            and texts[number : number + 6] != ["at", "::", "cuda", "::", "detail", "::"]
        ):
            return True
    return False
