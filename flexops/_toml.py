"""Reads TOML on every Python that flexops meets, a bare Python 3.10 included."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from .errors import FlexopsError

_READERS = ("tomllib", "tomli", "pip._vendor.tomli")
"""The standard library's (from 3.11), its backport, and pip's copy of the backport: all that a bare
Python 3.10 has."""


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document in this file. Raises ``FlexopsError`` if no reader is available, ``ValueError``
    (of a subclass) for text that is not TOML."""
    for name in _READERS:
        try:
            reader = import_module(name)
        except ImportError:
            continue
        with open(path, "rb") as file:
            document: dict[str, Any] = reader.load(file)
            return document
    raise FlexopsError(
        "this Python cannot read TOML",
        found=f"none of {', '.join(_READERS)}",
        required="Python >= 3.11, or tomli",
        fix="pip install tomli",
    )
