"""The libraries that installed packages register: the entry points of ``flexops.libraries``, each a
module that declares one when it is imported."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
from pathlib import Path

from ..build.describe import catalog
from ..errors import FlexopsError

GROUP = "flexops.libraries"


def load() -> dict[str, str]:
    """Import them all; the errors of those that cannot be, by name."""
    failed = {}
    for one in entry_points(group=GROUP):
        try:
            one.load()
        except (Exception, SystemExit) as error:  # whatever a package raises
            failed[one.name] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return failed


def unregistered() -> list[tuple[str, str]]:
    """Installed distributions that are built with flexops and register no library: each with its
    package. Imports none of them."""
    ours = {"flexops-torch", "flexops"}
    found = []
    for one in distributions():
        needs = {
            re.split(r"[^\w.-]", text, maxsplit=1)[0].replace("_", "-").lower()
            for text in one.requires or ()
        }
        if ours.isdisjoint(needs) or any(point.group == GROUP for point in one.entry_points):
            continue
        for package in (one.read_text("top_level.txt") or "").split():
            spec = find_spec(package) if package.isidentifier() else None
            places = spec.submodule_search_locations if spec else None
            if any(sources_in(Path(place)) for place in places or ()):
                found.append((one.name, package))
    return found


def sources_in(package: Path) -> list[Path]:
    """The launchers of a package's families: what says that it is a library."""
    return sorted(
        path
        for pattern in ("*_cpu.cpp", "*_cuda.cpp")
        for path in package.glob(f"csrc/*/{pattern}")
    )


def load_for(names: tuple[str, ...]) -> None:
    """Make the projects of ``names`` known, where flexops has none so called: by entry point, or
    else as a module of that name, also of this directory.

    Raises:
        FlexopsError: the module that is meant cannot be imported.
    """
    own = (
        {spec.name for spec in catalog.CATALOG}
        | {op for spec in catalog.CATALOG for op in spec.ops}
        | {"all", "1"}
    )
    for name in dict.fromkeys(name.partition(".")[0] for name in names if name not in own):
        point = next(iter(entry_points(group=GROUP, name=name)), None)
        try:
            if point:
                point.load()
            elif name.isidentifier():
                with here():
                    module = importlib.import_module(name)
                _require_operators(name, getattr(module, "__file__", None) or "built in")
        except FlexopsError:
            raise
        except ModuleNotFoundError as error:
            if error.name != name:  # of what it imports
                raise _not_imported(name, error) from error
        except (Exception, SystemExit) as error:
            raise _not_imported(name, error) from error


def _not_imported(name: str, error: BaseException) -> FlexopsError:
    found = f"{type(error).__name__}: {error}"
    what, fix = f"{name} cannot be imported", f'python -c "import {name}"'
    return FlexopsError(what, found=found, fix=fix)


def _require_operators(name: str, place: str) -> None:
    if not any(spec.project.name == name for spec in catalog.specs()):
        raise FlexopsError(
            f"there is no op called {name!r}",
            found=f"the module {place}, which declares no operators of that name",
            required=f'builder.Library("{name}", root=__file__), and operators of it',
            fix="correct the name, or declare them where the module is imported",
        )


@contextlib.contextmanager
def here() -> Iterator[None]:
    """With modules of the current directory, which a console script lacks."""
    sys.path.insert(0, place := str(Path.cwd()))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(place)
