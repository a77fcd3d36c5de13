"""``python -m flexops_tools.bench.accuracy FILE``: the errors that tests measured, as tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def tables(rows: list[dict[str, Any]]) -> str:
    """The rows of an accuracy file in Markdown: errors against float64, over the root mean square
    of the exact values; torch's in brackets."""
    newest = {(row["device"], row["op"], row["what"], row["dtype"]): row for row in rows}
    lines: list[str] = []
    for device in dict.fromkeys(key[0] for key in newest):
        names = dict.fromkeys(key[1:3] for key in newest if key[0] == device)
        dtypes = [
            dtype for dtype in _SHORT if any(key[0] == device and key[3] == dtype for key in newest)
        ]
        head = [f"{_SHORT[dtype]} {kind}" for dtype in dtypes for kind in ("largest", "mean")]
        lines += [
            f"## {device}",
            "",
            f"| operator | of | {' | '.join(head)} |",
            f"| --- | --- |{' ---: |' * len(head)}",
        ]
        for op, what in names:
            cells = [
                _cell(newest.get((device, op, what, dtype)), kind)
                for dtype in dtypes
                for kind in ("max", "mean")
            ]
            lines.append(f"| {op} | {what} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None, kind: str) -> str:
    return (
        ""
        if row is None
        else (
            f"{row[kind] / (row['size'] or 1):.1e}"
            f" ({row[f'torch_{kind}'] / (row['size'] or 1):.1e})"
        )
    )


if __name__ == "__main__":
    print(
        tables(
            [
                json.loads(line)
                for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
            ]
        )
    )
