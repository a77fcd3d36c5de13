"""The report and the examination around it: it always prints, it is always valid JSON, and its exit
status is what it says."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import completed

import flexops
from flexops.doctor import examination, report, trial
from flexops.doctor.children import Child
from flexops.doctor.facts import BuildTrial, Facts, OpTrial, Unknown
from flexops.doctor.finding import DoctorReport, Finding, Section, fail, ok, warn
from flexops.doctor.judgement import judge
from flexops.doctor.probes import build as build_probes
from flexops.doctor.probes import machine as machine_probes
from flexops.doctor.probes import target as target_probe
from flexops.doctor.probes import torch as torch_probe

GOOD = ok("torch", "2.13.0")
BAD = fail("ninja", "not found", "ninja 1.10", "pip install ninja")
POOR = warn("launcher", "no ccache", "ccache", "apt-get install -y ccache")
_LOUD = {"HOME": "/home/x", "FLEXOPS_LOG": "loud"}
OP = OpTrial("adam", "cpu", "jit", "found in the cache", "", 1e-7)


def whole(*findings: Finding, ops: tuple[OpTrial, ...] = (OP,)) -> DoctorReport:
    return DoctorReport("cpu", (Section("tools", findings),), ops)


def check_shape(document: dict[str, Any]) -> None:
    assert list(document) == ["status", "target", "findings", "ops"]
    assert document["status"] in ("ok", "warn", "fail")
    assert document["target"] is None or isinstance(document["target"], str)
    for finding in document["findings"]:
        assert list(finding) == ["id", "status", "found", "required", "fix"]
        assert finding["status"] in ("ok", "warn", "fail")
        assert all(isinstance(value, str) for value in finding.values())
        if finding["status"] != "ok":
            assert finding["required"], finding
            assert finding["fix"], finding
    for op in document["ops"]:
        assert list(op) == ["name", "device", "backend", "reason", "max_error"]
        assert op["backend"] in ("aot", "jit", "reference")
        assert op["max_error"] is None or math.isfinite(op["max_error"])
    worst = max(
        (finding["status"] for finding in document["findings"]),
        key=("ok", "warn", "fail").index,
        default="ok",
    )
    assert document["status"] == worst


@pytest.mark.parametrize(
    ("findings", "status", "plain", "strict"),
    [
        ((GOOD,), "ok", 0, 0),
        ((GOOD, POOR), "warn", 0, 1),
        ((POOR, BAD, GOOD), "fail", 1, 1),
        ((), "ok", 0, 0),
    ],
)
def test_status_and_exit_code(findings, status, plain, strict):
    found = whole(*findings)
    assert found.status == status
    assert (found.exit_code(), found.exit_code(strict=True)) == (plain, strict)
    check_shape(found.as_dict())


def test_json_has_no_nan():
    document = whole(GOOD, ops=(OpTrial("adam", "cpu", "jit", max_error=float("nan")),)).as_dict()
    check_shape(json.loads(json.dumps(document, allow_nan=False)))


def test_text_begins_and_ends_with_the_verdict_and_is_grouped_and_aligned():
    text = [line for line, _ in report.lines(whole(GOOD, POOR, BAD))]
    assert text[0] == "flexops doctor, target cpu"
    assert "tools" in text
    columns = {
        line.index(word)
        for line, word in zip(
            text[4:], ("2.13.0", "no ccache", "required", "fix", "not found"), strict=False
        )
    }
    assert len(columns) == 1
    assert any("fix: pip install ninja" in line for line in text)
    assert text[1] == text[-1]
    assert text[-1].startswith("fail: ")
    assert "1 fail: ninja; 1 warn: launcher" in text[-1]


def test_a_finding_that_is_ok_has_no_style_and_no_target_no_heading():
    lines = list(report.lines(DoctorReport(None, (Section("tools", (GOOD, BAD)),))))
    assert lines[0] == ("flexops doctor", "bold")
    styles = {text[:6]: style for text, style in lines}
    assert styles["  ok  "] == "" != styles["  fail"]


@pytest.mark.parametrize(
    ("terminal", "as_json", "term", "waits"),
    [
        (True, False, "xterm", True),
        (True, False, "dumb", False),
        (True, True, "xterm", False),
        (False, False, "xterm", False),
    ],
)
def test_only_a_terminal_sees_that_it_takes_a_moment(monkeypatch, terminal, as_json, term, waits):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(report, "examine", lambda _: whole(GOOD))
    report.run(None, as_json=as_json, strict=False)
    said = stream.getvalue()
    assert said.startswith("flexops doctor: looking") == waits == said.endswith("\r\033[K")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("rich", [True, False])
def test_run_prints_without_rich_too(monkeypatch, capsys, as_json, rich):
    if not rich:
        for name in ("rich", "rich.console", "rich.text"):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(report, "examine", lambda _: whole(GOOD, BAD))
    assert report.run(None, as_json=as_json, strict=False) == 1
    printed = capsys.readouterr().out
    if as_json:
        check_shape(json.loads(printed))
    else:
        assert "fix: pip install ninja" in printed.replace("\n", " ")


def test_a_long_fix_stays_on_one_line(monkeypatch, capsys):
    command = (
        "pip install "
        + " ".join(f"package-number-{number}" for number in range(40))
        + " [not markup]"
    )
    monkeypatch.setattr(report, "examine", lambda _: whole(fail("x", "found", "required", command)))
    report.run(None, as_json=False, strict=False)
    assert f"fix: {command}\n" in capsys.readouterr().out


PROBES = [
    *((machine_probes, name) for name in ("platform", "python", "environment", "settings", "gpus")),
    *((build_probes, name) for name in ("tools", "device_compiler", "resources")),
    *((build_probes, name) for name in ("cache", "locks", "libraries", "unregistered")),
    (target_probe, "target"),
    (torch_probe, "torch"),
]
LOOKED_AT: dict[str, Any] = {}


def once(probe: Callable[..., Any]) -> Callable[..., Any]:
    """A probe that looks at this machine once for all tests here: some take seconds."""

    def look(*arguments: object) -> Any:
        key = f"{probe.__name__} {arguments}"
        if key not in LOOKED_AT:
            LOOKED_AT[key] = probe(*arguments)
        return LOOKED_AT[key]

    return look


def raising(*_: object, **__: object) -> Any:
    raise RuntimeError("this probe is broken")


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in PROBES:
        monkeypatch.setattr(module, name, once(getattr(module, name)))
    monkeypatch.setattr(
        trial,
        "build",
        lambda devices, *_, **__: {
            device: BuildTrial(device, build_seconds=1.0) for device in devices
        },
    )
    monkeypatch.setattr(
        trial,
        "load",
        lambda built, *_, **__: tuple(BuildTrial(device, "", 1.0, 0.001, 0.0) for device in built),
    )
    monkeypatch.setattr(trial, "ops", lambda **_: (OP,))
    monkeypatch.setattr(torch_probe, "torch", lambda: torch_probe.TorchFact("ok", version="2.13.0"))


def test_every_probe_may_raise(monkeypatch):
    for module, name in PROBES:
        monkeypatch.setattr(module, name, raising)
    found = examination.examine()
    check_shape(found.as_dict())
    assert found.target is None
    assert found.status == "fail"  # it is unknown whether anything works
    assert "this probe is broken" in found.findings[0].found


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize(("module", "name"), PROBES)
def test_one_probe_that_raises_costs_only_what_needs_it(monkeypatch, module, name):
    monkeypatch.setattr(module, name, raising)
    found = examination.examine("cpu")
    check_shape(found.as_dict())
    assert found.target == "cpu"
    broken = [
        one
        for one in found.findings
        if "could not be looked at: RuntimeError: this probe is broken" in one.found
    ]
    assert broken
    assert {one.status for one in broken} == ({"warn", "fail"} if name == "torch" else {"warn"})
    assert len(found.findings) > len(broken)


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize("name", ["build", "load", "ops"])
def test_a_trial_that_raises_is_a_finding(monkeypatch, name):
    monkeypatch.setattr(trial, name, raising)
    found = examination.examine()
    check_shape(found.as_dict())
    assert any(
        "this probe is broken" in one.found and one.status == "fail" for one in found.findings
    )


@pytest.mark.usefixtures("no_trials")
def test_a_setting_that_is_not_understood_is_one_finding(monkeypatch):
    """No trial runs with it, or each of them would report it once more."""
    left_away: dict[str, Any] = {}

    def recorded(name: str, result: Any) -> Callable[..., Any]:
        def run_trial(*_: object, run: Any) -> Any:
            left_away[name] = run.keywords["without"]
            return result

        return run_trial

    monkeypatch.setattr(machine_probes, "settings", partial(machine_probes.settings, _LOUD))
    monkeypatch.setattr(trial, "build", recorded("build", {}))
    monkeypatch.setattr(trial, "load", recorded("load", ()))
    monkeypatch.setattr(trial, "ops", recorded("ops", (OP,)))
    found = examination.examine()
    assert [one.id for one in found.findings if "FLEXOPS_LOG" in one.found] == ["settings"]
    assert left_away == dict.fromkeys(("build", "load", "ops"), ("FLEXOPS_LOG",))


def test_a_check_that_raises_is_a_finding(monkeypatch):
    monkeypatch.setattr("flexops.doctor.checks.machine.platform", raising)
    unknown = Unknown("nothing was looked at")
    nothing = Facts(machine_probes.platform(), *(unknown for _ in range(14)))  # type: ignore[arg-type]
    findings = [one for section in judge(nothing) for one in section.findings]
    assert findings[0].found == "could not be judged: RuntimeError: this probe is broken"
    assert {one.id for one in findings if one.status == "fail"} == {"torch"}


def test_an_examination_that_fails_itself_is_a_report(monkeypatch):
    monkeypatch.setattr(examination, "gather", raising)
    found = examination.examine("cpu")
    check_shape(found.as_dict())
    assert found.status == "fail"


@pytest.mark.usefixtures("no_trials")
def test_an_unknown_target_is_a_finding():
    found = examination.examine("cu999-sm1")
    check_shape(found.as_dict())
    assert (found.target, found.status) == ("cu999-sm1", "fail")
    assert any(one.id == "target" and "flexops target list" in one.fix for one in found.findings)


# ---- trials: what the parent makes of the children ----


def children(*ends: Child) -> Callable[..., Child]:
    left: Iterator[Child] = iter(ends)
    return lambda *_, **__: next(left)


def begun(name: str, device: str = "cpu") -> dict[str, Any]:
    return {
        "begun": True,
        "name": name,
        "device": device,
        "backend": "jit",
        "reason": "found in the cache",
        "fix": "",
    }


def done(name: str, device: str = "cpu") -> dict[str, Any]:
    return {
        "name": name,
        "device": device,
        "backend": "jit",
        "reason": "",
        "fix": "",
        "max_error": 0.0,
    }


PLANNED = {"planned": [["adam", "cpu"], ["quant", "cpu"]]}


def test_ops_go_on_after_one_that_crashes():
    crashed = Child(-11, (PLANNED, begun("adam")), "")
    rest = Child(0, (PLANNED, begun("quant"), done("quant")), "")
    found = trial.ops(run=children(crashed, rest))
    assert [(one.name, one.error) for one in found] == [
        ("adam", "its process was killed by SIGSEGV"),
        ("quant", ""),
    ]
    assert found[0].backend == "jit"


def test_ops_that_hang_are_reported_and_the_last_crash_ends_it():
    hung = Child(None, (PLANNED, begun("adam"), done("adam"), begun("quant")), "")
    found = trial.ops(run=children(hung))
    assert [(one.name, one.error) for one in found] == [
        ("adam", ""),
        ("quant", "its process gave no answer in time"),
    ]


def test_ops_that_cannot_even_start():
    found = trial.ops(run=children(Child(1, (), "Traceback\nImportError: no flexops.ops")))
    assert [(one.name, one.error) for one in found] == [
        ("all", "its process exited 1: ImportError: no flexops.ops")
    ]


def test_build_and_load(tmp_path):
    told = (
        {"device": "cpu", "build_seconds": 1.5, "architectures": []},
        {"device": "cuda", "error": "no", "fix": "x"},
    )
    built = trial.build(["cpu", "cuda"], tmp_path, run=children(Child(0, told, "")))
    assert built["cuda"] == BuildTrial("cuda", error="no", fix="x")
    loaded = trial.load(
        built,
        tmp_path,
        run=children(Child(0, ({"device": "cpu", "load_seconds": 0.002, "max_error": 0.0},), "")),
    )
    assert loaded == (
        BuildTrial("cpu", build_seconds=1.5, load_seconds=0.002, max_error=0.0),
        built["cuda"],
    )


def test_a_build_that_dies_and_a_load_that_crashes(tmp_path):
    built = trial.build(["cpu"], tmp_path, run=children(Child(None, (), "")))
    assert built["cpu"].error == "its process gave no answer in time"
    assert trial.load(built, tmp_path, run=children()) == (built["cpu"],)
    good = {"cpu": BuildTrial("cpu", build_seconds=1.0)}
    assert (
        trial.load(good, tmp_path, run=children(Child(-4, (), "")))[0].error
        == "its process was killed by SIGILL"
    )


def test_the_workplace_falls_back_to_the_temporary_directory(tmp_path):
    with trial.workplace(tmp_path / "cache") as place:
        assert place.is_relative_to(tmp_path / "cache")
    assert not place.exists()
    (tmp_path / "file").write_text("")
    with trial.workplace(tmp_path / "file" / "cache") as place:
        assert place.is_dir()
    with trial.workplace(None) as place:
        assert place.is_dir()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], (None, False, False)), (["--json", "--target", "cpu", "--strict"], ("cpu", True, True))],
)
def test_both_command_lines_take_the_same_options(monkeypatch, arguments, expected):
    import typer
    from typer.testing import CliRunner

    from flexops.cli.doctor import doctor as command
    from flexops.doctor import __main__ as plain

    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        report,
        "run",
        lambda target, *, as_json, strict: asked.append((target, as_json, strict)) or 1,
    )
    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, arguments).exit_code == 1
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    assert plain.main() == 1
    assert asked == [expected, expected]


def test_importing_doctor_needs_the_standard_library_only():
    """No third-party module, and none of the project's that looks at anything, when doctor is
    imported."""
    program = (
        "import sys; sys.orig_argv[:] = ['python', '-m', 'flexops.doctor']; import"
        " flexops.doctor.__main__; print(*sys.modules)"
    )
    environment = {"PYTHONPATH": str(Path(flexops.__file__).parents[1])}
    listed = completed([sys.executable, "-S", "-c", program], env=environment)
    names = {name.split(".")[0] for name in listed.stdout.split()}
    assert names - set(sys.stdlib_module_names) == {"flexops", "__main__"}
