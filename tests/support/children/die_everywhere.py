"""Kills a build at every single thing that it does to the file system or to other processes, and
looks whether the next one is right.

Each build runs in a child of fork, because an audit hook cannot be taken back. Request: ``folder``
(of a ``tiny_plan``), ``cache``. Prints how many places there were, and each after which something
was wrong.
"""

# ruff: noqa: E402 - paths and stand-ins come before the imports that need them
from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builds import tiny_plan

from flexops.build.compile import building
from flexops.build.plan.plan import BuildPlan
from flexops.build.store.cache import BuildCache

_DEEDS = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.chmod",
    "shutil.rmtree",
    "tempfile.mkstemp",
    "tempfile.mkdtemp",
    "subprocess.Popen",
)
_LONGEST = 300.0
request: dict[str, Any] = json.loads(sys.argv[1])


def is_deed(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        mode = arguments[1]
        return bool(set(mode or "") & set("wax+")) or (mode is None and bool(arguments[2] & 0o3))
    return event in _DEEDS or event == "fcntl.flock"


def build(plan: BuildPlan, cache: Path, die_at: int) -> None:
    """In a child: build, and die before the ``die_at``-th deed; exits 0 if it came to the end with
    a good library."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if is_deed(event, arguments):
            seen += 1
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    entry = building.obtain([plan], BuildCache(cache))[0].require()
    os._exit(0 if b"answer" in entry.library.read_bytes() else 1)


def run(plan: BuildPlan, cache: Path, die_at: int = -1) -> str:
    """``done``, ``killed``, or what went wrong."""
    child = os.fork()
    if child == 0:
        try:
            build(plan, cache, die_at)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(2)
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return {0: "done", signal.SIGKILL: "killed"}.get(status, f"status {status}")
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def leftovers(cache: Path) -> list[str]:
    """What a sweep leaves of the dead build, once it is old enough to be swept."""
    for path in (cache / ".tmp").glob("*"):
        os.utime(path, (1, 1))
    with BuildCache(cache).workspace():
        pass
    return [str(path) for path in (cache / ".tmp").glob("*")]


def main() -> None:
    tempfile.gettempdir()  # tries TMPDIR with a file, which a child killed then would leave there
    plan, cache = tiny_plan(Path(request["folder"])), Path(request["cache"])
    wrong: list[str] = []
    place = 0
    while True:
        place += 1
        shutil.rmtree(cache, ignore_errors=True)
        first = run(plan, cache, place)
        if first == "done":
            break
        second = run(plan, cache)
        third = BuildCache(cache).lookup(plan)
        left = leftovers(cache)
        if (first, second) != ("killed", "done") or third is None or left:
            wrong.append(
                f"deed {place}: {first}, then {second}, {'found' if third else 'not found'}"
                f" afterwards, left: {left}"
            )
    print(json.dumps({"places": place - 1, "wrong": wrong}))


if __name__ == "__main__":
    main()
