"""scripts/lib/engine.sh: when an engine is started, when none can be, and what is said. On
stand-ins for the programs; no engine is touched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from processes import completed

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "engine.sh"


class Machine:
    """A PATH on which some programs are stand-ins. The engine answers while the file ``answers`` is
    there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        self.program("docker", f"[ -e {folder}/answers ]")
        self.program("id", "echo 0")
        self.program("unshare", "exit 0")
        for name in ("mmdebstrap", "apt-get", "apt-cache"):
            self.program(name, f'echo "{name} $*" >> {folder}/calls')
        self.program(
            "dockerd",
            f'echo "dockerd $*" >> {folder}/calls; touch {folder}/answers; exec sleep 600',
        )

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, script: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", f'set -u; source "{SCRIPT}"; {script}']
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin"}
        return completed(command, env=environment, cwd=self.folder, code=code)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_engine_that_answers_is_left_alone(machine):
    (machine.folder / "answers").touch()
    done = machine.run("why_no_engine && exit 9; start_engine log && stop_engine", code=None)
    assert (done.returncode, done.stdout, machine.calls) == (0, "", [])


def test_one_is_started_and_stopped(machine):
    machine.run(
        "why_no_engine && exit 9; start_engine log || exit 8; kill -0 $ENGINE_PID || exit 7;"
        " pid=$ENGINE_PID; stop_engine; ! kill -0 $pid"
    )
    assert machine.calls == ["dockerd "]


def test_without_iptables_and_bridges_it_starts_all_the_same(machine):
    machine.program(
        "dockerd",
        f'echo "dockerd $*" >> calls; [ -n "$*" ] || exit 1; touch {machine.folder}/answers; exec'
        " sleep 600",
    )
    machine.run("start_engine log && stop_engine")
    assert machine.calls == ["dockerd ", "dockerd --iptables=false --bridge=none"]


def test_one_that_does_not_start_is_a_failure_with_its_own_words(machine):
    machine.program("dockerd", "echo no such thing as a graph driver; exit 1")
    done = machine.run("why_no_engine && exit 9; start_engine log", code=1)
    assert "does not start" in done.stderr
    assert "no such thing as a graph driver" in done.stderr


@pytest.mark.parametrize(
    ("program", "text", "why"),
    [
        ("id", "echo 1000", "only root can start one"),
        ("unshare", '[ "$1" != --mount ] || [ "$2" != --net ]', "may not make namespaces"),
        ("unshare", '[ "$2" = --net ]', "may not mount file systems"),
    ],
)
def test_where_none_can_run_it_is_said_why(machine, program, text, why):
    machine.program(program, text)
    done = machine.run("why_no_engine")
    assert why in done.stdout
    assert machine.calls == []


def test_packages_that_cannot_be_fetched_are_a_reason_too(machine):
    machine.program("apt-get", 'echo "apt-get $*" >> calls; [ "$1" = update ]')
    done = machine.run(
        'command() { [[ $2 != mmdebstrap ]] && builtin command "$@"; }; why_no_engine', code=None
    )
    assert "cannot be downloaded" in done.stdout
    assert machine.calls == [
        "apt-get update -q",
        "apt-get install -q -y --no-install-recommends --download-only mmdebstrap",
    ]


def test_run_as_a_program_it_says_what_came_of_it(machine):
    machine.program("id", "echo 1000")
    done = completed(["bash", str(SCRIPT)], env={"PATH": f"{machine.bin}:/usr/bin:/bin"}, code=1)
    assert done.stderr == "no container engine: none answers, and only root can start one\n"
