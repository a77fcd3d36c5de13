"""The operator that CONTRIBUTING.md adds, added to a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from processes import completed

REPOSITORY = Path(__file__).parents[2]
PLACES = {
    "flexops/build/describe/families.py": "CATALOG: tuple[OpSpec, ...] = (\n",
    "flexops/__init__.py, under TYPE_CHECKING": "if TYPE_CHECKING:\n",
    "flexops/__init__.py, in _NAMES": "_NAMES = {\n",
}
"""Behind which line goes what is added to a file that exists."""


def blocks() -> dict[str, str]:
    """By its place, which is the first line, each block of code."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Add an operator\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"```(?:python|cpp)\n(?:#|//) ([^\n]+)\n(.*?)```", section, re.DOTALL))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in (
        "flexops",
        "csrc",
        "tests/ops",
        "tests/support",
        "tests/conftest.py",
        "pyproject.toml",
    ):
        source, target = REPOSITORY / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_aot", "test_*.py")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    return tmp_path


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_the_operator_of_the_page_passes_its_contract(clone):
    for place, text in blocks().items():
        path = clone / place.partition(",")[0]
        if place in PLACES:
            before, line, after = path.read_text(encoding="utf-8").partition(PLACES[place])
            assert line, place
            path.write_text(before + line + text + after, encoding="utf-8")
        else:
            assert not path.exists(), place
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    tests = "test_accuracy or test_opcheck or test_gradcheck or test_compile or refus or layout"
    process = completed(
        [*command, "tests/ops/test_relu_squared.py", "-k", tests, "-n", "0"],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone)},
    )
    assert int(re.findall(r"(\d+) passed", process.stdout)[0]) >= 10, process.stdout


def test_the_page_needs_few_lines():
    lines = [line for text in blocks().values() for line in text.splitlines() if line.strip()]
    assert 50 < len(lines) <= 120, len(lines)
