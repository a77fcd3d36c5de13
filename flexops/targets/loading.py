"""From ``matrix.toml`` to a ``Matrix``: every row gets what its toolkit shares, and everything
wrong is said at once."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from .. import _toml
from ..errors import TargetError
from ..toolchain.compat import Rules, rules
from ..toolchain.version import Version
from .conda import faults as faults_of_variants
from .conda import parse as parse_variants
from .model import Accelerator, Matrix, Target
from .validate import LEAST_PYTHON, MACHINES, Fault, meaning, missing, structure

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "matrix.toml")

Document = Mapping[str, Any]


@functools.cache
def load() -> Matrix:
    """The matrix that ships with flexops; read once in a process. Raises ``TargetError`` if it is
    wrong."""
    return read(PATH)


def read(path: str | os.PathLike[str]) -> Matrix:
    """The matrix in this file; raises ``TargetError``."""
    try:
        document = _toml.load(path)
    except ValueError as error:
        raise TargetError(f"{path} is not TOML", found=str(error)) from error
    return parse(document, rules())


def parse(document: Document, facts: Rules) -> Matrix:
    """Check ``document`` against itself and the ``facts`` about toolkits, and type it. Raises one
    ``TargetError`` with all that is wrong."""
    faults = structure(document)
    targets = []
    if not faults:  # what a field means can only be judged where it has the right type
        for row in document["target"]:
            merged = _merged(document, row)
            absent = missing(merged)
            faults += absent
            if not absent:
                target = _target(document, merged)
                faults += meaning(target, row["toolkit"], document["torch"], facts)
                targets.append(target)
        faults += _across_rows(targets)
        faults += [Fault(*fault) for fault in faults_of_variants(document, facts)]
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise TargetError(
            f"the matrix of targets has {count}:\n  " + "\n  ".join(map(str, faults)),
            fix="edit flexops/targets/matrix.toml",
        )
    return Matrix(tuple(targets), parse_variants(document))


def _merged(document: Document, row: Document) -> dict[str, Any]:
    return {
        **document.get("defaults", {}),
        **document["toolkit"].get(row.get("toolkit"), {}),
        **row,
    }


def _target(document: Document, row: Document) -> Target:
    capabilities = tuple(row["capabilities"])
    names = document.get("gpus", {})
    torch = document["torch"].get(row["torch"], {})
    return Target(
        id=row["id"],
        accelerator=cast(Accelerator, row["accelerator"]),
        toolkit=row.get("version", ""),
        toolkit_source=tuple(row.get("toolkit_source", ())),
        capabilities=capabilities,
        gpus=row.get("gpus")
        or ", ".join(names[capability] for capability in capabilities if capability in names),
        torch=row["torch"],
        cxx_standard=torch.get("cxx_standard", 17),
        python=row["python"],
        python_range=_python_range(torch),
        ninja=row["ninja"],
        machines=tuple(row.get("machines", MACHINES[:1])),
        host_compiler=tuple(row["host_compiler"]),
        least_driver=row.get("least_driver", ""),
        build_base=row["build_base"],
        runtime_base=row["runtime_base"],
        build_digest=row.get("build_digest", ""),
        runtime_digest=row.get("runtime_digest", ""),
        index=row.get("index", ""),
        index_required=row.get("index_required", False),
    )


def _python_range(torch: Document) -> tuple[str, str]:
    """Where torch and flexops both run."""
    oldest, newest = torch.get("python", ("", ""))
    least = LEAST_PYTHON
    return (str(least) if not oldest or Version.parse(oldest) < least else oldest, newest)


def _across_rows(targets: list[Target]) -> list[Fault]:
    counts = Counter(target.id for target in targets)
    faults = [
        Fault(f"target {name}", "id", f"{count} rows have it")
        for name, count in counts.items()
        if count > 1
    ]
    if targets and not any(target.accelerator == "cpu" for target in targets):
        faults.append(
            Fault("target", "accelerator", "no row is for cpu, which every machine falls back to")
        )
    return faults
