"""Measurements that show what flexops claims: both sides of every comparison in one run, on this
machine. ``case`` is for cases of anybody's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .own import case as case


def __getattr__(name: str) -> Any:
    """``case``, which needs torch, at its first use."""
    if name == "case":
        from .own import case

        return case
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
