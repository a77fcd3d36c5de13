"""The bookkeeping of the benchmarks: what is climbed and measured, what is compared, how it is
told. Nothing is compiled here, and nothing timed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from builds import TOOLS
from command_line import flexops_command

from flexops import settings, toolchain
from flexops.bench import timing
from flexops.bench.text import duration, ratio
from flexops.build.describe import catalog
from flexops.build.load import loader
from flexops.errors import ArchitectureError, FlexopsError, ToolchainError
from flexops_tools.bench import (
    build_ladder,
    build_text,
    cases,
    ops,
    ops_text,
    plot,
)
from flexops_tools.bench.build_ladder import RUNGS, Ladder
from flexops_tools.bench.cases import SOURCES, Case, Setup, Source
from flexops_tools.bench.results import Results, Timing

interrupted_at: list[str] = []
SECONDS = {rung.id: 200.0 / (number + 1) ** 3 for number, rung in enumerate(RUNGS)}


@pytest.fixture
def paper_runner(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rungs that take no time; the list says which were climbed. Ctrl-C comes at those named in
    ``interrupted_at``."""
    climbed: list[str] = []

    class PaperRunner:
        def __init__(self, tools: Any, scratch: Path, one: str, everything: str) -> None:
            assert tools.torch is TOOLS.torch
            self.launcher, self.cuda = tools.launcher, tools.cuda
            assert scratch.is_dir()
            assert one == "9.0"
            assert len(everything.split(";")) >= 5

        def measure(self, rung_id: str) -> tuple[float, str]:
            climbed.append(rung_id)
            if rung_id in interrupted_at:
                raise KeyboardInterrupt
            return SECONDS[rung_id], "by the clock" if "-edit-" in rung_id else ""

        def family(self, name: str) -> float:
            return self.measure(f"family-{name}")[0]

    monkeypatch.setattr(build_ladder, "Runner", PaperRunner)
    monkeypatch.setattr(toolchain, "discover", lambda *_, **__: TOOLS, raising=False)
    return climbed


def climb(**options: Any) -> Ladder:
    return build_ladder.run(settings.current(), **options)


def test_every_rung_is_climbed_in_order(paper_runner):
    ladder = climb()
    assert paper_runner == [rung.id for rung in RUNGS]
    assert [item.rung.side for item in ladder.measurements] == sorted(
        (rung.side for rung in RUNGS), reverse=True
    )
    assert ladder.ratio("torch-all-jobs", "flexops-cold") == pytest.approx(
        SECONDS["torch-all-jobs"] / SECONDS["flexops-cold"]
    )
    assert {item.note for item in ladder.measurements if "-edit-" in item.rung.id} == {
        "by the clock"
    }


def test_a_quick_run_says_what_it_left_out(paper_runner):
    ladder = climb(quick=True)
    left_out = [item for item in ladder.measurements if item.seconds is None]
    assert {item.rung.id for item in left_out} == {rung.id for rung in RUNGS} - set(paper_runner)
    assert all("--quick" in item.note for item in left_out)
    assert ladder.ratio("torch-all-jobs", "flexops-cold"), (
        "the comparison that matters is still made"
    )
    assert ladder.ratio("torch-ninja", "flexops-all-archs") is None


def bench_build(*arguments: str) -> Any:
    return flexops_command("bench", "build", *arguments, env={"COLUMNS": "160"})


def test_chosen_rungs(paper_runner):
    shown = bench_build("--rung", "flexops-cold", "--rung", "family-norm").stdout
    assert paper_runner == ["flexops-cold", "family-norm"]
    assert "norm" in shown
    assert "setuptools" not in shown
    with pytest.raises(FlexopsError, match="no rung called ladder") as caught:
        climb(only=("ladder",))
    assert "flexops-cold" in caught.value.required


def test_an_interruption_loses_nothing(paper_runner, tmp_path, monkeypatch):
    file = tmp_path / "ladder.json"
    monkeypatch.setattr(sys.modules[__name__], "interrupted_at", ["flexops-cold"])
    stopped = bench_build("--save", str(file))
    assert stopped.exit_code == 130
    assert "cold, all architectures" in stopped.stdout
    before = paper_runner.copy()
    monkeypatch.setattr(sys.modules[__name__], "interrupted_at", [])
    assert bench_build("--save", str(file)).exit_code == 0
    assert paper_runner[: len(before)] == before
    assert paper_runner[len(before) :] == [rung.id for rung in RUNGS][len(before) - 1 :]
    assert bench_build("--save", str(file), "--rung", "flexops-warm").exit_code == 0, (
        "what is asked for by name is measured again"
    )
    assert paper_runner[-1] == "flexops-warm"
    told = json.loads(file.read_text())
    assert [rung["id"] for rung in told["rungs"]] == [rung.id for rung in RUNGS]
    file.write_text(json.dumps({**told, "architecture": "8.0"}))
    with pytest.raises(FlexopsError, match="another machine"):
        bench_build("--save", str(file))
    with pytest.raises(FlexopsError, match="cannot be stored"):
        bench_build("--save", str(tmp_path / "no" / "such" / "file.json"))


def test_an_earlier_ladder_is_shown(paper_runner, tmp_path):
    file = tmp_path / "ladder.json"
    file.write_text(bench_build("--json").stdout)
    climbed = len(paper_runner)
    written = bench_build("--from", str(file), "--markdown").stdout
    assert "| torch | setuptools, all architectures, one job, no ninja | 200 s | 1.0x |" in written
    assert f"| norm | {duration(SECONDS['family-norm'])} |" in written
    assert "- cold, one architecture: cpp_extension.load / flexops: " in written
    assert bench_build("--from", str(file), "--json").stdout == file.read_text()
    assert len(paper_runner) == climbed
    file.write_text("{}")
    with pytest.raises(FlexopsError, match="cannot be read"):
        bench_build("--from", str(file))


def test_what_a_chart_lacks_is_said_before_anything_is_measured(
    paper_runner, tmp_path, monkeypatch
):
    with pytest.raises(FlexopsError, match="cannot be written"):
        bench_build("--plot", str(tmp_path / "chart.nothing"))
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(FlexopsError, match="needs matplotlib"):
        bench_build("--plot", str(tmp_path / "chart.png"))
    assert paper_runner == []


def test_every_comparison_is_of_rungs_that_there_are():
    ids = {rung.id for rung in RUNGS}
    assert all({slow, fast} <= ids for _, slow, fast in build_ladder.COMPARISONS)


def test_json_holds_everything_a_figure_needs(paper_runner):
    told = json.loads(flexops_command("bench", "build", "--json").stdout)
    assert len(told["rungs"]) == len(RUNGS) == len(paper_runner)
    assert {
        "date",
        "cpu",
        "cpus",
        "memory_gib",
        "torch",
        "nvcc",
        "host_compiler",
        "ninja",
        "launcher",
        "flexops",
        "python",
        "system",
    } <= set(told["machine"])
    assert all(rung["seconds"] > 0 for rung in told["rungs"])
    assert told["architecture"] == "9.0"
    assert len(told["ratios"]) == len(build_ladder.COMPARISONS)


@pytest.mark.usefixtures("paper_runner")
def test_chart(tmp_path, require):
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    for name in ("chart.png", "chart.svg"):
        flexops_command("bench", "build", "--plot", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(FlexopsError, match="cannot be written"):
        plot.save(climb(), tmp_path / "no" / "such" / "chart.png")
    with pytest.raises(FlexopsError, match="cannot be written"):
        plot.save(climb(), tmp_path / "chart.nothing")


def test_without_nvcc_only_the_conventional_rungs_are_left_out(paper_runner, monkeypatch):
    monkeypatch.setattr(
        toolchain, "discover", lambda *_, **__: TOOLS._replace(cuda=None), raising=False
    )
    found = toolchain.device_compiler(settings.current()).taken
    assert found, "the test environment has an NVRTC"
    ladder = climb()
    assert paper_runner == [
        rung.id for rung in RUNGS if rung.side == "flexops" and rung.id != "flexops-edit-cu"
    ]
    assert {item.note for item in ladder.measurements if item.rung.side == "torch"} == {
        "no nvcc here"
    }
    assert "9.0" in ladder.architectures


def test_without_a_compiler_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(
        toolchain, "discover", lambda *_, **__: TOOLS._replace(host=None), raising=False
    )
    with pytest.raises(ToolchainError, match="compiler"):
        climb()


DURATIONS = [
    (142.4, "142 s"),
    (50.24, "50.2 s"),
    (1.094, "1.09 s"),
    (0.0023, "2.3 ms"),
    (0.9951, "1.00 s"),
    (1.26e-4, "126 us"),
    (9.94e-6, "9.9 us"),
]


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_ratios():
    assert [ratio(value) for value in (37.4, 9.96, 2.44)] == ["37x", "10x", "2.4x"]


# ---- bench ops ----


def timing_of(
    contender: str, seconds: float, case: str = "rms_norm bf16 4x8", part: str = "forward"
) -> Timing:
    return Timing("norm", "rms_norm", case, part, contender, seconds, 1e9 / seconds, 0.01 / seconds)


RESULTS = Results(
    1e11,
    (
        timing_of("torch eager", 0.02),
        timing_of("flexops", 0.011),
        timing_of("torch.compile", 0.0109),
        timing_of("flexops", 0.03, part="backward"),
        timing_of("torch eager", 0.02, part="backward"),
        timing_of("flexops", 0.01, case="layer_norm bf16 4x8"),
        timing_of("torch eager", 0.02, case="layer_norm bf16 4x8"),
    ),
    (("rms_norm bf16 4x8", "Liger", "ImportError: no triton"),),
)


def test_a_run_is_read_as_it_is_written():
    """An entry for each case and part; figures of zero and missing ones are not written."""
    written = RESULTS.as_dict()
    assert written["timings"][1] == {
        "op": "norm",
        "function": "rms_norm",
        "case": "rms_norm bf16 4x8",
        "part": "backward",
        "bytes": 1_000_000_000,
        "seconds": {"flexops": 0.03, "torch eager": 0.02},
    }
    measured = Timing("a", "b", "c", "call", "flexops", 0.5, 0.0, 0.0, 0, 1.5, 4e9)
    results = Results(1e11, (*RESULTS.timings, measured), RESULTS.absent)
    read = Results.from_dict(json.loads(json.dumps(results.as_dict())))
    assert list(read.groups()) == list(results.groups())


def test_what_is_behind_is_found_worst_first():
    assert [(item.case, item.part, item.by) for item in RESULTS.behind()] == [
        ("rms_norm bf16 4x8", "backward", "torch eager"),
        ("rms_norm bf16 4x8", "forward", "torch.compile"),
    ]
    assert RESULTS.behind()[0].ratio == pytest.approx(1.5)
    assert [group[0].contender for group in RESULTS.groups()] == ["flexops"] * 3


@pytest.fixture
def saved_run(tmp_path: Path) -> Path:
    """A file as ``bench ops --json`` writes it."""
    machine = {
        "date": "",
        "cpu": "Abacus",
        "cpus": 1,
        "memory_gib": 1.0,
        "system": "",
        "python": "3",
        "flexops": "0",
        "torch": "2",
        "nvcc": "",
    }
    machine |= {"host_compiler": "", "ninja": "", "launcher": ""}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"machine": machine, "device": "Abacus GPU", **RESULTS.as_dict()}))
    return file


def test_an_earlier_run_is_shown(saved_run):
    shown = flexops_command("bench", "ops", "--from", str(saved_run), env={"COLUMNS": "200"}).stdout
    assert shown.startswith(
        "norm: flexops against torch eager, torch.compile\non Abacus GPU, whose copy reaches 100"
        " GB/s\n"
    )
    assert "Not ahead" in shown
    assert "level" in shown
    assert "50 %" in shown
    assert "not measured: Liger in rms_norm bf16 4x8: ImportError: no triton" in shown
    written = flexops_command("bench", "ops", "--from", str(saved_run), "--markdown").stdout
    assert "| rms_norm bf16 4x8 | forward | 11.0 ms | 91 | 0.91 | 1.82x | 0.99x |" in written
    assert "| rms_norm bf16 4x8 | backward | torch eager | 30.0 ms | 20.0 ms | 50 % |" in written
    told = json.loads(flexops_command("bench", "ops", "--from", str(saved_run), "--json").stdout)
    assert told["behind"][0]["by"] == "torch eager"
    few = flexops_command("bench", "ops", "--from", str(saved_run), "--op", "rms_norm", "--json")
    assert {item["function"] for item in json.loads(few.stdout)["timings"]} == {"rms_norm"}
    with pytest.raises(FlexopsError, match="nothing was measured of rope") as caught:
        flexops_command("bench", "ops", "--from", str(saved_run), "--op", "rope")
    assert caught.value.required == "norm, rms_norm"
    with pytest.raises(FlexopsError, match="nothing to choose"):
        flexops_command("bench", "ops", "--from", str(saved_run), "--small")
    saved_run.write_text("{}")
    with pytest.raises(FlexopsError, match="cannot be read"):
        flexops_command("bench", "ops", "--from", str(saved_run))


def test_no_table_is_wider_than_a_narrow_terminal():
    """Of the runs that are kept here. The lines above and below a table may be longer: a terminal
    wraps them."""
    kept = Path(__file__).parents[2] / "docs" / "benchmarks"
    tables = list(
        ops_text.lines(Results.from_dict(json.loads((kept / "operators-h200.json").read_text())))
    )
    for file in kept.glob("build*.json"):
        text = "\n".join(build_text.lines(Ladder.from_dict(json.loads(file.read_text()))))
        tables += text.partition("one architecture:")[0].splitlines()
    tables = [line for line in tables if not line.startswith("not measured:")]
    assert len(tables) > 200
    assert max(map(len, tables)) <= 80, max(tables, key=len)


def test_a_chart_says_what_is_compared(tmp_path, saved_run, require):
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text stays text
        flexops_command(
            "bench", "ops", "--from", str(saved_run), "--plot", str(tmp_path / "ops.svg")
        )
    text = (tmp_path / "ops.svg").read_text()
    assert "norm: flexops against torch eager, torch.compile" in text
    assert "on Abacus GPU, whose copy reaches 100 GB/s" in text


def test_what_is_not_bound_by_memory_is_shown_in_operations(tmp_path, saved_run, require):
    """A line and a panel of its own; the same data give the same chart."""
    require(importlib.util.find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    from matplotlib import rc_context

    data = json.loads(saved_run.read_text())
    bound = {"op": "attention", "function": "attention", "case": "attention bf16"}
    bound |= {"operations": 634_000_000_000, "seconds": {"flexops": 1e-3, "cuDNN": 2e-3}}
    data["timings"] += [{**bound, "part": part} for part in ("forward", "backward")]
    saved_run.write_text(json.dumps(data))
    shown = flexops_command("bench", "ops", "--from", str(saved_run)).stdout
    assert "634 TFLOP/s" in shown
    assert "317 TFLOP/s" in shown
    written = flexops_command(
        "bench", "ops", "--from", str(saved_run), "--markdown", "--op", "attention"
    ).stdout
    assert "| attention bf16 | forward | 1.0 ms | 634 TFLOP/s |" in written
    charts = []
    with rc_context({"svg.fonttype": "none"}):
        for name in ("one.svg", "two.svg"):
            flexops_command(
                "bench", "ops", "--from", str(saved_run), "--plot", str(tmp_path / name)
            )
            charts.append((tmp_path / name).read_text())
    assert charts[0].count(">TFLOP/s<") == charts[0].count(">fraction of copy bandwidth<") == 2
    assert charts[0] == charts[1]


def test_every_family_has_cases():
    assert {family for source in SOURCES for family in source.families} == {
        spec.name for spec in catalog.CATALOG
    }


def test_ops_are_chosen_by_family_or_function():
    assert cases.sources(()) == SOURCES
    assert [source.family for source in cases.sources(("rms_norm", "quant"))] == ["norm", "quant"]
    with pytest.raises(FlexopsError, match="no benchmark for sqrt"):
        cases.sources(("sqrt",))
    with pytest.raises(FlexopsError, match="this device cannot be measured") as caught:
        ops.run(Setup("gpu"), ("rope",))
    assert "cpu" in caught.value.required
    with pytest.raises(FlexopsError, match="no such mode") as caught:
        ops.run(Setup("cpu", compile="fast"), ("rope",))
    assert "reduce-overhead" in caught.value.required
    with pytest.raises(ArchitectureError, match="not understood"):
        climb(architecture="H1000")
    with pytest.raises(ArchitectureError, match="are for one"):
        climb(architecture="8.0;9.0")


def test_a_run_measures_each_contender_that_works(monkeypatch):
    calls: list[str] = []

    def broken() -> None:
        raise ImportError("it is of another version\nand so on")

    def paper_cases(setup: Setup) -> list[Case]:
        assert setup.device == "cpu"
        contenders = {
            "flexops": lambda: calls.append("ours"),
            "torch eager": lambda: calls.append("theirs"),
            "Liger": broken,
        }
        return [
            Case("norm", "rms_norm", "rms_norm", "forward", 100, contenders, ""),
            Case("norm", "layer_norm", "layer_norm", "forward", 100, contenders, ""),
        ]

    monkeypatch.setattr(Source, "cases", lambda _, setup: paper_cases(setup))
    monkeypatch.setattr(loader, "ensure", lambda *_: True)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 2**16})
    results = ops.run(Setup("cpu"), ("rms_norm",))
    assert [item.contender for item in results.timings] == ["flexops", "torch eager"]
    assert results.absent == (("rms_norm", "Liger", "ImportError: it is of another version"),)
    assert calls.count("ours") == calls.count("theirs")
    assert results.copy > 0


def test_what_is_not_native_is_not_measured(monkeypatch):
    monkeypatch.setattr(loader, "ensure", lambda *_: False)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 2**16})
    with pytest.raises(FlexopsError, match="norm is not native on cpu"):
        ops.run(Setup("cpu"), ("norm",))


def test_who_takes_long_takes_fewer_turns(monkeypatch):
    turns, now = {"quick": 0, "slow": 0}, 0.0

    def take(name: str, seconds: float) -> None:
        nonlocal now
        turns[name] += 1
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    medians = timing.medians(
        {"quick": lambda: take("quick", 1e-4), "slow": lambda: take("slow", 0.02)},
        "cpu",
        budget=0.05,
    )
    assert turns == {"quick": 30, "slow": 3}
    assert medians == pytest.approx({"quick": 1e-4, "slow": 0.02})


def test_inputs_rotate_with_their_gradients():
    import torch

    from flexops_tools.bench.cases.case import input_sets, rotating

    sets = input_sets((torch.ones(3, requires_grad=True), torch.ones(3), 5))
    assert len(sets) == 3
    assert len({tensor.data_ptr() for inputs in sets for tensor in inputs[:2]}) == 6
    assert [[tensor.requires_grad for tensor in inputs[:2]] for inputs in sets] == [
        [True, False]
    ] * 3
    made: list[int] = []
    call = rotating([lambda number=number: made.append(number) for number in range(3)])
    for _ in range(4):
        call()
    assert sorted(made[:2]) == [1, 2], "all are called the first time"
    assert made[2:] == [0, 1, 2, 0]


def test_steps_of_many_tensors_are_measured_with_the_host_ahead_too():
    from flexops_tools.bench.cases import optim

    measured = {}
    group = optim._Group(Setup("cuda"), optim.MANY, (8,))
    for case in group.step("adam", "AdamW", 1, {"flexops": lambda: None}, "1 B"):
        measured[case.name] = list(case.contenders)
        case.contenders.clear()  # as measuring does, to free memory
    assert measured == {
        f"AdamW, {optim.MANY} fp32 x 8": ["flexops"],
        f"AdamW, {optim.MANY} fp32 x 8, host ahead": ["flexops"],
    }
