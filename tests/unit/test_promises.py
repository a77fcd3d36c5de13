"""What CONTRIBUTING.md promises of the tests, and docs/design.md of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
MACHINE = {"nvcc_toolkit", "host_compiler", "ccache", "engine"}
"""Fixtures that need more than Python."""
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "time_ns", "perf_counter_ns", "elapsed_time"}


def timed_assertions(tree: ast.AST) -> Iterator[int]:
    """Lines that assert how long something took: ``assert clock() - before < 5``, with the clock read there or into a name before."""
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and asks_a_clock(part) for part in [node.value])
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            differences = [part for part in ast.walk(node.test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)]
            used = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
            if any(map(asks_a_clock, differences)) or used & names:
                yield node.lineno


def asks_a_clock(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in CLOCKS for part in ast.walk(node))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("assert time.monotonic() - started < 5", True),
        ("took = time.perf_counter() - before\nassert took < 1", True),
        ("assert time.monotonic() < deadline", False),  # a wait that has an end
        ("assert fact.age == 3", False),
    ],
)
def test_what_a_timed_assertion_is(text: str, found: bool) -> None:
    assert bool(list(timed_assertions(ast.parse(text)))) == found


def test_no_test_asserts_a_time() -> None:
    assert [f"{path.relative_to(ROOT)}:{line}" for path in TESTS for line in timed_assertions(ast.parse(path.read_text()))] == []


def test_unit_tests_need_no_machine_and_none_is_slow() -> None:
    found = []
    for path in TESTS:
        if path.parent.name == "unit" and path != Path(__file__).resolve():
            text = path.read_text()
            asked = {argument.arg for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) for argument in node.args.args}
            asked |= set(re.findall(r"usefixtures\([\"'](\w+)", text))
            found += [f"{path.name}: {name}" for name in asked & MACHINE]
            found += [f"{path.name}: slow"] * ("mark.slow" in text)
    assert found == []


def test_the_design_names_every_part() -> None:
    """A package of flexops, or a module beside them, that no line of the table is about was forgotten."""
    table = (ROOT / "docs" / "design.md").read_text().partition("## Which part does what")[2]
    named = set(re.findall(r"`(?:flexops/)?([\w.]+?)(?:\.py)?`", table.partition("Dependencies")[0]))
    parts = {path.name for path in (ROOT / "flexops").iterdir() if (path / "__init__.py").is_file() and path.name != "__pycache__"}
    parts |= {path.stem for path in (ROOT / "flexops").glob("*.py") if not path.stem.startswith("__")}
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name in ("csrc", "scripts", "docker", "recipe", "envs", "tests", "docs")}
    assert sorted((parts | tops) - named) == []
