"""How figures are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def duration(seconds: float) -> str:
    """``142 s``, ``1.09 s``, ``2.3 ms``, ``45.6 us``: three significant digits or fewer."""
    if seconds >= 99.5:
        return f"{seconds:.0f} s"
    if seconds >= 9.95:
        return f"{seconds:.1f} s"
    if seconds >= 0.995:
        return f"{seconds:.2f} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us" if seconds >= 0.995e-4 else f"{seconds * 1e6:.1f} us"


def ratio(value: float, digits: int = 1) -> str:
    """``37x``, ``2.4x``, with two digits ``2.41x``."""
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.{digits}f}x"


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The rows as lines of aligned columns, the first ``left`` of them set to the left, the others
    to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def as_json(data: Mapping[str, Any]) -> str:
    """A run as JSON that can be read and compared by line: a line for each entry of a list, floats
    to six significant digits."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            text = ",\n  ".join(json.dumps(_rounded(one)) for one in value)
            parts.append(f" {json.dumps(name)}: [\n  {text}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(_rounded(value))}")
    return "{\n" + ",\n".join(parts) + "\n}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
