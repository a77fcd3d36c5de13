"""Splits a `.cu` with kernels, launches and torch in it: into C++ for the host compiler, and device
code for NVRTC.

On the host a kernel's body is a call that launches it, as nvcc makes it, and `k<<<grid,
block>>>(x)` is `(Configured(grid, block), k(x))`. The device code is what is left without host
functions and torch's headers. Lines stay where they are, or ``#line`` says where they were, so
that errors name the user's.

Nothing is guessed. What is not understood with certainty raises ``Unsplittable``;
nvcc compiles it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import cpp_text
from . import cuda_declarations as reading
from .cpp_text import Token, Unclear, brackets
from .cuda_declarations import (
    FOR_BOTH,
    FOR_THE_DEVICE,
    FOR_THE_HOST,
    IN_PLACE_ON_THE_HOST,
    KNOWN,
    File,
    Item,
    Macros,
    Unsplittable,
)
from .cuda_macros import expanded

STUB = "flexops_stub"
NAMESPACE = "::flexops_extension"
# What a half calls what nvcc defines in both of its passes: torch's headers must not see __CUDACC__
# on the host, and NVRTC is no nvcc to CUDA's.
_HOST_NAMES = {
    "__CUDACC__": "FLEXOPS_CUDACC",
    "__NVCC__": "FLEXOPS_CUDACC",
    "CUDA_VERSION": "CUDART_VERSION",
    "__CUDACC_VER_MAJOR__": "FLEXOPS_CUDACC_VER_MAJOR",
    "__CUDACC_VER_MINOR__": "FLEXOPS_CUDACC_VER_MINOR",
}
_DEVICE_NAMES = {"__NVCC__": "__CUDACC__", "CUDA_VERSION": "CUDART_VERSION"}
# What is defined only once a header has been read, which NVRTC is not given. Of torch's headers
# those that have <cuda.h> for nvcc in every version.
_OF_HEADERS = (
    (
        re.compile(r"CUDA_VERSION"),
        re.compile(r"cuda\.h|torch/(?:extension|torch|all)\.h|ATen/(?:ATen|Dispatch)\.h"),
        "#include <cuda.h>",
    ),
    (
        re.compile(r"TORCH_VERSION_\w+"),
        re.compile(r"torch/(?:extension|torch|all|version)\.h"),
        "#include <torch/version.h>",
    ),
)
_MOST_TEXT = 4 * 2**20


class Split(NamedTuple):
    """Both halves of a source, and the words of the device's (to know what it needs)."""

    host: str
    device: str
    words: frozenset[str]


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def split(
    path: str,
    text: str,
    include_dirs: Sequence[str],
    number: int,
    defined: frozenset[str] = frozenset(),
) -> Split:
    """Both halves of a source.

    Args:
        path: what errors call it; its folder is where headers in quotes are looked for.
        include_dirs: the user's include path. Headers found there, and beside the source, are part
            of the source.
        number: of the source within its extension, which stubs' names have in them.
        defined: macros that the command defines.

    Raises:
        Unsplittable: something in it is not understood with certainty.
    """
    file = reading.read(path, text, include_dirs)
    macros = reading.macros_of(list(reading.files_of(file)), defined)
    file = expanded(file, macros.of_device_code)
    halves = _Halves(number, macros)
    try:
        host, device = halves.of(file)
    except IndexError:  # a token was wanted after the last one
        raise Unsplittable("a declaration that does not end", path, text.count("\n") + 1) from None
    halves.require_no_host_names()
    if max(len(host), len(device)) > _MOST_TEXT:
        raise Unsplittable("headers that are included again and again", path, 1)
    return Split(host, device, halves.words())


# ---- the two halves ----


class _Halves:
    """Writes both halves of a file and of what it includes, and remembers what the device's has."""

    def __init__(self, number: int, macros: Macros) -> None:
        self.stub = f"{STUB}_{number}"
        self.macros = macros
        self.kept: list[tuple[File, int]] = []
        # what is declared for the host alone; for functions, what follows a use of one
        self.dropped: dict[str, str] = {}
        self._declared: set[int] = set()
        # headers, and macros that are defined, in the order of the text
        self._included: list[str] = []
        self._defined = set(macros.commands)

    def of(self, file: File) -> tuple[str, str]:
        reading.refuse(file)
        host: list[_Edit] = []
        device: list[_Edit] = []
        for place, token in enumerate(file.tokens):
            if token.kind == "directive":
                self._directive(file, place, host, device)
        self._declarations(file, 0, len(file.tokens), host, device)
        self._launches(file, host)
        gone = sorted((edit.start, edit.end) for edit in device)
        self.kept += [(file, number) for number in _outside(file.tokens, gone)]
        once = (
            file.path
            if any(
                token.directive == "pragma" and re.match(r"#\s*pragma\s+once\b", token.text)
                for token in file.tokens
            )
            else ""
        )
        return tuple(
            _guarded(once, file.path, _edited(file.text, edits)) for edits in (host, device)
        )  # type: ignore[return-value]

    def require_no_host_names(self) -> None:
        """What host functions are called is not said in device code: whatever was meant there, it
        would mean something else now."""
        for file, number in self.kept:
            token = file.tokens[number]
            if (
                token.kind != "word"
                or token.text not in self.dropped
                or id(token) in self._declared
            ):
                continue
            if not self.dropped[token.text] or (
                number + 1 < len(file.tokens)
                and file.tokens[number + 1].text in tuple(self.dropped[token.text])
            ):
                raise Unsplittable(
                    f"{token.text} in device code, which is declared for the host alone",
                    file.path,
                    token.line,
                )

    def words(self) -> frozenset[str]:
        tokens = (file.tokens[number] for file, number in self.kept)
        return frozenset(
            word
            for token in tokens
            if token.kind != "string"
            for word in re.findall(r"[A-Za-z_]\w*", token.text)
        )

    # ---- preprocessor lines

    def _directive(self, file: File, place: int, host: list[_Edit], device: list[_Edit]) -> None:
        token = file.tokens[place]
        if token.directive in ("if", "ifdef", "ifndef", "elif"):
            self._condition(file, token, host, device)
        elif place in file.included:
            halves = self.of(file.included[place])
            for edits, text in zip((host, device), halves, strict=True):
                edits.append(
                    _Edit(
                        token.start,
                        token.end,
                        f"{text}\n{_line(token.line + token.text.count(chr(10)) + 1, file.path)}",
                    )
                )
        elif token.directive == "include":
            name = token.includes[1:-1]
            self._included.append(name)
            own = next((one for one in FOR_THE_DEVICE if one.fullmatch(name)), None)
            # a header of torch's, or one that includes this
            if own is None and not FOR_BOTH.fullmatch(name):
                device.append(_Edit(token.start, token.end, _blank(token.text)))
            elif own and (other := FOR_THE_DEVICE[own]):
                device.append(_Edit(token.start, token.end, f"#include <{other}>"))
            if part := IN_PLACE_ON_THE_HOST.get(name):
                host.append(_Edit(token.start, token.end, f"#include <{part}>"))
            elif name and not (FOR_BOTH.fullmatch(name) or FOR_THE_HOST.fullmatch(name)):
                host.append(_Edit(token.start, token.end, _blank(token.text)))
        elif token.directive == "pragma" and re.match(r"#\s*pragma\s+once\b", token.text):
            for edits in (host, device):
                edits.append(_Edit(token.start, token.end, _blank(token.text)))
        elif token.directive in ("define", "undef") and re.search(
            r"^#\s*\w+\s+NDEBUG\b", token.text
        ):  # NVRTC's assert is there before the first line
            raise Unsplittable(f"#{token.directive} NDEBUG", file.path, token.line)
        elif token.directive == "define":
            self._defined.update(filter(None, [token.defines]))
            launching = "<<<" in token.text or "cudaFuncSetAttribute" in token.text
            launcher = self._launching_macro(file, token) if launching else token.text
            for edits, text, names in (
                (host, launcher, _HOST_NAMES),
                (device, token.text, _DEVICE_NAMES),
            ):
                if (renamed := _renamed(text, names)) != token.text:
                    edits.append(_Edit(token.start, token.end, renamed))

    def _condition(self, file: File, token: Token, host: list[_Edit], device: list[_Edit]) -> None:
        """A condition must be true in both halves where it is under nvcc, which has read torch's
        headers for both."""
        plain = cpp_text.without_comments(token.text)
        guards = ""
        for name in dict.fromkeys(
            re.findall(r"(?<![\w.])[A-Za-z_]\w*", plain.partition(token.directive)[2])
        ):
            if name.startswith("__") and name not in KNOWN | self.macros.defined:
                raise Unsplittable(
                    f"a condition on {name}, which a compiler may define", file.path, token.line
                )
            for macro, header, wanted in _OF_HEADERS:
                if macro.fullmatch(name) and not any(
                    header.fullmatch(one) for one in self._included
                ):
                    raise Unsplittable(
                        f"a condition on {name} without {wanted} above it", file.path, token.line
                    )
            if reading.OF_LIMITS.fullmatch(name):
                raise Unsplittable(
                    f"a condition on {name}, which a header may define", file.path, token.line
                )
            if (
                name not in KNOWN
                and name not in self._defined
                and not reading.OF_MATHEMATICS.fullmatch(name)
            ):
                if token.directive == "elif":
                    raise Unsplittable(
                        f"a condition on {name} above what defines it", file.path, token.line
                    )
                what = (
                    f"{name} is defined by a header that device code has not been given: nvcc has"
                    " to compile this"
                )
                guards += f"#ifdef {name}\n#error {what}\n#endif\n"
        if guards:
            host.append(
                _Edit(
                    token.start,
                    token.end,
                    f"{guards}{_line(token.line, file.path)}\n{_renamed(token.text, _HOST_NAMES)}",
                )
            )
        for edits, names in ((host, _HOST_NAMES), (device, _DEVICE_NAMES)):
            if (renamed := _renamed(token.text, names)) != token.text and not (
                guards and edits is host
            ):
                edits.append(_Edit(token.start, token.end, renamed))

    def _launching_macro(self, file: File, token: Token) -> str:
        head = re.match(r"#\s*define\s+\w+(\([^)]*\))?", token.text)
        assert head is not None
        body = token.text[head.end() :]
        try:
            tokens = cpp_text.tokens_of(body, token.line)
            inner = File(file.path, body, tokens, brackets(tokens), {})
        except Unclear as problem:
            raise Unsplittable(
                f"{problem.what}, in a macro that launches a kernel", file.path, problem.line
            ) from None
        edits: list[_Edit] = []
        self._launches(inner, edits)
        return token.text[: head.end()] + _edited(body, edits)

    # ---- declarations

    def _declarations(
        self,
        file: File,
        first: int,
        last: int,
        host: list[_Edit],
        device: list[_Edit],
        *,
        member: bool = False,
    ) -> None:
        for item in reading.items_of(file, first, last):
            if item.kind == "directive":
                continue
            if item.kind == "scope":
                self._declarations(file, item.open + 1, item.close, host, device)
                continue
            where = reading.attributes_of(file, item, self.macros)
            if inner := next(
                (
                    token
                    for token in file.tokens[item.start : item.end]
                    if token.directive == "include"
                ),
                None,
            ):
                raise Unsplittable("an #include within a declaration", file.path, inner.line)
            if "device" not in where:
                for variable in reading.variables_of(file, item, member=member):
                    self.dropped[variable.text] = ""
                    self._declared.add(id(variable))
            if item.kind == "class":
                self._declarations(file, item.open + 1, item.close, host, [], member=True)
            elif item.kind == "function":
                self._function(file, item, where, host)
            if not member:
                self._on_device(file, item, where, device)

    def _function(self, file: File, item: Item, where: frozenset[str], host: list[_Edit]) -> None:
        """A function's body, as the host has it."""
        tokens = file.tokens
        body = (tokens[item.body].start, tokens[item.close].end)
        if "global" in where:
            names = ", ".join(reading.parameters_of(file, item))
            stub = f"{{ struct {self.stub} {{}}; {NAMESPACE}::launch<{self.stub}>({names}); }}"
            host.append(_Edit(*body, stub + _without(file, item.body, item.close + 1)))
        elif "device" in where and "host" not in where:
            name = reading.name_of(file, item)
            number = next(
                (
                    one
                    for one in range(item.start, item.parameters)
                    if tokens[one] is name or tokens[one].text == "operator"
                ),
                item.start,
            )
            if (
                number == item.start
                or tokens[number - 1 - (tokens[number - 1].text == "~")].text != "::"
            ):
                host.append(_Edit(*body, ";" + _without(file, item.body, item.close + 1)))
            else:  # a member's definition outside of its class, which a declaration cannot be
                host.append(
                    _Edit(
                        tokens[item.start].start,
                        tokens[item.close].end,
                        _without(file, item.start, item.close + 1),
                    )
                )
        elif not where & {"global", "device"}:
            for token in tokens[item.body : item.close]:
                if token.kind == "word" and self.macros.attributes.get(token.text, frozenset()) & {
                    "device",
                    "global",
                }:
                    raise Unsplittable("a lambda for the device", file.path, token.line)
        if where & {"global", "device"}:
            for token in tokens[item.body : item.close]:
                if token.text == "<<<":
                    raise Unsplittable("a kernel launched by device code", file.path, token.line)

    def _on_device(
        self, file: File, item: Item, where: frozenset[str], device: list[_Edit]
    ) -> None:
        """Leaves a declaration out of the device's half if it is the host's."""
        tokens = file.tokens[item.start : item.end]
        name = reading.name_of(file, item)
        callable_ = item.kind in ("function", "prototype")
        own = bool(where & {"global", "device"}) or (
            callable_ and "constexpr" in where and "host" not in where
        )
        if own or not (
            callable_
            or reading.mentions_host(tokens)
            or "host" in where
            or (item.kind == "other" and reading.is_host_variable(tokens, where))
        ):
            if name is not None:
                self._declared.add(id(name))
            return
        if members := self._host_members(file, item):
            if name is not None:
                self._declared.add(id(name))
            device += members
            return
        if name is not None and (
            (tokens[0].text != "using" and not reading.is_qualified(file, item, name))
            or (len(tokens) > 2 and tokens[2].text == "=")
        ):
            follows = ("(<" if tokens[0].text == "template" else "(") if callable_ else ""
            before = self.dropped.get(name.text, follows)
            self.dropped[name.text] = max(before, follows) if before and follows else ""
        device.append(_Edit(tokens[0].start, tokens[-1].end, _without(file, item.start, item.end)))

    def _host_members(self, file: File, item: Item) -> list[_Edit]:
        """Leaves functions out of a class that are the host's and name its types, and the bodies of
        its other host functions. Nothing, if its data or bases name such a type."""
        if item.kind != "class":
            return []
        parts, edits = [(item.start, item.open), (item.close, item.end)], []
        for one in reading.items_of(file, item.open + 1, item.close):
            words = {token.text for token in file.tokens[one.start : one.parameters]}
            if (
                one.kind not in ("function", "prototype")
                or "virtual" in words
                or reading.attributes_of(file, one, self.macros)
            ):
                parts.append((one.start, one.end))
                continue
            whole = reading.mentions_host(file.tokens[one.start : one.end])
            if whole or one.kind == "function":
                first = one.start if whole else one.body
                text = "" if whole else ";"
                start, end = file.tokens[first].start, file.tokens[one.end - 1].end
                edits.append(_Edit(start, end, text + _without(file, first, one.end)))
        if any(reading.mentions_host(file.tokens[slice(*part)]) for part in parts):
            return []
        return edits

    # ---- launches

    def _launches(self, file: File, host: list[_Edit]) -> None:
        """Every launch that the host's half still has, and what it says of kernels."""
        gone = sorted((edit.start, edit.end) for edit in host)
        tokens = file.tokens
        for number in _outside(tokens, gone):
            token = tokens[number]
            if token.text == "cudaFuncSetAttribute":
                host.append(_Edit(token.start, token.end, f"{NAMESPACE}::set_attribute"))
            elif token.text == "__noinline__":  # to libstdc++ a word, which must not be a macro
                host.append(_Edit(token.start, token.end, "__attribute__((noinline))"))
            elif token.text == "<<<":
                self._launch(file, number, host)
            elif token.text == "cub" and tokens[number + 1].text == "::":
                raise Unsplittable("CUB in host code", file.path, token.line)

    def _launch(self, file: File, number: int, host: list[_Edit]) -> None:
        tokens, partner = file.tokens, file.partner
        line = tokens[number].line
        first = reading.launched(file, number)
        last = number + 1
        while last + 3 < len(tokens) and not reading.is_closed(tokens, last):
            if tokens[last].text in ("<<<", ";", ")", "}", "]") or tokens[last].kind == "directive":
                break
            last = partner[last] + 1 if tokens[last].text in ("(", "[", "{") else last + 1
        if last + 3 >= len(tokens) or not reading.is_closed(tokens, last):
            raise Unsplittable("a launch whose <<< >>> is not understood", file.path, line)
        end = partner[last + 3]
        if any(one.text == "<<<" for one in tokens[number + 1 : end]):
            raise Unsplittable("a launch within a launch", file.path, line)
        configuration = file.text[tokens[number].end : tokens[last].start]
        if "//" in configuration.rpartition("\n")[2]:
            configuration += "\n"
        host.append(
            _Edit(
                tokens[first].start,
                tokens[first].start,
                f"({NAMESPACE}::Configured({configuration}), ",
            )
        )
        host.append(_Edit(tokens[number].start, tokens[last + 2].end, ""))
        host.append(_Edit(tokens[end].end, tokens[end].end, ")"))


# ---- texts ----


def _line(number: int, path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line {number} "{escaped}"'


def _guarded(once: str, path: str, text: str) -> str:
    """A file's text with its name, and once only if it says so."""
    if not once:
        return f"{_line(1, path)}\n{text}"
    mark = "FLEXOPS_ONCE_" + "".join(
        letter if letter.isalnum() and letter.isascii() else f"_{ord(letter):x}_" for letter in once
    )
    return f"#ifndef {mark}\n#define {mark}\n{_line(1, path)}\n{text}\n#endif"


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub("|".join(rf"\b{name}\b" for name in names), lambda match: names[match[0]], text)


def _blank(text: str) -> str:
    return "\n" * text.count("\n")


def _without(file: File, first: int, last: int) -> str:
    """Nothing but the lines of these tokens, and the preprocessor's among them."""
    tokens = file.tokens
    pieces, position = [], tokens[first].start
    for token in tokens[first:last]:
        if token.kind == "directive":
            pieces += [_blank(file.text[position : token.start]), token.text]
            position = token.end
    return "".join([*pieces, _blank(file.text[position : tokens[last - 1].end])])


def _outside(tokens: Sequence[Token], gone: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The numbers of the tokens that are in none of these ranges."""
    ranges = iter([*gone, (1 << 62, 1 << 62)])
    start, end = next(ranges)
    for number, token in enumerate(tokens):
        while token.start >= end:
            start, end = next(ranges)
        if token.start < start:
            yield number


def _edited(text: str, edits: Sequence[_Edit]) -> str:
    """The text with all edits; of two that overlap, the one that holds the other."""
    pieces: list[str] = []
    position = 0
    for edit in sorted(edits, key=lambda one: (one.start, -one.end)):
        if edit.start < position:
            continue
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])
