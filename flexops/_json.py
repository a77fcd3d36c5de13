"""Reads JSON from disk: bounded, from plain files only, and with ``ValueError`` for whatever is
wrong with the text."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from typing import Any, NoReturn

MAX_BYTES = 64 * 2**20
"""No file that flexops writes comes near it."""


def load(
    path: str | os.PathLike[str], *, accept: Callable[[os.stat_result], str] | None = None
) -> Any:
    """The document in a file. Raises ``OSError`` if it cannot be read, or ``accept`` says what is
    wrong with it; ``ValueError`` for what is no JSON."""
    return parse(read(path, accept=accept))


def parse(text: str | bytes) -> Any:
    """The document in a text. Raises ``ValueError``, whatever the fault: ``json`` alone also raises
    ``RecursionError``, and takes NaN."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def read(
    path: str | os.PathLike[str],
    *,
    accept: Callable[[os.stat_result], str] | None = None,
    limit: int = MAX_BYTES,
) -> bytes:
    """A plain file's content, which may be at most so many bytes. A device or a pipe, whose content
    need never end, raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        wrong = (
            "not a plain file"
            if not stat.S_ISREG(status.st_mode)
            else "too large"
            if status.st_size > limit
            else accept(status)
            if accept
            else ""
        )
        if wrong:
            raise OSError(errno.EPERM, wrong, os.fspath(path))
        parts, left = [], limit
        # bounded by what is read, too: it may be growing
        while left > 0 and (part := os.read(descriptor, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
