"""The families that there are: those that flexops ships, and those of the projects that registered
theirs (``flexops.builder``).

``families.py`` declares flexops' own; what a family is built from, its folder in ``csrc/`` says
(``spec.py``).
"""

from __future__ import annotations

from ...errors import FlexopsError, SettingsError
from .families import CATALOG as CATALOG
from .spec import FLEXOPS, OpSpec, Project

_projects: dict[str, Project] = {FLEXOPS.name: FLEXOPS}
_others: dict[str, OpSpec] = {}


def register(project: Project) -> None:
    """Make a project known.

    Raises:
        FlexopsError: its namespace is taken.
    """
    if other := _projects.get(project.name):
        found = f"by {other.package or 'flexops itself'}, and now by {project.package}"
        required = "one builder.Library for each namespace"
        raise FlexopsError(
            f"the namespace {project.name} is registered twice",
            found=found,
            required=required,
            fix="give one of the libraries another name",
        )
    _projects[project.name] = project


def add(spec: OpSpec) -> None:
    """Make a family of a registered project known, or more operators of it."""
    _others[spec.name] = spec


def specs() -> tuple[OpSpec, ...]:
    """Every family: flexops' own, then those of registered projects."""
    return (*CATALOG, *_others.values())


def find(name: str) -> OpSpec:
    """The spec called ``name``; raises ``FlexopsError`` naming the ones there are."""
    for spec in specs():
        if spec.name == name:
            return spec
    import difflib  # only for an error

    families = [spec.name for spec in specs()]
    near = difflib.get_close_matches(
        name, dict.fromkeys([*families, *(op for spec in CATALOG for op in spec.ops)]), n=3
    )
    found = f"did you mean {' or '.join(near)}?" if near else ""
    required = f"{', '.join(families)}; or an operator of theirs, such as swiglu"
    raise SettingsError(
        f"there is no op called {name!r}",
        found=found,
        required=required,
        fix="correct the name, or install the package that has it",
    )


def select(names: tuple[str, ...]) -> tuple[OpSpec, ...]:
    """The specs of ``names``, in catalogue order: of families (``adam``, ``mylib.scale``), of
    operators of flexops, of projects (``mylib``).

    No names, or ``all`` (or ``1``), means every family of flexops.
    """
    wanted = [spec for name in names if name not in ("all", "1") for spec in _called(name)]
    every = not names or any(name in ("all", "1") for name in names)
    return tuple(spec for spec in specs() if spec in wanted or (every and spec.project.own))


def _called(name: str) -> tuple[OpSpec, ...]:
    own = tuple(spec for spec in specs() if not spec.project.own and spec.project.name == name)
    return own or tuple(spec for spec in CATALOG if name in spec.ops) or (find(name),)
