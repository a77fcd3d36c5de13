"""``flexops.toolchain.proc``: the one way to run a child process."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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
    " p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
    " print(p.pid, flush=True); time.sleep(600)"
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
    command = [sys.executable, "-c", LEAVES_ITS_SESSION]
    for limit in (2, 20, 200):  # a loaded machine may not get to start the child within the first
        done = within(limit + 300, lambda limit=limit: proc.run(command, seconds=limit))
        assert done.status is None
        if done.output:
            break
    assert ends(int(done.output))


def test_an_interruption_ends_the_child(tmp_path, monkeypatch):
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    said: list[str] = []
    waits, heard, real = threading.Event(), threading.Event(), subprocess.Popen.communicate

    def communicate(*arguments: Any, **options: Any) -> Any:
        waits.set()
        return real(*arguments, **options)

    def interrupt() -> None:
        said.append(fifo.read_text())
        waits.wait()
        while not heard.is_set():  # one that comes just before the wait does not end it
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    def hear(*_: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    before = signal.signal(signal.SIGINT, hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            proc.run([SHELL, "-c", f"echo $$ > '{fifo}'; exec sleep 600"])
    finally:
        heard.set()
        thread.join(600)
        signal.signal(signal.SIGINT, before)
    assert ends(int(said[0]))


def test_lines_end_with_the_process_where_another_keeps_its_pipe_open():
    process = proc.start([SHELL, "-c", "sleep 600 & echo $!; printf 'no end'"])
    sleeper, last = within(300, lambda: proc.lines(process))
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
        assert child.ask({"a": [1]}, 300) == {"a": [1]}
        child.stop()
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not child.alive


def test_a_worker_that_does_not_answer_or_ends():
    slow = proc.JsonChild(Path("/dev/null"))  # an empty script ends at once
    with pytest.raises(BrokenPipeError):
        slow.ask({}, 300)
    assert slow.end == (0, "")


def test_a_worker_is_killed_at_its_time_limit(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text("import time; time.sleep(600)")
    child = proc.JsonChild(script)
    with pytest.raises(TimeoutError):
        child.ask({}, 0.3)
    assert not child.alive


def ends(process: int) -> bool:
    """Whether a process ends in the end."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
