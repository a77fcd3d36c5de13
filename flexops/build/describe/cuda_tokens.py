"""CUDA C++ as tokens: enough to tell code from comments, strings and preprocessor lines, and to
match its brackets. No preprocessor runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["word", "number", "string", "punctuation", "directive"]

_STRING = r'(?:u8|[uUL])?"(?:[^"\\\n]|\\[\s\S])*"'
_CHARACTER = r"(?:u8|[uUL])?'(?:[^'\\\n]|\\[\s\S])+'"
_COMMENT = r"//(?:[^\\\n]|\\[\s\S])*|/\*[\s\S]*?\*/"
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
_RAW = ("R", "LR", "uR", "UR", "u8R")
_OPEN, _CLOSE = "([{", ")]}"


class Unclear(Exception):
    """Something that is not surely understood: what it is, and the line."""

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


def _has_no_end(token: str, kind: str, text: str, end: int) -> bool:
    """Whether it only looks like this token: it begins a comment or a raw string without an end."""
    if kind == "directive":
        return "/*" in without_comments(token)
    return (token == "/" and text.startswith("*", end)) or (
        kind == "word" and token in _RAW and text.startswith('"', end)
    )


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
            conditions.append(len(opened))
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
