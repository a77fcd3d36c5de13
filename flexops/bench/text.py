"""How figures are written."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``142 s``, ``1.09 s``, ``2.3 ms``: three significant digits or fewer."""
    if seconds >= 99.5:
        return f"{seconds:.0f} s"
    if seconds >= 9.95:
        return f"{seconds:.1f} s"
    if seconds >= 0.995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms"


def ratio(value: float) -> str:
    """``37x``, ``2.4x``."""
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x"
