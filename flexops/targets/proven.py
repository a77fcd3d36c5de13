"""What was proven of each row, and when, as tables. They follow from what ``flexops target prove --update`` wrote, and say nothing else.

``docs/proven.json`` has the facts, by what they are of:

    kernels   <compiler and architecture> -> how many compiled, for how many families
    torch     <version with its build, and the processor if it is not x86_64> -> libraries compiled, linked and opened, operators right on the CPU, tests
    gpu       <name> -> its capability, the CUDA that made the kernels, the torch that ran them, tests

Tests are by file (and what narrowed it, if not all of its tests were run): how many passed, which failed, how many were skipped for which reason.
Each has the date and the flexops that it is of, version and commit, which the tables say: what is older than an edit says nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _json
from ..errors import TargetError
from .model import Matrix, Target

FACTS = "docs/proven.json"
Facts = Mapping[str, Mapping[str, Mapping[str, Any]]]
_NOTHING = "-"


def table(matrix: Matrix, facts: Facts) -> list[str]:
    """Of every row."""
    head = ("target", "kernels compiled", "host code compiled, linked and opened", "operators right on the CPU", "kernels run on a GPU")
    return _lines(head, [(f"`{row.id}`", compiled(row, facts), opened(row, facts), right(row, facts), ran(row, facts)) for row in matrix.targets])


def suites(matrix: Matrix, facts: Facts) -> list[str]:
    """What came of the tests on each torch of the matrix, by folder."""
    torchs = {name: one for row in matrix.targets for machine in row.machines if (one := facts.get("torch", {}).get(name := name_of(build_of(row), machine)))}
    lines = []
    for name in sorted(torchs, key=lambda name: [int(part) for part in name.partition("+")[0].split(".")]):
        folders: dict[str, list[Mapping[str, Any]]] = {}
        for suite, one in torchs[name].get("tests", {}).items():
            file, *narrowed = suite.split(" ", 1)
            folders.setdefault(" ".join([file.rpartition("/")[0], *narrowed]), []).append(one)
        for folder, files in sorted(folders.items()):
            passed, failed, skipped = (sum(counts[k] for counts in map(_counts, files)) for k in range(3))
            lines.append((name, f"`{folder}`", str(len(files)), *map(str, (passed, failed, skipped)), _since(files)))
    return _lines(("torch", "tests", "files", "passed", "failed", "skipped", "when, of which commit"), lines)


def page_tables(matrix: Matrix, facts: Facts) -> list[str]:
    """What the page of targets says: both by row and by torch."""
    return [*table(matrix, facts), "", *suites(matrix, facts)]


def short_table(matrix: Matrix, facts: Facts) -> list[str]:
    """A line for each toolkit."""
    toolkits: dict[str, list[Target]] = {}
    for row in matrix.targets:
        toolkits.setdefault(row.toolkit_name, []).append(row)
    head = ("toolkit", "torch", "kernels compiled for", "host code linked and opened", "operators right on the CPU", "kernels run on", "when, of which commit")
    return _lines(head, [_short(rows, facts) for rows in toolkits.values()])


def compiled(row: Target, facts: Facts) -> str:
    return _joined([f"{one['kernels']} of {one['families']} families{by}, {_since([one])}" for _, by, one in _of_compiler(row, facts)])


def opened(row: Target, facts: Facts) -> str:
    return _joined([f"{one['opened']} libraries{where}, {_since([one])}" for where, one in _of_torch(row, facts)])


def right(row: Target, facts: Facts) -> str:
    return _joined([f"{one['right on the CPU']} families{_tests(one)}{where}, {_since(_with_tests([one]))}" for where, one in _of_torch(row, facts)])


def ran(row: Target, facts: Facts) -> str:
    return _joined([f"{name}, from torch {one['torch']}{_tests(one)}, {_since([one])}" for name, one in _of_gpu(row, facts)])


def name_of(version: str, machine: str) -> str:
    """What a torch is called in the facts."""
    return version if machine == "x86_64" else f"{version} {machine}"


def build_of(row: Target) -> str:
    """The torch of a row, as it calls itself: ``2.14.1+cu130``."""
    return row.torch + {"cuda": f"+cu{row.toolkit_minor.replace('.', '')}", "rocm": f"+rocm{row.toolkit_minor}", "cpu": "+cpu"}[row.accelerator]


def _short(rows: Sequence[Target], facts: Facts) -> tuple[str, ...]:
    first = rows[0]
    toolkit = {"cpu": "none", "cuda": f"CUDA {first.toolkit_minor}", "rocm": f"ROCm {first.toolkit_minor}"}[first.accelerator]
    kernels = [(capability + by, one) for row in rows for capability, by, one in _of_compiler(row, facts)]
    gpus = [(f"{name} (by torch {one['torch'].partition('+')[0]})", one) for row in rows for name, one in _of_gpu(row, facts)]
    torchs = _of_torch(first, facts)
    proofs = [one for _, one in (*kernels, *torchs, *gpus)]
    return (
        toolkit, first.torch, _joined([what for what, _ in kernels]), _joined(["yes" + where for where, _ in torchs]),
        _joined([f"{one['right on the CPU']} families{_tests(one)}{where}" for where, one in torchs]), _joined([what for what, _ in gpus]),
        _since(_with_tests(proofs)),
    )  # fmt: skip


def _of_compiler(row: Target, facts: Facts) -> list[tuple[str, str, Mapping[str, Any]]]:
    """What compiled for which of the row's architectures: by its own NVRTC; or by a hipcc, which is named because it is of another ROCm."""
    compiler = f"NVRTC {row.toolkit_minor} " if row.accelerator == "cuda" else "hipcc "
    found = []
    for capability in row.capabilities:
        architecture = f"sm_{capability.replace('.', '')}" if row.accelerator == "cuda" else capability
        for name, one in facts.get("kernels", {}).items():
            if name.startswith(compiler) and name.endswith(f" {architecture}"):
                found.append((capability, "" if row.accelerator == "cuda" else f" (by {name.rpartition(' ')[0]})", one))
    return found


def _of_torch(row: Target, facts: Facts) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(machine, facts.get("torch", {}).get(name_of(build_of(row), machine))) for machine in row.machines]
    return [("" if machine == "x86_64" else f" ({machine}{', emulated' if one.get('emulated') else ''})", one) for machine, one in found if one]


def _of_gpu(row: Target, facts: Facts) -> list[tuple[str, Mapping[str, Any]]]:
    """GPUs that ran kernels which this row's compiler made for this row's architecture."""
    return [(name, one) for name, one in facts.get("gpu", {}).items() if one["cuda"] == row.toolkit_minor and one["capability"] in row.capabilities]


def _since(proofs: Sequence[Mapping[str, Any]]) -> str:
    """The oldest's date, and every commit that any of them is of."""
    commits = dict.fromkeys(f"`{one['flexops'].split()[-1]}`" for one in proofs if "flexops" in one)
    return ", ".join([min(one["date"] for one in proofs), *commits]) if proofs else _NOTHING


def _with_tests(proofs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [*proofs, *(test for one in proofs for test in one.get("tests", {}).values())]


def _tests(one: Mapping[str, Any]) -> str:
    passed, failed = (sum(counts[k] for counts in map(_counts, one.get("tests", {}).values())) for k in range(2))
    return (f", {passed} tests" if passed else "") + (f" ({failed} failed)" if failed else "")


def _counts(file: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many passed, failed and were skipped."""
    return file["passed"], len(file["failed"]), sum(file["skipped"].values())


def _joined(cells: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(cells)) if cells else _NOTHING


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The facts; none where there is no such file.

    Raises:
        TargetError: it cannot be read.
    """
    try:
        found: dict[str, dict[str, dict[str, Any]]] = _json.load(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TargetError("what was proven cannot be read", found=f"{path}: {error}", fix=f"git checkout {FACTS}") from error
    return found


def write(path: Path, section: str, name: str, fact: Mapping[str, Any]) -> None:
    """Put a fact into its place: a section, and in it what it is of."""
    known = read(path)
    known.setdefault(section, {})[name] = dict(fact)
    ordered = {title: dict(sorted(entries.items())) for title, entries in sorted(known.items())}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
