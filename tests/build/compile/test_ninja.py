"""How plans become ninja files, and how ninja is run, watched and stopped."""

from __future__ import annotations

import os
import select
import tempfile

import pytest
from builds import CCACHE, SQUARE, TOOLS, ninja_path, paper_plan, tiny_plan

from flexops.build.compile import ninja as compiler
from flexops.build.compile.diagnose import diagnose
from flexops.build.plan.plan import BuildPlan, Step
from flexops.errors import ToolchainError


def shell_plan(name: str, *commands: str, jobs: int = 2) -> BuildPlan:
    """A plan of shell commands; the first makes ``lib.so``. Link steps, because those are run as
    they are."""
    steps = tuple(
        Step("link", f"out{number}" if number else "lib.so", (), ("sh", "-c", command))
        for number, command in enumerate(commands)
    )
    return BuildPlan(
        name=name,
        steps=steps,
        library="lib.so",
        sources=(),
        anchors=(),
        identity=(),
        trusted_roots=(),
        jobs=jobs,
        nvcc_threads=1,
        device="cpu",
        torch_abi="",
        ninja=ninja_path(),
    )


def test_awkward_names_reach_the_compiler_unchanged(tmp_path):
    plan = tiny_plan(tmp_path / "a $dollar: and 'quotes'")
    outcome = compiler.run([plan], tmp_path / "work dir$")
    assert outcome.returncode == 0, outcome.output
    assert (tmp_path / "work dir$" / plan.name / "tiny.so").exists()
    reached = [
        path.read_text() for path in compiler.depfiles(plan, tmp_path / "work dir$" / plan.name)
    ]
    assert "tiny.h" in reached[0]


def test_the_file_left_beside_the_library_repeats_the_build(tmp_path):
    import subprocess

    plan = tiny_plan(tmp_path / "tiny")
    compiler.run([plan], tmp_path / "work")
    again = tmp_path / "again"
    again.mkdir()
    (again / "build.ninja").write_bytes(
        (tmp_path / "work" / plan.name / "build.ninja").read_bytes()
    )
    subprocess.run([plan.ninja, "-C", str(again)], check=True, capture_output=True)
    assert (again / "tiny.so").exists()


def test_launcher_threads_and_dependency_files_stay_out_of_the_plan():
    plan = paper_plan(SQUARE, "cuda")
    # of people's own sources
    device = Step("device", "own.cu.o", ("/own.cu",), ("nvcc", "-c", "/own.cu"))
    plan = plan._replace(steps=(device, *plan.steps), nvcc_threads=2)
    commands = {step.output: compiler.full_command(plan, step) for step in plan.steps}
    assert commands["own.cu.o"][0] == str(CCACHE.path)
    assert {"--threads=2", "-MD", "-MF", "own.cu.o.d"} <= set(commands["own.cu.o"])
    assert "--threads=2" not in commands["binding.o"]
    assert commands[plan.library] == plan.steps[-1].command
    assert (
        compiler.full_command(
            paper_plan(SQUARE, "cpu", TOOLS._replace(launcher=None)), plan.steps[1]
        )[0]
        == "/usr/bin/g++"
    )


def test_the_longest_steps_are_first_of_all_plans():
    cpu, cuda = paper_plan(SQUARE, "cpu"), paper_plan(SQUARE, "cuda")
    cuda = cuda._replace(
        steps=(
            *cuda.steps[:1],
            Step("device", "own.cu.o", ("/own.cu",), ("nvcc",)),
            *cuda.steps[1:],
        )
    )
    text = compiler.render_ninja([cpu, cuda], subdirectories=True)
    made = [
        line.split(":")[0].removeprefix("build ")
        for line in text.splitlines()
        if line.startswith("build ")
    ]
    assert made[0] == f"{cuda.name}/own.cu.o"
    assert sorted(made) == sorted(
        f"{plan.name}/{step.output}" for plan in (cpu, cuda) for step in plan.steps
    )


def test_one_failure_does_not_stop_the_others(tmp_path):
    good, bad = (
        shell_plan("good", "echo fine > lib.so"),
        shell_plan("bad", "echo 'a.cpp:1:1: error: broken' >&2; exit 1"),
    )
    outcome = compiler.run([bad, good], tmp_path / "work")
    assert outcome.returncode != 0
    assert outcome.failed(bad)
    assert not outcome.failed(good)
    assert (tmp_path / "work" / "good" / "lib.so").exists()
    assert "error: broken" in outcome.output


def test_half_a_library_of_a_killed_linker_is_a_failure(tmp_path):
    plan = shell_plan("half", "printf half > lib.so; kill -9 $$")
    outcome = compiler.run([plan], tmp_path / "work")
    assert outcome.failed(plan)


def test_a_killed_ninja_leaves_nothing_to_be_taken_for_whole(tmp_path):
    """It dies without a word about what was being written: then no output of the run can be
    trusted, finished ones neither."""
    good = shell_plan("good", "echo fine > lib.so; echo > ../done")
    ninja = "$(cut -d' ' -f6 /proc/$$/stat)"  # the leader of its session
    half = shell_plan(
        "half",
        f"while ! [ -e ../done ]; do sleep 0.02; done; printf half > lib.so; kill -9 {ninja}; kill"
        " -9 $$",
    )
    outcome = compiler.run([good, half], tmp_path / "work")
    assert outcome.returncode == -9
    assert "SIGKILL" in outcome.output
    assert outcome.failed(good)
    assert outcome.failed(half)
    assert not list((tmp_path / "work").glob("*/lib.so"))


def test_a_compiler_that_hangs_is_stopped_and_its_source_named(tmp_path):
    source, alive = tmp_path / "it's slow.cu", tmp_path / "alive"
    source.touch()
    os.mkfifo(alive)  # which what the compiler has started holds open for as long as it lives
    child = f"(echo started; sleep 600; echo ended) > '{alive}' & wait"
    hanging, good = (
        shell_plan("hanging", f"echo half > lib.so; {child}"),
        shell_plan("good", "echo > lib.so"),
    )
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    said = b""
    # a loaded machine may not get to start the child within the first limit
    for limit in (1, 10, 100):
        step = hanging.steps[0]._replace(inputs=(str(source),))
        outcome = compiler.run(
            [hanging._replace(timeout=limit, steps=(step,)), good], tmp_path / f"work{limit}"
        )
        assert outcome.failed(hanging)
        assert not outcome.failed(good)
        assert not (tmp_path / f"work{limit}" / "hanging" / "lib.so").exists()
        found = diagnose(outcome.output)
        assert str(source) in found.error
        assert "FLEXOPS_COMPILE_TIMEOUT" in found.fix
        said = said or _read_until_closed(reader)
        if said:
            break
    os.close(reader)
    assert said == b"started\n", "a process that the compiler had started is stopped with it"


def _read_until_closed(reader: int) -> bytes:
    """What was written until the last writer ended; fails if one lives on."""
    said = b""
    while select.select([reader], [], [], 300)[0]:
        if not (part := os.read(reader, 4096)):
            return said
        said += part
    raise AssertionError("a process that the compiler had started is still running")


def test_names_that_end_alike_are_not_confused(tmp_path):
    good, bad = shell_plan("tiny-cpu", "echo > lib.so"), shell_plan("not-tiny-cpu", "exit 1")
    outcome = compiler.run([good, bad], tmp_path / "work")
    assert outcome.failed(bad)
    assert not outcome.failed(good)


def test_progress_and_log(tmp_path):
    seen: list[tuple[int, int, str]] = []
    plan = shell_plan("steps", "echo said by the first > lib.so; echo said", "echo > out1")
    outcome = compiler.run([plan], tmp_path / "work", progress=lambda *step: seen.append(step))
    assert [total for _, total, _ in seen] == [2] * len(seen)
    assert seen[-1][0] == 2
    assert any("steps: lib.so" in what for _, _, what in seen)
    assert "said" in (tmp_path / "work" / "steps" / "build.log").read_text()
    assert "@flexops" not in outcome.output


def test_debug_shows_commands(tmp_path):
    plan = shell_plan("steps", "echo a-special-word > lib.so")
    assert "a-special-word" in compiler.run([plan], tmp_path / "debug", debug=True).output
    assert "a-special-word" not in compiler.run([plan], tmp_path / "plain").output


def test_plans_share_the_processors_within_the_memory_of_the_most_demanding(tmp_path):
    met = "while ! [ -e ../p0/began -a -e ../p1/began ]; do sleep 0.02; done"
    single = "mkdir ../busy && sleep 0.3 && rmdir ../busy"

    def succeeds(name: str, command: str, *jobs: int) -> bool:
        text = f": > began; {command} && : > lib.so"
        plans = [
            shell_plan(f"p{number}", text, jobs=count)._replace(timeout=300)
            for number, count in enumerate(jobs)
        ]
        outcome = compiler.run(plans, tmp_path / name)
        return not any(outcome.failed(plan) for plan in plans)

    assert succeeds("together", met, 2, 2), "both run before one ends"
    assert succeeds("alone", single, 2, 1), "one at a time, as the more demanding plan asks"


def test_no_ninja_is_said(tmp_path):
    with pytest.raises(ToolchainError, match="ninja") as caught:
        compiler.run([tiny_plan(tmp_path / "tiny", ninja="/no/such/ninja")], tmp_path / "work")
    assert caught.value.fix == "pip install ninja"


def test_the_environment_of_a_plan_is_given(tmp_path):
    plan = shell_plan("env", "echo $GREETING $LC_ALL > lib.so")._replace(
        environment=(("GREETING", "hello"),)
    )
    compiler.run([plan], tmp_path / "work")
    assert (tmp_path / "work" / "env" / "lib.so").read_text().split() == ["hello", "C"]


@pytest.mark.parametrize("how", ["plain", "in a session of its own"])
def test_a_link_that_hangs_is_stopped_and_named(tmp_path, how):
    """A process in another session keeps the pipe open that ninja waits for."""
    sleep = f"{'' if how == 'plain' else 'setsid -w '}sh -c 'sleep 600; echo > ../ended'"
    plan = shell_plan("slow", f"echo half > lib.so; {sleep}; true")._replace(timeout=1)
    outcome = compiler.run([plan], tmp_path / "work")
    assert not (tmp_path / "work" / "ended").exists(), "it was waited for"
    assert outcome.failed(plan)
    found = diagnose(outcome.output)
    assert "the link of lib.so" in found.error
    assert "FLEXOPS_COMPILE_TIMEOUT" in found.fix


@pytest.mark.parametrize(
    ("mode", "environment", "inside"),
    [(0o777, (), True), (0o1777, (), False), (0o1777, (("ROCM_PATH", "/opt/rocm"),), True)],
)
def test_compilers_use_no_tmpdir_that_others_can_change_or_that_hipcc_would_fill(
    tmp_path, mode, environment, inside, monkeypatch
):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(mode)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    plan = shell_plan("steps", "echo $TMPDIR > lib.so")._replace(environment=environment)
    compiler.run([plan], tmp_path / "work")
    used = (tmp_path / "work" / "steps" / "lib.so").read_text().strip()
    assert used == str(tmp_path / ("work" if inside else "temporary"))
