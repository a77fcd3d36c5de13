"""``flexops watch``: a real command, run again by real edits."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builds import child_environment
from command_line import flexops_command
from marks import first_of
from processes import completed

from flexops import watching
from flexops.errors import FlexopsError

Started = Callable[..., "queue.Queue[str]"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Starts ``flexops watch``; gives its lines as they come."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> queue.Queue[str]:
        environment = child_environment(PYTHONUNBUFFERED="1")
        command = [sys.executable, "-m", "flexops", "watch", *arguments]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout
            for line in process.stdout:
                lines.put(line)

        threading.Thread(target=read, daemon=True).start()
        return lines

    yield start
    for process in processes:
        process.kill()
        process.wait()


def result(lines: queue.Queue[str]) -> str:
    """The next line about a result; fails with what was said instead if none comes."""
    said = []
    while True:
        try:
            said.append(lines.get(timeout=600))
        except queue.Empty:
            raise AssertionError("no result; it said\n" + "".join(said)) from None
        if said[-1].startswith("flexops watch:"):
            return said[-1]


def edit(source: Path, text: str) -> None:
    """Whole at once: a command that runs meanwhile reads no half of it."""
    draft = source.with_name(".draft")
    draft.write_text(text)
    draft.replace(source)


def test_an_edit_runs_the_tests_again(tmp_path, started):
    source, test = tmp_path / "csrc" / "scale.cuh", tmp_path / "test_scale.py"
    source.parent.mkdir()
    source.write_text("// 10 GB/s\n")
    test.write_text(
        "from pathlib import Path\nimport torch\ndef test_scale():\n    text ="
        " Path('csrc/scale.cuh').read_text()\n    print(text)\n    assert 'broken' not in text and"
        " torch.ones(1).item() == 1\n"
    )
    lines = started(
        "--metric",
        r"(\d+) GB/s",
        "csrc",
        "--",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "test_scale.py",
    )
    assert "passed in " in (first := result(lines))
    assert "; 10" in first
    edit(source, "// 12 GB/s\n")
    assert "12 (+20.0%)" in (second := result(lines))
    assert "[scale.cuh]" in second
    edit(source, "// broken\n")
    assert "failed (1) in " in result(lines)
    (tmp_path / "csrc" / "notes.txt").write_text("no source")
    (tmp_path / "csrc" / "more.cuh").write_text("// a new file\n")
    source.unlink()
    edit(source, "// fixed\n")
    while "passed in" not in (said := result(lines)):  # a run may come in between two of these
        assert "failed" in said


def test_a_run_that_an_edit_overtakes_is_stopped(tmp_path, started):
    source = tmp_path / "a.cu"
    source.write_text("echo started; sleep 1000; echo no")
    lines = started("a.cu", "--", "sh", "a.cu")
    assert lines.get(timeout=600) == "started\n"
    edit(source, "echo yes")
    assert "passed" in result(lines)
    assert lines.empty()


def test_programs_of_python_get_arguments_and_modules_of_their_own(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'here'\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, helper\nprint(sys.argv[1:], helper.NAME, __name__, sys.stdin.read() =="
        " '')\nsys.exit(3)\n"
    )
    runner = watching.Runner(["python", str(program), "--fast", "2"])
    found = runner.run([], {})
    assert found
    assert found.status == 3


def test_what_a_run_imported_is_there_before_the_next_one_and_what_is_edited_is_not(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'here'\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nbefore = {'colorsys', 'helper'} & set(sys.modules)\nimport colorsys,"
        " helper\nsys.exit({(): 3, ('colorsys',): 4}[tuple(before)])\n"
    )
    runner = watching.Runner(["python", str(program)])
    found = [runner.run([], {}), runner.run([], {})]
    assert [one and one.status for one in found] == [3, 4]


@pytest.mark.extra
def test_pytest_has_nothing_to_say_of_plugins_that_are_there_already(tmp_path, capfd):
    (tmp_path / "test_one.py").write_text("import hypothesis\ndef test_one(): pass\n")
    for command in (["pytest"], ["python", "-m", "pytest"]):
        runner = watching.Runner(
            [*command, "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
        )
        assert [one and one.status for one in (runner.run([], {}), runner.run([], {}))] == [0, 0]
    assert (said := capfd.readouterr().out).count("1 passed") == 4, said
    assert "RewriteWarning" not in said


@pytest.mark.parametrize(
    ("last", "code"), first_of(("1 / 0", 1), ("sys.exit(3)", 3), ("sys.exit('a text')", 1), ("", 0))
)
def test_a_program_ends_as_it_would_by_itself(tmp_path, last, code):
    """Its threads are waited for, what it left to the end is done, and its status is its own."""
    (tmp_path / "ends.py").write_text(
        "import atexit, sys, threading, time\natexit.register(print, 'at the"
        " end')\nthreading.Thread(target=lambda: (time.sleep(0.3), print('a"
        f" thread'))).start()\nprint('the program', end=' ')\n{last}\n"
    )
    line, environment = (
        f'["python", "{tmp_path}/ends.py"]\n',
        child_environment(PYTHONPATH=str(tmp_path / "none")),
    )
    with tempfile.TemporaryFile() as modules:
        child = [
            sys.executable,
            str(Path(watching.__file__).with_name("watching_child.py")),
            str(modules.fileno()),
        ]
        done = completed(
            child, input=line, env=environment, pass_fds=(modules.fileno(),), code=None
        )
    assert done.stdout == "the program a thread\nat the end\n", done.stderr
    assert done.returncode == code, done.stderr
    assert ("a text" in done.stderr) == ("text" in last)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--", "true"], "a path to watch is missing"),
        (["."], "there is nothing to run"),
        (["--metric", "(", ".", "--", "true"], "--metric is no regular expression"),
        (["--metric", "a", ".", "--", "true"], "no one group"),
        ([".", "--", "no-such-program-here"], "no-such-program-here cannot be run"),
    ],
)
def test_what_cannot_be_watched_or_run_is_said(arguments, said):
    done = flexops_command("watch", *arguments, catch_exceptions=True)
    assert isinstance(done.exception, FlexopsError)
    assert said in str(done.exception)


def test_what_counts_as_a_change(tmp_path):
    (tmp_path / "a.cuh").write_text("1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.cuh").write_text("1")
    before = watching.snapshot([tmp_path, tmp_path / "absent.cu"])
    assert list(before) == [str(tmp_path / "a.cuh")]
    os.utime(tmp_path / "a.cuh", ns=(5, 5))
    (tmp_path / "c.cpp").write_text("")
    assert [
        Path(name).name for name in watching.changed(before, watching.snapshot([tmp_path]))
    ] == ["a.cuh", "c.cpp"]


@pytest.mark.gpu
def test_a_gpus_context_is_there_before_the_command(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys, torch\nsys.exit(7 if torch.cuda.is_initialized() else 1)\n")
    found = watching.Runner(["python", str(program)]).run([], {})
    assert found
    assert found.status == 7
