"""``flexops.toolchain.proc``: the one way to run a child process."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from flexops.toolchain import proc

ROOT = Path(__file__).resolve().parents[2]
# a script that is itself a child; programs of the workbench, which run to their end
ELSEWHERE = (
    "build/compile/pch_worker.py",
    "bench/profiling.py",
    "inspection/measuring.py",
    "inspection/mix.py",
    "testing/emulator/ptx.py",  # a script of the standard library alone
)
T = TypeVar("T")
SHELL = "/bin/sh"
LEAVES_ITS_SESSION = (
    "import subprocess, sys, time;"
    " p = subprocess.Popen(['sleep', '60'], start_new_session=True);"
    " print(p.pid, flush=True); time.sleep(60)"
)


def test_children_are_started_in_one_place():
    found = {
        str(path.relative_to(ROOT / "flexops"))
        for path in (ROOT / "flexops").rglob("*.py")
        if re.search(r"\b(?:import subprocess|os\.fork\(|os\.posix_spawn)", path.read_text())
    }
    assert {one for one in found if not one.startswith(ELSEWHERE)} == {"toolchain/proc.py"}


def within(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns; it fails if the call has not returned by then."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it still waits"
    return results[0]


def test_a_command_runs_to_its_end():
    code = "cat; echo said; echo failed >&2; exit 3"
    together = proc.run([SHELL, "-c", code], content=b"given\n")
    assert together == (3, "given\nsaid\nfailed\n", "")
    apart = proc.run([SHELL, "-c", code], apart=True)
    assert apart == (3, "said\n", "failed\n")
    assert proc.run([SHELL, "-c", "kill -9 $$"]).status == -9
    with pytest.raises(FileNotFoundError):
        proc.run(["/missing/program"])


def test_a_time_limit_ends_what_left_the_session_too():
    """A compiler under ninja has a group of its own, so a kill of the child's group misses it."""
    done = within(20, lambda: proc.run([sys.executable, "-c", LEAVES_ITS_SESSION], seconds=2))
    assert done.status is None
    assert ends(int(done.output))


def test_an_interruption_ends_the_child(tmp_path):
    file = tmp_path / "pid"
    program = f"open({str(file)!r}, 'w').write(str(__import__('os').getpid())); import time; "
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        proc.run([sys.executable, "-c", f"{program}time.sleep(60)"])
    assert ends(int(file.read_text()))


def test_lines_end_with_the_process_where_another_keeps_its_pipe_open():
    process = proc.start([SHELL, "-c", "sleep 60 & echo $!; printf 'no end'"])
    sleeper, last = within(20, lambda: proc.lines(process))
    os.kill(int(sleeper), signal.SIGKILL)
    assert last == "no end"
    assert process.stdout
    process.stdout.close()


ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)\n"


def test_a_worker_answers_beyond_the_1024th_file(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2048:
        pytest.skip("this system allows fewer files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = proc.JsonChild(script)
        assert child.ask({"a": [1]}, 20) == {"a": [1]}
        child.stop()
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not child.alive


def test_a_worker_that_does_not_answer_or_ends():
    slow = proc.JsonChild(Path("/dev/null"))  # an empty script ends at once
    with pytest.raises(BrokenPipeError):
        slow.ask({}, 20)
    assert slow.end == (0, "")


def test_a_worker_is_killed_at_its_time_limit(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text("import time; time.sleep(60)")
    child = proc.JsonChild(script)
    with pytest.raises(TimeoutError):
        child.ask({}, 0.3)
    assert not child.alive


def ends(process: int) -> bool:
    """Whether a process ends within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
