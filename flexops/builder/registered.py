"""The libraries that installed packages register: the entry points of ``flexops.libraries``, each a module that declares one when it is imported."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from ..errors import FlexopsError
from ..op_builder import catalog

GROUP = "flexops.libraries"


def load() -> dict[str, str]:
    """Import them all; the errors of those that cannot be, by name."""
    failed = {}
    for one in entry_points(group=GROUP):
        try:
            one.load()
        except Exception as error:  # whatever a package raises is its own
            failed[one.name] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return failed


def load_for(names: tuple[str, ...]) -> None:
    """Make the projects of ``names`` known, where flexops has none so called: by entry point, or else as a module of that name, also of this directory.

    Raises:
        FlexopsError: the module that is meant cannot be imported.
    """
    own = {spec.name for spec in catalog.CATALOG} | {op for spec in catalog.CATALOG for op in spec.ops} | {"all", "1"}
    for name in dict.fromkeys(name.partition(".")[0] for name in names if name not in own):
        point = next(iter(entry_points(group=GROUP, name=name)), None)
        try:
            if point:
                point.load()
            elif name.isidentifier():
                with contextlib.suppress(ModuleNotFoundError), _here():
                    importlib.import_module(name)
        except FlexopsError:
            raise
        except Exception as error:
            raise FlexopsError(f"{name} cannot be imported", found=f"{type(error).__name__}: {error}", fix=f'python -c "import {name}"') from error


@contextlib.contextmanager
def _here() -> Iterator[None]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))
