"""The table "tested with": what was done with each toolkit and torch, and on which day.

``flexops target prove --update`` writes facts into ``RECORD``, one a line;
``flexops target render`` writes the table into the pages that show it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flexops import _json
from flexops.errors import TargetError
from flexops.targets.model import Matrix, Target

RECORD = "tests/golden/tested-with.json"
KERNELS, OPERATORS, TESTS = "kernels compiled for", "operators built and verified on", "tests:"
_KINDS = (KERNELS, OPERATORS, TESTS)
_NO_TOOLKIT = "none (CPU)"


class Fact(NamedTuple):
    """One thing that was done. A newer fact replaces the one that differs in outcome and date only.

    Attributes:
        toolkit: such as ``CUDA 13.0``.
        torch: its release, such as ``2.14.1``; empty if no row of the matrix has this toolkit.
        kind: ``KERNELS``, ``OPERATORS`` or ``TESTS``.
        subject: an architecture, a processor or GPU, or the folder of tests.
        outcome: of tests, how many passed, failed and were skipped; of kernels, of how many
            families if not of all.
        date: in ISO format, UTC.
    """

    toolkit: str
    torch: str
    kind: str
    subject: str
    outcome: str
    date: str


def table(matrix: Matrix, facts: Iterable[Fact]) -> list[str]:
    """Markdown: a line for each toolkit and torch, toolkits in the order of the matrix."""
    known = list(facts)
    toolkits = list(dict.fromkeys(map(toolkit_of, matrix.targets)))
    shown = sorted(
        {(one.toolkit, one.torch) for one in known}, key=lambda key: _place(key, toolkits)
    )
    lines = ["| toolkit | torch | what was done | date |", "| --- | --- | --- | --- |"]
    for toolkit, torch in shown:
        mine = [one for one in known if (one.toolkit, one.torch) == (toolkit, torch)]
        date = min(one.date for one in mine)
        lines.append(f"| {toolkit} | {torch or '-'} | {_done(mine)} | {date} |")
    return lines


def _place(key: tuple[str, str], toolkits: Sequence[str]) -> tuple[int, list[int], str]:
    toolkit, torch = key
    at = toolkits.index(toolkit) if toolkit in toolkits else len(toolkits)
    return at, [int(part) for part in torch.split(".") if part.isdecimal()], toolkit


def _done(facts: Sequence[Fact]) -> str:
    parts = []
    for kind in _KINDS:
        mine = sorted(
            (one for one in facts if one.kind == kind), key=lambda one: _number(one.subject)
        )
        said = ", ".join(one.subject + f" ({one.outcome})" * bool(one.outcome) for one in mine)
        parts += [f"{kind} {said}"] if mine else []
    return "; ".join(parts)


def _number(subject: str) -> tuple[float, str]:
    """Sorts capabilities as numbers, so that 10.0 comes after 9.0."""
    return (float(subject) if subject.replace(".", "", 1).isdecimal() else 0.0, subject)


def toolkit_of(row: Target) -> str:
    names = {
        "cpu": _NO_TOOLKIT,
        "cuda": f"CUDA {row.toolkit_minor}",
        "rocm": f"ROCm {row.toolkit_minor}",
    }
    return names[row.accelerator]


def toolkit_of_torch(version: str) -> str:
    """The toolkit in a version such as ``2.14.1+cu130``, ``2.13.0+rocm7.2`` or ``2.13.0+cpu``."""
    build = version.partition("+")[2]
    if build.startswith("cu"):
        return f"CUDA {build[2:-1]}.{build[-1]}"
    return f"ROCm {build[4:]}" if build.startswith("rocm") else _NO_TOOLKIT


def torch_of(matrix: Matrix, toolkit: str) -> str:
    """The torch of the rows with this toolkit; empty if there is none."""
    return next((row.torch for row in matrix.targets if toolkit_of(row) == toolkit), "")


def build_of(row: Target) -> str:
    """The torch of a row, as it calls itself: ``2.14.1+cu130``."""
    builds = {
        "cuda": f"+cu{row.toolkit_minor.replace('.', '')}",
        "rocm": f"+rocm{row.toolkit_minor}",
    }
    return row.torch + builds.get(row.accelerator, "+cpu")


def read(path: Path) -> list[Fact]:
    """The facts; none if the file is missing.

    Raises:
        TargetError: it cannot be read.
    """
    try:
        return [Fact(**one) for one in _json.load(path)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        fix = f"git checkout {RECORD}"
        raise TargetError(
            "the record of tests cannot be read", found=f"{path}: {error}", fix=fix
        ) from error


def write(path: Path, new: Iterable[Fact]) -> None:
    """Add facts, each in the place of an older one about the same."""
    known = {one[:4]: one for one in (*read(path), *new)}
    lines = ",\n".join(
        f" {json.dumps(known[key]._asdict(), ensure_ascii=False)}" for key in sorted(known)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
