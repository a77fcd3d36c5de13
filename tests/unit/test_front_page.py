"""The README's first screen: its picture follows from the data, its code is today's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import flexops

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DATA = ROOT / "docs/benchmarks/2026-11-23-training-step.json"


def test_the_picture_is_of_the_data(tmp_path: Path, require: Callable[..., None]) -> None:
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    (tmp_path / DATA.name).write_text(DATA.read_text())
    command = [sys.executable, str(ROOT / "scripts/plot_training_step.py"), str(tmp_path / DATA.name)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    for name in (f"{DATA.stem}.svg", f"{DATA.stem}-losses.svg"):
        assert (tmp_path / name).read_text() == (DATA.parent / name).read_text(), "python scripts/plot_training_step.py"


def test_the_picture_shown_is_the_newest_measurement() -> None:
    shown = re.findall(r"!\[[^]]*\]\((docs/benchmarks/[^)]*training-step\.svg)\)", README)
    newest = max((ROOT / "docs/benchmarks").glob("*-training-step.json"))
    assert shown == [str(newest.with_suffix(".svg").relative_to(ROOT))]


def test_every_bar_has_its_line_in_the_report() -> None:
    report = DATA.with_suffix(".md").read_text()
    for one in json.loads(DATA.read_text())["results"]:
        assert f"| {one['milliseconds']} | {one['gibibytes']} |" in report, one["name"]


def test_the_code_calls_what_there_is() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    names = set(re.findall(r"flexops\.((?:optim\.)?\w+)", code))
    assert {"patch", "kernel", "optim.AdamW", "linear_cross_entropy"} <= names
    for name in names:
        value: object = flexops
        for part in name.split("."):
            value = getattr(value, part)
        assert callable(value), name


def test_its_kernel_works_as_it_stands(tmp_path: Path) -> None:
    """In a process of its own: the operator's name is taken afterwards."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "flexops.kernel" in block)
    program = f"import torch, flexops\nx = torch.arange(5.0)\n{code}\nassert torch.equal(y, 2 * x)\n"
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
