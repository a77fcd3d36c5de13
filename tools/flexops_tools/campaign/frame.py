"""What every part of the fault campaign needs: work in a child that may die, and a judgement of
what came of it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""What takes longer hangs: nothing here takes a second on a quiet machine."""

KINDS = ("hang", "wrong result", "traceback", "foreign code")


class Fault(Exception):
    """Something that must not happen."""

    def __init__(self, kind: str, what: str) -> None:
        assert kind in KINDS
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass
class Tally:
    """What came of one part."""

    name: str
    rounds: int = 0
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        """One more of what was seen, to show that the part reaches what it is about."""
        self.seen[what] = self.seen.get(what, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        counts = {kind: sum(fault.kind == kind for fault in self.faults) for kind in KINDS}
        told = [str(fault) for fault in self.faults]
        return {
            "name": self.name,
            "rounds": self.rounds,
            **counts,
            "seconds": round(self.seconds, 1),
            "seen": self.seen,
            "told": told,
        }


@dataclass
class World:
    """Where a part works, how often, and with which dice."""

    folder: Path
    rounds: int
    dice: random.Random
    tally: Tally

    def each(self) -> Iterator[int]:
        """The rounds; what is raised in the body of one is counted by ``guarded``, not here."""
        for number in range(self.rounds):
            self.tally.rounds += 1
            yield number

    def guarded(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except Fault as fault:
            self.tally.faults.append(Fault(fault.kind, f"{what}: {fault}"))
        except Exception:  # of the campaign itself: report it and run the other rounds
            self.tally.faults.append(
                Fault("traceback", f"{what}, in the campaign: {traceback.format_exc()}")
            )


@dataclass
class Child:
    """A process of ours."""

    pid: int
    answer: Path
    deadline: float

    def wait(self) -> dict[str, Any]:
        """What it said; ``{"killed": N}`` if a signal ended it. Raises ``Fault`` if it hangs or
        raised an undocumented error."""
        try:
            return self._said(self._ended())
        finally:
            self.answer.unlink(missing_ok=True)

    def _ended(self) -> int:
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            if time.monotonic() > self.deadline:
                end(self.pid)
                os.waitpid(self.pid, 0)
                raise Fault("hang", f"a process had not ended after {SECONDS:.0f} s")
            time.sleep(0.002)

    def _said(self, status: int) -> dict[str, Any]:
        if os.WIFSIGNALED(status):
            return {"killed": os.WTERMSIG(status)}
        try:
            said: dict[str, Any] = json.loads(self.answer.read_text())
        except (OSError, ValueError):
            raise Fault("traceback", f"a process ended with {status} and no answer") from None
        if "traceback" in said:
            raise Fault("traceback", said["traceback"])
        return said


def start(work: Callable[[], Any], *, memory: int = 0) -> Child:
    """Run ``work`` in a child of fork, in a session of its own; its answer is what it returns, or
    the error of flexops that it raised."""
    handle, name = tempfile.mkstemp(prefix="flexops-campaign-answer-")
    os.close(handle)
    pid = os.fork()
    if pid:
        return Child(pid, Path(name), time.monotonic() + SECONDS)
    try:
        answer = os.open(name, os.O_WRONLY | os.O_TRUNC)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
        os.write(answer, json.dumps(_answer(work)).encode())
    finally:
        os._exit(0)


def run(work: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """``start`` and ``wait``."""
    return start(work, **options).wait()


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    from flexops.errors import FlexopsError

    try:
        return {"value": work()}
    except FlexopsError as error:
        return {"error": str(error), "kind": type(error).__name__}
    except BaseException:
        return {"traceback": traceback.format_exc()}


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they did; without those that end
    meanwhile."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:
        pass
    return [*found, *(below for child in found for below in descendants(child))]


def program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def kill(pid: int) -> bool:
    """Whether it was there to be killed. Only for processes below one that this campaign
    started."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def end(pid: int) -> None:
    for one in (*descendants(pid), pid):
        kill(one)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
