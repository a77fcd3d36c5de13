"""Warnings that name the line of the user's code."""

from __future__ import annotations

import sys
import warnings

# between a user's line and ours: torch's dispatcher and modules, a patched model's own code
_BETWEEN = {"flexops", "torch", "transformers", None}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn`` at the innermost line outside flexops, torch and transformers.

    A thread of autograd has no such line: the outermost is named.
    """
    frame = sys._getframe(1)
    # generated code has no module's name
    while _package(frame.f_globals) in _BETWEEN and frame.f_back:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _package(names: dict[str, object]) -> str | None:
    name = names.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None
