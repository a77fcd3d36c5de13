"""The build ladder's bookkeeping: which rungs are climbed, what is compared, how it is told. The rungs themselves take minutes (see the slow test)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import TOOLS, child_environment
from typer.testing import CliRunner

from flexops import settings, toolchain
from flexops.bench import build_ladder, build_runner, plot
from flexops.bench.build_ladder import RUNGS, Ladder
from flexops.bench.text import duration, ratio
from flexops.cli._app import app
from flexops.errors import FlexopsError, ToolchainError
from flexops.toolchain.model import CudaToolkit

SECONDS = {rung.id: 200.0 / (number + 1) ** 3 for number, rung in enumerate(RUNGS)}


@pytest.fixture
def paper_runner(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rungs that take no time; the list says which were climbed."""
    climbed: list[str] = []

    class PaperRunner:
        def __init__(self, tools: object, scratch: Path, one: str, everything: str) -> None:
            assert tools is TOOLS
            self.launcher = TOOLS.launcher
            assert scratch.is_dir()
            assert one == "9.0"
            assert len(everything.split(";")) >= 5

        def measure(self, rung_id: str) -> float:
            climbed.append(rung_id)
            return SECONDS[rung_id]

    monkeypatch.setattr(build_ladder, "Runner", PaperRunner)
    monkeypatch.setattr(toolchain, "discover", lambda *_, **__: TOOLS, raising=False)
    return climbed


def climb(**options: bool) -> Ladder:
    return build_ladder.run(settings.current(), **options)


def test_every_rung_is_climbed_in_order(paper_runner: list[str]) -> None:
    ladder = climb()
    assert paper_runner == [rung.id for rung in RUNGS]
    assert [item.rung.side for item in ladder.measurements] == sorted((rung.side for rung in RUNGS), reverse=True)
    assert ladder.ratio("torch-all-jobs", "flexops-cold") == pytest.approx(SECONDS["torch-all-jobs"] / SECONDS["flexops-cold"])


def test_a_quick_run_says_what_it_left_out(paper_runner: list[str]) -> None:
    ladder = climb(quick=True)
    left_out = [item for item in ladder.measurements if item.seconds is None]
    assert {item.rung.id for item in left_out} == {rung.id for rung in RUNGS} - set(paper_runner)
    assert all("--quick" in item.note for item in left_out)
    assert ladder.ratio("torch-all-jobs", "flexops-cold"), "the comparison that matters is still made"
    assert ladder.ratio("torch-ninja", "flexops-all-archs") is None


def test_every_comparison_is_of_rungs_that_there_are() -> None:
    ids = {rung.id for rung in RUNGS}
    assert all({slow, fast} <= ids for _, slow, fast in build_ladder.COMPARISONS)


def test_json_holds_everything_a_figure_needs(paper_runner: list[str]) -> None:
    told = json.loads(CliRunner().invoke(app, ["bench", "build", "--json"], catch_exceptions=False).stdout)
    assert len(told["rungs"]) == len(RUNGS) == len(paper_runner)
    assert {"date", "cpu", "cpus", "memory_gib", "torch", "nvcc", "host_compiler", "ninja", "launcher", "flexops", "python", "system"} <= set(told["machine"])
    assert all(rung["seconds"] > 0 for rung in told["rungs"])
    assert told["architecture"] == "9.0"
    assert len(told["ratios"]) == len(build_ladder.COMPARISONS)


@pytest.mark.usefixtures("paper_runner")
def test_table() -> None:
    shown = CliRunner().invoke(app, ["bench", "build", "--quick"], catch_exceptions=False, env={"COLUMNS": "160"}).stdout
    assert "cold, one architecture" in shown
    assert "left out by --quick" in shown
    assert "cpp_extension.load / flexops" in shown
    assert TOOLS.torch is not None
    assert TOOLS.torch.version in shown


@pytest.mark.usefixtures("paper_runner")
def test_chart(tmp_path: Path, require: Callable[..., None]) -> None:
    import importlib.util

    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    for name in ("chart.png", "chart.svg"):
        CliRunner().invoke(app, ["bench", "build", "--plot", str(tmp_path / name)], catch_exceptions=False)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(FlexopsError, match="cannot be written"):
        plot.save(climb(), tmp_path / "no" / "such" / "chart.png")
    with pytest.raises(FlexopsError, match="cannot be written"):
        plot.save(climb(), tmp_path / "chart.nothing")


def test_without_a_toolkit_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "discover", lambda *_, **__: TOOLS._replace(cuda=None), raising=False)
    with pytest.raises(ToolchainError) as caught:
        climb()
    assert caught.value.fix


@pytest.mark.parametrize(("seconds", "text"), [(142.4, "142 s"), (50.24, "50.2 s"), (1.094, "1.09 s"), (0.0023, "2.3 ms"), (0.9951, "1.00 s")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ratios() -> None:
    assert [ratio(value) for value in (37.4, 9.96, 2.44)] == ["37x", "10x", "2.4x"]


def test_both_sides_are_shipped() -> None:
    assert all(source.is_file() for source in build_runner.SOURCES)
    assert "torch/extension.h" in build_runner.SOURCES[1].read_text()


@pytest.mark.slow
def test_a_quick_ladder_on_this_machine(nvcc_toolkit: CudaToolkit, tmp_path: Path) -> None:
    """Minutes: the conventional source is compiled once. No time is asserted, only the order that everything here is about."""
    assert nvcc_toolkit
    command = [sys.executable, "-m", "flexops", "bench", "build", "--quick", "--json"]
    done = subprocess.run(command, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds = {rung["id"]: rung["seconds"] for rung in json.loads(done.stdout)["rungs"] if rung["seconds"]}
    assert seconds["flexops-warm"] < seconds["flexops-cold"] < seconds["torch-all-jobs"]
