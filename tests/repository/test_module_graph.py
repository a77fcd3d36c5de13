"""Packages import one way: no circles between modules or folders, and the order of flexops.build.

Imports inside of functions count, too; those under ``TYPE_CHECKING`` do not run and do not count.
``from . import x`` counts as an import of x, and of the package if that imports at its top: the
package is only half there while its modules are being imported.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from processes import completed

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("describe", "plan", "store", "compile", "load", "deliver")
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    found = {}
    for root, package in ((ROOT, "flexops"), (ROOT / "tools", "flexops_tools")):
        for path in (root / package).rglob("*.py"):
            if "example" not in path.parts:
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that may run."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not typing_only:
            yield child
            yield from running(child)


@functools.cache
def is_eager(path: Path) -> bool:
    """Whether a package imports its own modules as soon as it is imported."""
    nodes = ast.parse(path.read_text()).body
    return path.name == "__init__.py" and any(
        isinstance(node, ast.ImportFrom) and node.level == 1 for node in nodes
    )


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in running(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            found |= {one if one in known else module for one in names}
            if not node.module and is_eager(known[module]):
                found.add(module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {one for one in found if one in known and one != name}


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in graph.items()}
    changed = True
    while changed:
        changed = False
        for targets in reach.values():
            more = set().union(*(reach.get(target, set()) for target in targets)) - targets
            targets |= more
            changed |= bool(more)
    inside = {node for node, targets in reach.items() if node in targets}
    groups = {frozenset(o for o in inside if o in reach[n] and n in reach[o]) for n in inside}
    return sorted(sorted(group) for group in groups)


def graph() -> Graph:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def test_no_circle_between_modules():
    assert circles(graph()) == []


def test_no_circle_between_folders():
    def folder(name: str) -> str:
        return ".".join(name.split(".")[:2])

    between: Graph = {}
    for name, targets in graph().items():
        own = between.setdefault(folder(name), set())
        own |= {folder(target) for target in targets} - {folder(name)}
    assert circles(between) == []


def test_flexops_imports_no_release_tools():
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if not name.startswith("flexops_tools") and target.startswith("flexops_tools")
    ]
    assert wrong == []


def test_a_stage_of_a_build_imports_only_from_earlier_ones():
    wrong = []
    for name, targets in graph().items():
        for target in targets:
            stages = [
                one.split(".")[2:3] for one in (name, target) if one.startswith("flexops.build.")
            ]
            if len(stages) == 2 and all(one and one[0] in STAGES for one in stages):
                own, other = (STAGES.index(one[0]) for one in stages)
                wrong += [f"{name} imports {target}"] * (other > own)
    assert wrong == []


def test_a_circle_through_a_package_is_found(tmp_path):
    (tmp_path / "__init__.py").write_text("from .one import name")
    (tmp_path / "one.py").write_text("from . import two")
    (tmp_path / "two.py").write_text("")
    names = {"p": "__init__", "p.one": "one", "p.two": "two"}
    known = {name: tmp_path / f"{file}.py" for name, file in names.items()}
    found = {name: imports(name, path, known) for name, path in known.items()}
    assert circles(found) == [["p", "p.one"]]


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


ALIAS = """
import flexops.op_builder.builder as former
from flexops.op_builder import loader
from flexops.build.compile import building
from flexops.build.load import loader as today
assert former is building
assert loader is today
assert today.__spec__.name == "flexops.build.load.loader"
"""


def test_the_former_name_of_the_package_gives_the_same_modules():
    command = [sys.executable, "-W", "default", "-c", ALIAS]
    done = completed(command)
    assert "flexops.op_builder is now flexops.build" in done.stderr
