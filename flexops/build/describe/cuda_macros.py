"""Macros that define device code: each use of one becomes what it stands for, because what is
declared there has to be read."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from . import cpp_text
from .cpp_text import Token, Unclear, brackets
from .cuda_declarations import File, Unsplittable

_PIECES = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\s*\#\#\s*|\#\s*(?P<text>\w+)|\w+|.""", re.DOTALL
)
_COMMENTS = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|//.*|/\*.*?\*/""", re.DOTALL
)


class _Macro(NamedTuple):
    """``parameters``: None of one that has no parentheses."""

    parameters: tuple[str, ...] | None
    body: str


def expanded(file: File, names: Collection[str]) -> File:
    """A file, and what it includes, with these macros' uses expanded. Lines stay where they are.

    Raises:
        Unsplittable: one has two definitions, or is not used as it is defined.
    """
    return _expanded(file, names, {}) if names else file


def _expanded(file: File, names: Collection[str], known: dict[str, _Macro]) -> File:
    included: list[File] = []
    pieces, position = [], 0
    for place, token in enumerate(file.tokens):
        if place in file.included:
            included.append(_expanded(file.included[place], names, known))
        elif token.directive == "define" and token.defines in names:
            made = _macro(token)
            if known.setdefault(token.defines, made) != made:
                what = f"another definition of the macro {token.defines}, which defines device code"
                raise Unsplittable(what, file.path, token.line)
        elif token.directive == "undef":
            known.pop(token.text.split()[-1], None)
        elif token.start >= position and token.kind == "word" and token.text in known:
            text, end = _use(file, place, known)
            pieces += [file.text[position : token.start], text]
            position = end
    text = "".join([*pieces, file.text[position:]])
    tokens = _tokens(text, file.path)
    places = [
        place for place, token in enumerate(tokens)
        if token.directive in ("include", "include_next", "import")
    ]  # fmt: skip
    before = [
        place for place, token in enumerate(file.tokens)
        if token.directive in ("include", "include_next", "import")
    ]  # fmt: skip
    again = iter(included)
    return File(
        file.path,
        text,
        tokens,
        brackets(tokens),
        {new: next(again) for new, old in zip(places, before, strict=True) if old in file.included},
    )


def _tokens(text: str, path: str) -> list[Token]:
    try:
        return cpp_text.tokens_of(text)
    except Unclear as problem:
        raise Unsplittable(problem.what, path, problem.line) from None


def _macro(token: Token) -> _Macro:
    head = re.match(r"#\s*define\s+\w+(?P<parameters>\([^)]*\))?", token.text)
    assert head is not None
    body = re.sub(r"\\\n", " ", token.text[head.end() :])
    body = _COMMENTS.sub(lambda match: match["string"] or " ", body)
    given = head["parameters"]
    names = None if given is None else tuple(one.strip() for one in given[1:-1].split(","))
    return _Macro(() if names == ("",) else names, body.replace("\n", " ").strip())


def _use(file: File, place: int, known: dict[str, _Macro]) -> tuple[str, int]:
    """What a use stands for, and where it ends."""
    token = file.tokens[place]
    macro = known[token.text]
    if macro.parameters is None:
        given, end = {}, token.end
    else:
        if file.tokens[place + 1].text != "(":
            return token.text, token.end  # the name alone is no use of it
        close = file.partner[place + 1]
        given = _arguments(file, place, macro.parameters)
        end = file.tokens[close].end
    text = _substituted(macro.body, given)
    inner = {name: one for name, one in known.items() if name != token.text}
    tokens = _tokens(text, file.path)
    if any(one.text in inner for one in tokens):
        again = File(file.path, text, tokens, brackets(tokens), {})
        text = _expanded(again, inner, dict(inner)).text
    return text + "\n" * file.text.count("\n", token.start, end), end


def _arguments(file: File, place: int, parameters: Sequence[str]) -> dict[str, str]:
    """The text of each of a macro's parameters in a use of it."""
    tokens, close = file.tokens, file.partner[place + 1]
    texts: list[str] = []
    number, start = place + 2, tokens[place + 1].end
    while number <= close:
        if tokens[number].kind == "directive":
            what = "a condition among the arguments of a macro"
            raise Unsplittable(what, file.path, tokens[number].line)
        variadic = len(texts) == len(parameters) - 1 and parameters[-1] == "..."
        if number == close or (tokens[number].text == "," and not variadic):
            texts.append(" ".join(file.text[start : tokens[number].start].split()))
            start = tokens[number].end
        elif tokens[number].text == "(":
            number = file.partner[number]
        number += 1
    if len(texts) == len(parameters) - 1 and parameters[-1] == "...":
        texts.append("")
    if not parameters and texts == [""]:
        texts = []
    if len(texts) != len(parameters):
        what = f"{len(texts)} arguments of the macro {tokens[place].text}"
        raise Unsplittable(what, file.path, tokens[place].line)
    names = ("__VA_ARGS__" if one == "..." else one for one in parameters)
    return dict(zip(names, texts, strict=True))


def _substituted(body: str, given: dict[str, str]) -> str:
    def piece(match: re.Match[str]) -> str:
        if match["text"] in given:
            text = given[match["text"]].replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'
        return "" if match[0].strip() == "##" else given.get(match[0], match[0])

    return _PIECES.sub(piece, body)
