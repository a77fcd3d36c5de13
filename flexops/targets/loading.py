"""From ``matrix.toml`` to a ``Matrix``: every row gets what its toolkit shares. The file is checked
where it is edited (``flexops_tools.targets.validate``)."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, cast

from .. import _toml
from ..toolchain.version import Version
from .model import Accelerator, Matrix, Target

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "matrix.toml")
MACHINES = ("x86_64", "aarch64")
LEAST_PYTHON = "3.10"
"""What flexops itself needs."""

Document = Mapping[str, Any]


@functools.cache
def load() -> Matrix:
    """The matrix that ships with flexops; read once in a process."""
    return read(PATH)


def read(path: str | os.PathLike[str]) -> Matrix:
    """The matrix in this file."""
    document = _toml.load(path)
    targets = (target_of(document, merged(document, row)) for row in document["target"])
    return Matrix(tuple(targets), document.get("conda", {}))


def merged(document: Document, row: Document) -> dict[str, Any]:
    """A row with the fields of its toolkit."""
    return {
        **document.get("defaults", {}),
        **document["toolkit"].get(row.get("toolkit"), {}),
        **row,
    }


def target_of(document: Document, row: Document) -> Target:
    """A merged row, typed."""
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
    least = Version.parse(LEAST_PYTHON)
    return (LEAST_PYTHON if not oldest or Version.parse(oldest) < least else oldest, newest)
