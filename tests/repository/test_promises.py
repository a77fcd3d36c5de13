"""What CONTRIBUTING.md promises of the tests, and docs/design.md of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
CLOCKS = {
    "time",
    "monotonic",
    "perf_counter",
    "process_time",
    "time_ns",
    "perf_counter_ns",
    "elapsed_time",
}


def timed_assertions(tree: ast.AST) -> Iterator[int]:
    """Lines that assert how long something took: ``assert clock() - before < 5``, with the clock
    read there or into a name before."""
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and asks_a_clock(part)
            for part in [node.value]
        )
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            differences = [
                part
                for part in ast.walk(node.test)
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
            ]
            used = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
            if any(map(asks_a_clock, differences)) or used & names:
                yield node.lineno


def asks_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in CLOCKS
        for part in ast.walk(node)
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("assert time.monotonic() - started < 5", True),
        ("took = time.perf_counter() - before\nassert took < 1", True),
        ("assert time.monotonic() < deadline", False),  # a wait that has an end
        ("assert fact.age == 3", False),
    ],
)
def test_what_a_timed_assertion_is(text, found):
    assert bool(list(timed_assertions(ast.parse(text)))) == found


def test_no_test_asserts_a_time():
    assert [
        f"{path.relative_to(ROOT)}:{line}"
        for path in TESTS
        for line in timed_assertions(ast.parse(path.read_text()))
    ] == []


def test_operators_read_no_locals():
    """torch.compile of torch 2.12 and older does not trace ``locals()``."""
    assert not [
        path.name
        for path in (ROOT / "flexops" / "ops").rglob("*.py")
        if re.search(r"\blocals\(\)", path.read_text())
    ]


def test_the_design_names_every_part():
    """A package of flexops, or a module beside them, that no line of the table is about was
    forgotten."""
    table = (ROOT / "docs" / "design.md").read_text().partition("## Which part does what")[2]
    named = set(
        re.findall(r"`(?:flexops/)?([\w.]+?)(?:\.py)?`", table.partition("Dependencies")[0])
    )
    parts = {
        path.name
        for path in (ROOT / "flexops").iterdir()
        if (path / "__init__.py").is_file() and path.name != "__pycache__"
    }
    parts |= {
        path.stem for path in (ROOT / "flexops").glob("*.py") if not path.stem.startswith("__")
    }
    tops = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir()
        and path.name in ("csrc", "scripts", "docker", "recipe", "envs", "tests", "docs")
    }
    assert sorted((parts | tops) - named) == []


NOT_OF_TORCH = {
    "_asdict", "_fields", "_replace",  # of a NamedTuple
    "_getframe", "_exit",  # of sys and os
    "_sock",  # of what the docker package connects by
    "_parameters", "_buffers", "_modules",  # of torch, but in every pickle of a module
    "_attn_implementation", "_model_mapping", "_supports_sdpa",  # of transformers
    "_supports_logits_to_keep", "_supports_default_dynamic_cache",
    "_prepare_cache_for_generation", "_MAPPING_NAMES",
    "_apply_gate", "_default_apply_gate", "_experts_implementation",
}  # fmt: skip
DOCUMENTED = ("_version", "_foreach_")
"""Torch's manual has them, for all their underscore."""


def is_of_torch(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def attributes(nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Lines, names, and whether they are torch's for certain: attributes (in ``getattr`` and its
    kin, too), and what is imported from torch."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, is_of_torch(node)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
        ):
            of_torch = is_of_torch(node.args[0])
            texts = (
                text.value
                for text in ast.walk(node.args[1])
                if isinstance(text, ast.Constant) and isinstance(text.value, str)
            )
            yield from ((node.lineno, text, of_torch) for text in texts)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            module = (
                [node.module or ""] * (node.level == 0) if isinstance(node, ast.ImportFrom) else []
            )
            if any(name.partition(".")[0] == "torch" for name in module or names):
                yield from (
                    (node.lineno, part, True)
                    for name in (*module, *names)
                    for part in name.split(".")
                )


def defined_names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg


def borrowed(sources: dict[str, str]) -> list[str]:
    """Private names that none of the sources defines: another project's."""
    parts = {name: list(ast.walk(ast.parse(text))) for name, text in sources.items()}
    own = (
        {name for nodes in parts.values() for name in defined_names(nodes)}
        | {Path(name).stem for name in sources}
        | NOT_OF_TORCH
    )
    return [
        f"{name}:{line}: {private}"
        for name, nodes in parts.items()
        for line, private, of_torch in attributes(nodes)
        if private.startswith("_")
        and not private.startswith(("__", *DOCUMENTED))
        and (of_torch or private not in own)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "torch._C.parse(x)",
        "op._schema",
        "getattr(op, '_schema', None)",
        "getattr(torch, f'_PYBIND11_{name}')",
        "import torch._inductor",
        "from torch.utils._pytree import tree_map",
        "from torch._dynamo.testing import Counter",
        "from torch.cuda import _sleep",
    ],
)
def test_what_a_borrowed_name_is(text):
    assert len(borrowed({"one.py": text})) == 1
    assert (
        len(
            borrowed(
                {
                    "one.py": text,
                    "two.py": "_C = _PYBIND11_ = _inductor = _pytree = _dynamo = _sleep = 1",
                }
            )
        )
        == 1
    )
    assert (
        borrowed(
            {
                "one.py": text.replace("torch", "ours").replace("_schema", "own"),
                "two.py": "_C = _PYBIND11_ = 1",
            }
        )
        == []
    )


def test_what_torch_keeps_private_is_in_one_file():
    """That ``flexops/_torch.py`` has it with what does without it, ``tests/ops/test_register.py``
    shows."""
    sources = {
        str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "flexops").rglob("*.py")
    }
    assert [one for one in borrowed(sources) if not one.startswith("flexops/_torch.py:")] == []


def test_lines_of_shell_scripts_have_at_most_100_columns():
    folders = ("scripts", "docker", "recipe")
    scripts = [path for folder in folders for path in (ROOT / folder).rglob("*.sh")]
    assert len(scripts) > 15
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (*scripts, ROOT / ".ci/run")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ] == []
