"""Dotted versions. A NamedTuple in a module of its own: every warm start imports it, and to define
a dataclass takes ten times as long."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """A dotted version; compares by its numbers (``Version.parse("13.0") <
    Version.parse("13.0.2")``)."""

    parts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Version:
        """``"12.1.105"``, ``"2.14.1+cu130"`` (the local part is dropped), ``"13.0"``; raises
        ``ValueError`` if it starts with no number."""
        parts: list[int] = []
        for piece in text.split("+")[0].split("."):
            digits = ""
            for character in piece:
                if not character.isdigit():
                    break
                digits += character
            if not digits:
                break
            parts.append(int(digits))
            if digits != piece:
                break
        if not parts:
            raise ValueError(f"not a version: {text!r}")
        return cls(tuple(parts))

    @property
    def major(self) -> int:
        return self.parts[0]

    @property
    def minor(self) -> int:
        return self.parts[1] if len(self.parts) > 1 else 0

    @property
    def major_minor(self) -> str:
        return f"{self.major}.{self.minor}"

    def __str__(self) -> str:
        return ".".join(map(str, self.parts))
