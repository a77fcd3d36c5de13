"""The conda channel: builds the recipe's variants into it, indexes it, and checks that it solves,
installs and works.

A channel is a folder: this writes one, and any web server, bucket or ``file://`` serves it.
conda-build or the rattler bindings (the extra ``conda``) read and write the packages, in other
processes. Imports neither torch nor those.
"""

from __future__ import annotations

from .building import Built, build
from .check import PACKAGE, Installed, Machine, Solved, install_and_examine, machines, solve
from .indexing import audit, index, verify
from .place import Place

__all__ = [
    "PACKAGE",
    "Built",
    "Installed",
    "Machine",
    "Place",
    "Solved",
    "audit",
    "build",
    "index",
    "install_and_examine",
    "machines",
    "solve",
    "verify",
]
