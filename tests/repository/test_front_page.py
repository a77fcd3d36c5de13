"""The README's first screen: its picture follows from the data, its code is today's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
from command_line import flexops_command
from processes import completed

import flexops
from flexops_tools.bench.results import Results

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs/benchmarks"
DATA = RESULTS / "training-step.json"
CHARTS = ("attention-h200", "models-h200", "operators-h200")


def test_the_picture_is_of_the_data(tmp_path, require):
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    chart = tmp_path / f"{DATA.stem}.svg"
    run = ["bench", "model", "--from", str(DATA), "--plot", str(chart)]
    flexops_command(*run)
    assert chart.read_text() == (RESULTS / chart.name).read_text()


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_of_operators_is_of_its_data(name, tmp_path, require):
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    run = ["bench", "ops", "--from", str(RESULTS / f"{name}.json"), "--plot"]
    flexops_command(*run, str(tmp_path / "chart.svg"))
    assert (tmp_path / "chart.svg").read_text() == (RESULTS / f"{name}.svg").read_text()


def test_chart_and_table_of_generation_are_of_their_data(tmp_path, require):
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    data, chart = RESULTS / "generation.json", tmp_path / "chart.svg"
    run = ["bench", "generate", "--from", str(data), "--markdown", "--plot", str(chart)]
    table = flexops_command(*run).stdout.splitlines()
    assert chart.read_text() == data.with_suffix(".svg").read_text()
    report = (RESULTS / "README.md").read_text().splitlines()
    assert set(filter(None, table[1:])) <= set(report)


def test_the_picture_shown_is_the_newest_measurement():
    shown = re.findall(r"!\[[^]]*\]\((docs/benchmarks/[^)]*\.svg)\)", README)
    assert shown == [str(DATA.with_suffix(".svg").relative_to(ROOT))]


def test_every_bar_has_its_line_in_the_report():
    report = (RESULTS / "README.md").read_text()
    for one in json.loads(DATA.read_text())["results"]:
        assert f"| {one['milliseconds']} | {one['gibibytes']} |" in report, one["name"]


def test_the_table_of_attention_is_of_its_data():
    report = (RESULTS / "README.md").read_text()
    rates: dict[str, dict[tuple[str, str], int]] = {}
    for one in Results.from_dict(json.loads((RESULTS / "attention-h200.json").read_text())).timings:
        case = rates.setdefault(one.case.removeprefix("attention bf16 "), {})
        case[one.contender, one.part] = round(one.rate / 1e12)
    rows = re.findall(r"^\| (\d+x\d\S+ \w+) \| (.*) \|$", report, re.MULTILINE)
    assert len(rows) == 7
    for case, cells in rows:
        ours, cudnn, flash = (
            f"{rates[case][who, 'forward']} / {rates[case][who, 'backward']}"
            for who in ("flexops", "cuDNN", "torch's flash")
        )
        assert cells == f"{ours} | {cudnn} | {flash}", case


def test_the_page_of_results_is_one_and_its_data_are_short():
    assert [path.name for path in RESULTS.glob("*.md")] == ["README.md"]
    for path in RESULTS.glob("*.json"):
        assert len(path.read_text().splitlines()) <= 300, path.name


def test_documentation_stays_small():
    """Pictures apart from the rest."""
    files = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    pictures = [path for path in files if path.suffix in (".svg", ".png")]
    text = [path for path in files if path not in pictures and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in text) <= 400_000
    assert sum(path.stat().st_size for path in pictures) <= 150_000


def test_it_fits_the_column_of_github():
    """Prose wraps in any column; code does not, and 88 columns of it are shown."""
    work = "## Work on it"  # its two commands are to be one: its comments may be cut off till then
    code = README.partition(work)[0] + README.partition(work)[2].partition("\n## ")[2]
    blocks = re.findall(r"^```\w*\n(.*?)^```$", code, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []
    table = README.partition("<!-- tested-with:begin -->")[2].partition("<!-- tested-with:end")[0]
    prose = README.replace(table, "")
    assert [line for line in prose.splitlines() if len(line) > 100] == []


def test_the_first_screen_has_a_line_for_each_way_in():
    first = README.partition("\n## ")[0]
    for command in ("dist/flexops_torch", "flexops image build", "conda install", "flexops.patch("):
        assert command in first
    assert len(first.splitlines()) < 60


def test_the_code_calls_what_there_is():
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    names = set(re.findall(r"flexops\.((?:optim\.)?\w+)", code))
    assert {"patch", "kernel", "optim.AdamW", "linear_cross_entropy"} <= names
    for name in names:
        value: object = flexops
        for part in name.split("."):
            value = getattr(value, part)
        assert callable(value), name


def test_its_kernel_works_as_it_stands(tmp_path):
    """In a process of its own: the operator's name is taken afterwards."""
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "flexops.kernel" in block
    )
    program = (
        f"import torch, flexops\nx = torch.arange(5.0)\n{code}\nassert torch.equal(y, 2 * x)\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed([sys.executable, str(tmp_path / "program.py")], env=environment)
