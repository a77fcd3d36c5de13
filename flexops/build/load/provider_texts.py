"""Texts that kernels are compiled with besides their source, by number: what people's own
expressions became. A library asks for ``<kernel>#<number>``."""

from __future__ import annotations

_texts: dict[int, str] = {}


def add(number: int, text: str) -> None:
    """Make a text known. It ends with a line feed and comes before the kernel's header."""
    _texts[number] = text


def of(number: int) -> str:
    """The text; raises ``KeyError``."""
    return _texts[number]
