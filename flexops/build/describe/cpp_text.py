"""Reads C++ and CUDA text: tokens, brackets, comments, and what ``#include`` lines reach.

No preprocessor runs. A reader reports text that it does not understand (``Unclear``, "unclear").
Standard library only, and no import of flexops: ``plan/hipify.py`` loads this file by its path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Kind = Literal["word", "number", "string", "punctuation", "directive"]
Verdict = Literal["reached", "not reached", "unclear"]

_PREFIX = "(?:u8|[uUL])?"
_QUOTED = r'"[^"\\\n]*(?:\\[\s\S][^"\\\n]*)*"'
_CHARACTERS = r"'(?:[^'\\\n]|\\[\s\S])+'"
_STRING, _CHARACTER = _PREFIX + _QUOTED, _PREFIX + _CHARACTERS
_COMMENT = r"//[^\\\n]*(?:\\[\s\S][^\\\n]*)*|/\*[\s\S]*?\*/"
_TOKEN = re.compile(
    rf"""
    (?P<blank>[ \t\r\f\v\n]+|\\\r?\n)
  | (?P<comment>{_COMMENT})
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^ ()\\\t\v\f\n"]{{0,16}})\([\s\S]*?\)(?P=mark)")
  | (?P<string>{_STRING}|{_CHARACTER})
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'(?=\w)|[\w.])*)
  | (?P<word>[A-Za-z_$][\w$]*)
  | (?P<directive>\#(?:{_COMMENT}|{_STRING}|{_CHARACTER}|\\[\s\S]|[^\\\n])*)
  | (?P<punctuation><<<|::|->|==|<=|>=|!=|&&|\|\||\.\.\.|[-+*/%&|^~!<>=?:;,.(){{}}\[\]@])
    """,
    re.VERBOSE,
)
_DIRECTIVE = re.compile(r"#(?:\s|\\\n|/\*[\s\S]*?\*/)*(\w*)")
_COMPLETE = re.compile(f"{_COMMENT}|{_STRING}|{_CHARACTER}")
# each branch begins with a letter of its own, which re looks for before it tries any
_STRING_OR_COMMENT = re.compile(f"{_QUOTED}|{_CHARACTERS}|{_COMMENT}|\\\\\n")
_NOT_CODE = re.compile(rf"{_COMMENT}|{_STRING}|{_CHARACTER}|^[ \t]*\#(?:\\\n|[^\n])*", re.MULTILINE)
_DIRECTIVE_LINE = re.compile(r"^[ \t]*#[ \t]*(\w+)[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_FILE = re.compile(r'<([^>]+)>|"([^"]+)"')
_HARMLESS_PRAGMA = re.compile(r"once\b|GCC diagnostic\b|clang diagnostic\b")
_RAW = ("R", "LR", "uR", "UR", "u8R")
_OPEN, _CLOSE = "([{", ")]}"


class Unclear(Exception):
    """Something that is not understood with certainty: what it is, and the line."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.what, self.line = what, line


class Token(NamedTuple):
    kind: Kind
    text: str
    start: int
    line: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def directive(self) -> str:
        """``define`` of a preprocessor line; "" of anything else."""
        found = _DIRECTIVE.match(self.text) if self.kind == "directive" else None
        return found[1] if found else ""

    @property
    def defines(self) -> str:
        """The name that a ``#define`` defines; "" of anything else."""
        found = re.match(r"#\s*define\s+([A-Za-z_$][\w$]*)", self.text)
        return found[1] if found and self.kind == "directive" else ""

    @property
    def includes(self) -> str:
        """What an ``#include`` includes, with its brackets or quotes; "" if that is a macro."""
        found = re.match(r'#\s*include\s*(<[^>]+>|"[^"]+")', self.text)
        return found[1] if found and self.kind == "directive" else ""


def tokens_of(text: str, line: int = 1) -> list[Token]:
    """Everything but blanks and comments.

    Raises:
        Unclear: a comment, string or character that does not end, a line that may or may not go on,
            or a character that C++ has no use for.
    """
    found: list[Token] = []
    position, fresh = 0, True  # fresh: nothing but blanks and comments on this line so far
    while position < len(text):
        match = _TOKEN.match(text, position)
        kind = (match.lastgroup or "") if match else ""
        if (
            match is None
            or _has_no_end(match[0], kind, text, match.end())
            or (kind == "directive" and not fresh)
        ):
            raise Unclear(
                f"a comment or string that does not end, or a stray {text[position]!r}", line
            )
        # to g++ the line goes on
        if kind in ("comment", "directive") and re.search(r"\\[ \t\f\v]+$", match[0]):
            raise Unclear(
                "a backslash with blanks behind it, at a line's end", line + match[0].count("\n")
            )
        if kind not in ("blank", "comment"):
            found.append(
                Token("string" if kind in ("raw", "mark") else kind, match[0], position, line)  # type: ignore[arg-type]
            )
            fresh = False
        if "\n" in match[0] and kind in ("blank", "comment"):
            fresh = True
        line += match[0].count("\n")
        position = match.end()
    return found


def without_comments(line: str) -> str:
    """A preprocessor line without its comments and strings."""
    return _COMPLETE.sub(" ", line)


def blanked(text: str) -> str:
    """A text with comments, strings and preprocessor lines as blanks, each character in place."""
    return _NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def closing(text: str, opening: int) -> int:
    """Where the bracket at ``opening`` closes in a text without comments and strings."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] in _OPEN) - (text[position] in _CLOSE)
        if depth == 0:
            return position
    return len(text)


def parts(text: str) -> Iterator[str]:
    """The parts between commas that no bracket encloses, angles included."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _has_no_end(token: str, kind: str, text: str, end: int) -> bool:
    """Whether it only looks like this token: it begins a comment or a raw string without an end."""
    if kind == "directive":
        return "/*" in without_comments(token)
    return (token == "/" and text.startswith("*", end)) or (
        kind == "word" and token in _RAW and text.startswith('"', end)
    )


_CPLUSPLUS = re.compile(r"#\s*(?:ifdef\s+|if\s+defined\s*\(?\s*)__cplusplus\s*\)?")


def brackets(tokens: Sequence[Token]) -> dict[int, int]:
    """For each bracket the number of its partner.

    Raises:
        Unclear: they do not match, or a branch of a condition opens what it does not close.
    """
    partner: dict[int, int] = {}
    opened: list[int] = []
    conditions: list[int] = []
    for number, token in enumerate(tokens):
        if token.kind == "punctuation" and token.text in _OPEN:
            opened.append(number)
        elif token.kind == "punctuation" and token.text in _CLOSE:
            if (
                not opened
                or _OPEN.index(tokens[opened[-1]].text) != _CLOSE.index(token.text)
                or (conditions and conditions[-1] >= len(opened))
            ):
                raise Unclear(
                    f"a {token.text} without its partner (in one branch of an #if?)", token.line
                )
            partner[number] = opened.pop()
            partner[partner[number]] = number
        elif token.directive in ("if", "ifdef", "ifndef"):
            # what C++ alone reads: extern "C" { and its end
            conditions.append(-1 if _CPLUSPLUS.fullmatch(token.text.strip()) else len(opened))
        elif token.directive == "endif" and conditions and conditions[-1] < 0:
            conditions.pop()
        elif token.directive in ("else", "elif", "endif"):
            if not conditions or conditions[-1] != len(opened):
                raise Unclear("a bracket that one branch of an #if opens", token.line)
            if token.directive == "endif":
                conditions.pop()
    if opened or conditions:
        line = tokens[opened[-1]].line if opened else tokens[-1].line
        raise Unclear("a bracket or an #if that is not closed", line)
    return partner


def after_angles(tokens: Sequence[Token], partner: dict[int, int], number: int) -> int:
    """The number of the token after the template arguments or parameters that begin here.

    Raises:
        Unclear: they do not end.
    """
    depth, start = 0, number
    while number < len(tokens):
        text = tokens[number].text
        if tokens[number].kind == "punctuation":
            if text in _OPEN:
                number = partner[number]
            elif text in ("<", ">"):
                depth += 1 if text == "<" else -1
                if depth == 0:
                    return number + 1
            elif text in ";)]}":
                break
        number += 1
    raise Unclear("template arguments that do not end", tokens[start].line)


def before_angles(tokens: Sequence[Token], partner: dict[int, int], number: int) -> int:
    """The number of the token before the template arguments that end here; -1 if it is none."""
    depth = 0
    while number >= 0:
        text = tokens[number].text
        if tokens[number].kind == "punctuation":
            if text in _CLOSE:
                number = partner[number]
            elif text in ("<", ">"):
                depth += 1 if text == ">" else -1
                if depth == 0:
                    return number - 1
            elif text in ";([{":
                return -1
        number -= 1
    return -1


# ---- what #include lines reach ----


def reaches_first(header: str, text: str, folder: str, include_dirs: Sequence[str]) -> Verdict:
    """Whether a source reaches ``header`` before anything that could change what the header means.

    "reached": only includes, comments and declarations stand before it, so it may as well be
    included first. "unclear": a macro or a condition stands before it, here or in one of the user's
    own headers.

    Args:
        text: the source.
        folder: the directory it is in.
        include_dirs: the user's include path. What is found in neither is a system header.
    """
    return _scan(header, text, folder, include_dirs, set())


def own_headers(
    text: str,
    folder: str,
    include_dirs: Sequence[str],
    found: dict[str, None] | None = None,
    missing: dict[str, None] | None = None,
) -> list[str]:
    """Every file of the user's own that a source can reach, whichever branch of a condition its
    ``#include`` stands in.

    ``found`` has those of the sources before it, with the same include path: each is read once.
    ``missing`` gets the names that are no such file.
    """
    found = {} if found is None else found
    _collect(text, folder, include_dirs, found, {} if missing is None else missing)
    return list(found)


def _scan(
    header: str, text: str, folder: str, include_dirs: Sequence[str], seen: set[str]
) -> Verdict:
    directives = list(_directives(text))
    if _guard(directives):
        directives = directives[2:-1]
    for word, rest in directives:
        if word == "include":
            verdict = _follow(header, rest, folder, include_dirs, seen)
            if verdict != "not reached":
                return verdict
        elif word != "line" and (word != "pragma" or not _HARMLESS_PRAGMA.match(rest)):
            return "unclear"
    return "not reached"


def _follow(
    header: str, rest: str, folder: str, include_dirs: Sequence[str], seen: set[str]
) -> Verdict:
    match = _FILE.match(rest)
    if match is None:
        return "unclear"  # the name is a macro
    name = match[1] or match[2]
    path = resolve(name, folder if match[2] else None, include_dirs)
    if path is None:
        return "reached" if name == header else "not reached"
    if path in seen:
        return "not reached"
    seen.add(path)
    return _scan(header, _read(path), os.path.dirname(path), include_dirs, seen)


def _collect(
    text: str,
    folder: str,
    include_dirs: Sequence[str],
    found: dict[str, None],
    missing: dict[str, None],
) -> None:
    for word, rest in _directives(text):
        match = _FILE.match(rest) if word == "include" else None
        if match is None:
            continue
        name = match[1] or match[2]
        path = resolve(name, folder if match[2] else None, include_dirs)
        if path is None:
            missing[name] = None
        elif path not in found:
            found[path] = None
            _collect(_read(path), os.path.dirname(path), include_dirs, found, missing)


def included(text: str) -> Iterator[str]:
    """The names in the ``#include`` lines of a text, in every branch of a condition."""
    for word, rest in _directives(text):
        if word == "include" and (match := _FILE.match(rest)):
            yield match[1] or match[2]


def _directives(text: str) -> Iterator[tuple[str, str]]:
    plain = _STRING_OR_COMMENT.sub(lambda match: match[0] if match[0][0] in "\"'" else " ", text)
    for match in _DIRECTIVE_LINE.finditer(plain):
        yield match[1], match[2]


def _guard(directives: Sequence[tuple[str, str]]) -> bool:
    """Whether the file is wrapped in an include guard: ``#ifndef X``, ``#define X``, ...,
    ``#endif``."""
    if (
        len(directives) < 3
        or [word for word, _ in directives[:2]] != ["ifndef", "define"]
        or directives[-1][0] != "endif"
    ):
        return False
    return directives[0][1] == directives[1][1]


def resolve(name: str, folder: str | None, include_dirs: Sequence[str]) -> str | None:
    for directory in (*((folder,) if folder else ()), *include_dirs):
        path = os.path.normpath(os.path.join(directory, name))
        if os.path.isfile(path):
            return path
    return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()
