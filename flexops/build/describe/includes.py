"""Reads ``#include`` lines as far as that goes without a preprocessor: enough to be sure of the
simple cases, and to know the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal

Verdict = Literal["reached", "not reached", "unclear"]

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\\\n", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_FILE = re.compile(r'<([^>]+)>|"([^"]+)"')
_HARMLESS_PRAGMA = re.compile(r"once\b|GCC diagnostic\b|clang diagnostic\b")


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
    text: str, folder: str, include_dirs: Sequence[str], found: dict[str, None] | None = None
) -> list[str]:
    """Every file of the user's own that a source can reach, whichever branch of a condition its
    ``#include`` stands in.

    ``found`` has those of the sources before it, with the same include path: each is read once.
    """
    found = {} if found is None else found
    _collect(text, folder, include_dirs, found)
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


def _collect(text: str, folder: str, include_dirs: Sequence[str], found: dict[str, None]) -> None:
    for word, rest in _directives(text):
        match = _FILE.match(rest) if word == "include" else None
        path = (
            resolve(match[1] or match[2], folder if match[2] else None, include_dirs)
            if match
            else None
        )
        if path and path not in found:
            found[path] = None
            _collect(_read(path), os.path.dirname(path), include_dirs, found)


def _directives(text: str) -> Iterator[tuple[str, str]]:
    for match in _DIRECTIVE.finditer(_COMMENT.sub(" ", text)):
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
