"""Bad days: builds that are killed, interrupted, or asked for by many at once. Whatever happens,
the next one is right and does not hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from builds import (
    CHILDREN,
    answer,
    child_environment,
    finish_child,
    run_child,
    runs,
    start_child,
    tiny_plan,
    watched_compiler,
)

from flexops.toolchain.model import HostCompiler

assert CHILDREN.is_dir()


class Case:
    """A tiny plan, a compiler that can be made to wait, and a cache of its own."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self.cache = folder / "cache"
        self.watched = folder / "watched"
        self.compiler = watched_compiler(self.watched, compiler)
        self.request = {"folder": str(folder / "tiny"), "compiler": str(self.compiler)}
        tiny_plan(folder / "tiny")
        self.environment = child_environment(
            FLEXOPS_CACHE_DIR=str(self.cache), FLEXOPS_COMPILER_LAUNCHER="none"
        )

    def start(self, **more: Any) -> Any:
        return start_child("obtain.py", {**self.request, **more}, self.environment)

    def build(self) -> dict[str, Any]:
        return run_child("obtain.py", self.request, self.environment)

    def hang(self, kind: str) -> None:
        (self.watched / f"hang-{kind}").write_text("")

    def release(self, kind: str) -> None:
        (self.watched / f"hang-{kind}").unlink(missing_ok=True)

    def wait_until_hanging(self, kind: str) -> None:
        wait_for((self.watched / f"waiting-{kind}").exists)

    def age_leftovers(self) -> list[Path]:
        left = list((self.cache / ".tmp").iterdir())
        for path in left:
            os.utime(path, (time.time() - 3600,) * 2)
        return left


@pytest.fixture
def case(tmp_path: Path, host_compiler: HostCompiler) -> Any:
    made = Case(tmp_path, str(host_compiler.path))
    yield made
    made.release("compile")
    made.release("link")


def wait_for(condition: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def holds_a_lock_file(pid: int) -> bool:
    """Whether it has the lock of a build open: it holds it, or waits for it."""
    try:
        return any(
            os.readlink(path).endswith(".lock") for path in Path(f"/proc/{pid}/fd").iterdir()
        )
    except FileNotFoundError:  # a file that was closed meanwhile
        return False


@pytest.mark.parametrize("kind", ["compile", "link"])
def test_killed_while_it_compiles_or_links(case, kind):
    case.hang(kind)
    victim = case.start()
    case.wait_until_hanging(kind)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    case.release(kind)
    left = case.age_leftovers()
    assert left, "a killed process cannot clean up"
    result = case.build()
    assert not result["cached"]
    assert answer(Path(result["library"])) == 42
    assert not list((case.cache / ".tmp").iterdir()), "what the dead left is swept"
    assert case.build()["cached"]


@pytest.mark.parametrize("moment", ["before-publish", "after-publish"])
def test_killed_around_the_rename(case, moment):
    victim = case.start(die=moment)
    victim.communicate(timeout=600)
    assert victim.returncode == -signal.SIGKILL
    case.age_leftovers()
    result = case.build()
    assert answer(Path(result["library"])) == 42
    assert not list((case.cache / ".tmp").iterdir())
    assert case.build()["cached"]


def test_killed_at_every_single_step(case, tmp_path):
    """At each file opened for writing, directory made, rename, lock and process started: nothing
    that harms the next build."""
    result = run_child(
        "die_everywhere.py",
        {"folder": case.request["folder"], "cache": str(tmp_path / "other")},
        case.environment,
    )
    assert result["places"] > 20
    assert result["wrong"] == []


@pytest.mark.parametrize(
    "group", [True, False], ids=["Ctrl-C on a terminal", "SIGINT to the process"]
)
def test_interrupted(case, group):
    case.hang("compile")
    victim = start_child("obtain.py", case.request, case.environment, start_new_session=True)
    case.wait_until_hanging("compile")
    started = descendants(victim.pid)
    assert started
    (os.killpg if group else os.kill)(victim.pid, signal.SIGINT)
    said = victim.communicate(timeout=600)
    assert victim.returncode != 0
    assert "KeyboardInterrupt" in said[1]
    assert not list((case.cache / ".tmp").iterdir()), "an interrupted build cleans up"
    wait_for(lambda: not any(running(pid) for pid in started))
    case.release("compile")
    assert answer(Path(case.build()["library"])) == 42


@pytest.mark.parametrize(
    "how",
    ["restart", "elsewhere"],
    ids=["a handler that lets system calls go on", "another thread takes the signal"],
)
@pytest.mark.parametrize("doing", ["building", "waiting for another"])
def test_interrupted_in_a_large_process(case, how, doing):
    """Such a signal ends no system call: neither the reading of what compilers say nor the wait for
    a lock may depend on that."""
    case.hang("compile")
    other = case.start() if doing != "building" else None
    if other:
        case.wait_until_hanging("compile")
    victim = start_child(
        "obtain.py", {**case.request, "signals": how}, case.environment, start_new_session=True
    )
    case.wait_until_hanging("compile")
    if other:
        wait_for(lambda: holds_a_lock_file(victim.pid))
    os.kill(victim.pid, signal.SIGINT)
    said = victim.communicate(timeout=600)
    assert "KeyboardInterrupt" in said[1]
    assert victim.returncode != 0
    case.release("compile")
    built = finish_child(other) if other else case.build()
    assert answer(Path(built["library"])) == 42


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def compiles(compiler: Path, pid: int) -> bool:
    words = command_line(pid).split("\0")
    return str(compiler) in words and "-c" in words


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_eight_processes_build_once(case):
    case.hang("compile")
    children = [case.start() for _ in range(8)]
    case.wait_until_hanging("compile")
    wait_for(lambda: all(holds_a_lock_file(child.pid) for child in children))
    case.release("compile")
    results = [finish_child(child) for child in children]
    assert len({result["library"] for result in results}) == 1
    assert sum(not result["cached"] for result in results) == 1
    assert runs(case.watched) == ["compile", "link"]
    assert answer(Path(results[0]["library"])) == 42


def test_eight_processes_and_the_one_that_builds_is_killed(case):
    case.hang("compile")
    children = [case.start() for _ in range(8)]
    case.wait_until_hanging("compile")
    # not who has a ninja: each of the eight asks it for its version
    builder = next(
        child
        for child in children
        if any(compiles(case.compiler, pid) for pid in descendants(child.pid))
    )
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    case.release("compile")
    results = [finish_child(child) for child in children if child is not builder]
    assert len({result["library"] for result in results}) == 1
    assert answer(Path(results[0]["library"])) == 42
    assert runs(case.watched).count("compile") == 2, "the dead one's, and one other's"


def test_eight_processes_without_locks(case, tmp_path):
    """Where the file system rejects locks (here: a directory in each lock's place) the rename alone
    keeps entries whole."""
    locks = case.cache / ".locks"
    locks.mkdir(parents=True)
    name = finish_child(case.start())["library"].split("/")[-3]
    made = list(locks.iterdir())
    assert [path.name.startswith(name) for path in made] == [True]
    made[0].unlink()
    made[0].mkdir()
    for path in (case.cache / name).iterdir():
        path.rename(tmp_path / path.name)
    children = [case.start() for _ in range(8)]
    results = [finish_child(child) for child in children]
    assert len({result["library"] for result in results}) == 1
    assert answer(Path(results[0]["library"])) == 42
    assert not list((case.cache / ".tmp").iterdir())


def test_a_failure_is_taken_over_by_those_who_waited(case, tmp_path):
    tiny_plan(tmp_path / "tiny", source='#include "tiny.h"\nint broken = nothing_of_that_name;\n')
    case.hang("compile")
    children = [case.start() for _ in range(4)]
    case.wait_until_hanging("compile")
    wait_for(lambda: all(holds_a_lock_file(child.pid) for child in children))
    case.release("compile")
    results = [finish_child(child) for child in children]
    assert runs(case.watched) == ["compile"], "compiled, and failed, once"
    for result in results:
        assert result["kind"] == "CompileError"
        assert "tiny.cpp:2" in result["error"]
        assert Path(result["log"]).read_text().count("nothing_of_that_name") >= 1
    assert case.build()["kind"] == "CompileError"
    assert runs(case.watched) == ["compile", "compile"], "asked again later, it is tried again"
    tiny_plan(tmp_path / "tiny", source='extern "C" int answer() { return 43; }\n')
    assert answer(Path(case.build()["library"])) == 43


def test_a_failure_of_the_future_does_not_outlive_the_header_that_caused_it(case, tmp_path):
    """Whatever the clock says, a failure counts for those who waited for that very build, and for
    the headers that it read."""
    tiny_plan(tmp_path / "tiny", header="#error broken\n")
    assert case.build()["kind"] == "CompileError"
    records = list(case.cache.glob("*/*.failure.json"))
    assert len(records) == 1
    os.utime(records[0], (time.time() + 1e6,) * 2)
    tiny_plan(tmp_path / "tiny", header="inline int answer_of_header() { return 44; }\n")
    assert answer(Path(case.build()["library"])) == 44


def test_those_who_waited_for_a_failure_look_at_the_headers_again(case, tmp_path):
    tiny_plan(tmp_path / "tiny", header="#error broken\n")
    case.hang("link")
    case.hang("compile")
    first = case.start()
    case.wait_until_hanging("compile")
    second = case.start()
    wait_for(lambda: holds_a_lock_file(second.pid))
    os.kill(second.pid, signal.SIGSTOP)
    case.release("compile")
    assert finish_child(first)["kind"] == "CompileError"
    tiny_plan(tmp_path / "tiny", header="inline int answer_of_header() { return 45; }\n")
    case.release("link")
    os.kill(second.pid, signal.SIGCONT)
    assert answer(Path(finish_child(second)["library"])) == 45
