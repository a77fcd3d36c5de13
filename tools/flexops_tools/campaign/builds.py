"""The parts that build something small over and over: kills, crowds, flips, forks and headers.

A build is one compile and one link of two lines of C++, whose ``answer()`` is a number of the
round's own: an old library, or a torn one, gives itself away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from builds import tiny_plan

from flexops import _fork, settings, toolchain
from flexops.build.compile import building
from flexops.build.load import loader
from flexops.build.plan.plan import BuildPlan
from flexops.build.store import cache_archive
from flexops.build.store.cache import BuildCache
from flexops.errors import CacheError

from .frame import Child, Fault, World, descendants, end, kill, program, run, start

LINKERS = ("ld", "collect2", "ld.bfd", "ld.gold", "ld.lld")
_KILLS = ("tree", "parent", "one child", "ninja", "linker")
_WRITTEN_BY_FLEXOPS = (CacheError.__name__, "CompileError")


def plan_of(folder: Path, number: int) -> BuildPlan:
    """A build whose library answers ``number``."""
    return tiny_plan(folder, header=f"inline int answer_of_header() {{ return {number}; }}\n")


def obtain(plan: BuildPlan, cache: BuildCache) -> int:
    """What the library says that flexops gives for a plan; in a child, because a process opens a
    path once."""
    entry = building.obtain([plan], cache)[0].require()
    return int(ctypes.CDLL(str(entry.library)).answer())


def expect(said: dict[str, Any], number: int, *, errors: bool = False, died: bool = False) -> None:
    """Raise ``Fault`` unless that was the answer, or (if allowed) an error of flexops or a violent
    end."""
    if said.get("value") == number or (died and "killed" in said):
        return
    if errors and said.get("kind") in _WRITTEN_BY_FLEXOPS:
        return
    raise Fault("wrong result", f"{said} instead of {number}")


# ---- kills ----


def kills(world: World) -> None:
    """A build is killed at a random moment, as a whole or in part; the next one must be right."""
    cache = BuildCache(world.folder / "cache", max_bytes=2**20)
    usual = min(_time_of_one(world, cache, -number) for number in range(1, 4))
    for number in world.each():
        how = _KILLS[number % len(_KILLS)]
        world.guarded(
            partial(_kill_one, world, cache, number + 2, how, usual),
            f"round {number}, {how}",
        )


def _time_of_one(world: World, cache: BuildCache, number: int) -> float:
    plan = plan_of(world.folder / "tiny", number)
    began = time.monotonic()
    expect(run(lambda: obtain(plan, cache)), number)
    return time.monotonic() - began


def _kill_one(world: World, cache: BuildCache, number: int, how: str, usual: float) -> None:
    plan = plan_of(world.folder / "tiny", number)
    victim = start(lambda: obtain(plan, cache))
    below: list[int] = []
    try:
        hit = _strike(victim, how, world.dice.random() * usual, world, below)
        world.tally.count(f"{how}: {hit}")
        expect(victim.wait(), number, errors=True, died=True)
        expect(run(lambda: obtain(plan, cache)), number)
    finally:
        for pid in below:
            kill(pid)


def _strike(victim: Child, how: str, after: float, world: World, below: list[int]) -> str:
    """Kill what ``how`` says after so many seconds; returns what it was."""
    until = time.monotonic() + (after if how != "linker" else 10 * after + 1)
    while time.monotonic() < until:
        if how == "linker":
            linkers = [pid for pid in descendants(victim.pid) if program(pid) in LINKERS]
            if linkers and all(map(kill, linkers[-1:])):
                return "linking"
            if os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        time.sleep(0.0005)
    found = descendants(victim.pid)
    below += [] if how == "tree" else found
    phase = next((program(pid) for pid in reversed(found)), "") or "before or after ninja"
    chosen = {
        "tree": [victim.pid, *found],
        "parent": [victim.pid],
        "one child": [world.dice.choice(found)] if found else [],
        "ninja": [pid for pid in found if program(pid) == "ninja"],
    }.get(how, [])
    return phase if any(kill(pid) for pid in chosen) else "nothing there"


def crowd(world: World) -> None:
    """32 processes request the same entry of one cache, and some of them are killed."""
    for number in world.each():
        world.guarded(partial(_crowd_one, world, number + 1), f"round {number}")


def _crowd_one(world: World, number: int) -> None:
    cache = BuildCache(world.folder / f"cache-{number}")
    plan = plan_of(world.folder / "tiny", number)
    children = [start(lambda: obtain(plan, cache)) for _ in range(32)]
    for child in world.dice.sample(children, 3):
        time.sleep(world.dice.random() * 0.1)
        world.tally.count("killed" if kill(child.pid) else "had ended")
    faults = []
    for child in children:
        try:
            expect(child.wait(), number, died=True)
        except Fault as fault:
            faults.append(fault)
    shutil.rmtree(cache.root, ignore_errors=True)
    if faults:
        raise faults[0]


# ---- bits ----


def flips(world: World) -> None:
    """One bit of one file that flexops reads is flipped; what is got afterwards is right, or built
    again."""
    plan = plan_of(world.folder / "tiny", 7)
    pristine = world.folder / "pristine"
    expect(run(lambda: obtain(plan, BuildCache(pristine))), 7)
    tools = run(lambda: _tools(pristine))["value"]
    cache_archive.export(BuildCache(pristine), world.folder / "cache.tar.gz")
    shutil.copy(world.folder / "cache.tar.gz", pristine / "cache.tar.gz")
    for number in world.each():
        world.guarded(lambda: _flip_one(world, plan, pristine, tools), f"round {number}")


def _tools(root: Path) -> str:
    chosen = settings.Settings.from_environ(
        {"PATH": os.environ["PATH"], "FLEXOPS_CACHE_DIR": str(root)}
    )
    toolchain.memo.for_cache_dir.cache_clear()
    return str(toolchain.discover(chosen, device="cpu"))


def _flip_one(world: World, plan: BuildPlan, pristine: Path, tools: str) -> None:
    root = world.folder / "flipped"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pristine, root)
    files = {
        "library": next(root.glob("*/*/*.so")),
        "manifest": next(root.glob("*/*/manifest.json")),
        "headers": next(root.glob("*/*.headers.json")),
        "tools": root / "tools.json",
        "archive": root / "cache.tar.gz",
    }
    which = world.dice.choice(sorted(files))
    path = files[which]
    content = bytearray(path.read_bytes())
    bit = world.dice.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    if which == "tools":
        if run(lambda: _tools(root)).get("value") != tools:
            raise Fault("wrong result", f"bit {bit} of {which}: other tools")
    elif which == "archive":
        said = run(lambda: _imported(plan, root / "new", path))
        world.tally.count(f"archive: {'refused' if 'error' in said else 'whole'}")
        expect(said, 7, errors=True)
    else:
        before = next(root.glob("*/*/*.so")).stat().st_ino
        expect(run(lambda: obtain(plan, BuildCache(root))), 7)
        kept = next(root.glob("tiny-cpu/*/*.so")).stat().st_ino == before
        world.tally.count(f"{which}: {'as it was' if kept else 'built again'}")


def _imported(plan: BuildPlan, root: Path, archive: Path) -> int:
    """What an import serves; nothing may have to be built for it."""
    cache = BuildCache(root)
    cache_archive.import_archive(cache, archive)
    entry = next(cache.candidates(plan.name), None)
    if entry is None:
        raise CacheError("nothing was imported")
    verified, _ = cache.verified(entry)
    return int(ctypes.CDLL(str(verified.library)).answer()) if verified else -1


# ---- forks ----


def forks(world: World) -> None:
    """A process forks at a random moment while a thread of it compiles what the child asks for,
    too."""
    cache = BuildCache(world.folder / "cache")
    for number in world.each():
        world.guarded(partial(_fork_one, world, cache, number + 1), f"round {number}")


def _fork_one(world: World, cache: BuildCache, number: int) -> None:
    plan = plan_of(world.folder / "tiny", number)
    pause, orphaned = world.dice.random() * 0.3, world.dice.random() < 0.3
    answer = world.folder / "answer"
    answer.unlink(missing_ok=True)

    def resolve(*_: object) -> loader.OpStatus:
        with _fork.allowed():  # as the loader does where it compiles
            return loader.OpStatus("adam", "cpu", "jit", str(obtain(plan, cache)))

    def asked() -> int:
        loader.ensure("adam", "cpu")
        return int(
            next(
                status.reason
                for status in loader.status()
                if (status.op, status.device) == ("adam", "cpu")
            )
        )

    def work() -> int:
        loader._resolve = resolve  # type: ignore[assignment]
        thread = threading.Thread(target=asked, daemon=True)
        thread.start()
        time.sleep(pause)
        child = os.fork()
        if child == 0:
            answer.with_suffix(".draft").write_text(str(asked()))
            answer.with_suffix(".draft").rename(answer)
            os._exit(0)
        if orphaned:
            return child
        os.waitpid(child, 0)
        return child

    parent = start(work)
    child = 0
    try:
        child = parent.wait()["value"]
        until = time.monotonic() + 60
        while not answer.exists():
            if time.monotonic() > until:
                raise Fault("hang", "a forked child")
            time.sleep(0.005)
        expect({"value": int(answer.read_text())}, number)
        world.tally.count("orphaned" if orphaned else "waited for")
    finally:
        if child and not answer.exists():
            end(child)


# ---- headers ----


_SWAPS = ("cp -p", "mv", "mv of the folder", "a date in the future", "there and back")


def headers(world: World) -> None:
    """A header is replaced at a random moment of its compile; what is built next answers as it
    says.
    """
    cache = BuildCache(world.folder / "cache", max_bytes=2**20)
    usual = min(_time_of_one(world, cache, -number) for number in range(1, 4))
    for number in world.each():
        how = _SWAPS[number % len(_SWAPS)]
        world.guarded(
            lambda number=number, how=how: _header_one(world, cache, 2 * number + 2, how, usual),  # type: ignore[misc]
            f"round {number}, {how}",
        )


def _header_one(world: World, cache: BuildCache, number: int, how: str, usual: float) -> None:
    folder = world.folder / "swapped"
    shutil.rmtree(folder, ignore_errors=True)
    plan = plan_of(folder, number)
    include, after = folder / "include", folder / "after"
    for place, answered in ((include, number), (after, number + 1)):
        place.mkdir()
        text = f"inline int answer_of_header() {{ return {answered}; }}\n"
        (place / "tiny.h").write_text(text)
        os.utime(place / "tiny.h", (1e9, 1e9))  # older than any build, and one date for both
    (folder / "tiny.h").unlink()
    compile_, link = plan.steps
    compiler, *arguments = compile_.command
    compile_ = compile_._replace(command=(compiler, f"-I{include}", *arguments))
    plan = plan._replace(steps=(compile_, link))
    during = start(lambda: obtain(plan, cache))
    time.sleep(world.dice.random() * usual)
    _swap(how, include, after, world.dice.random() * usual / 2)
    said = during.wait()
    # a copy is not atomic: the compiler may read half a header
    told = "changed while" in said.get("error", "") or said.get("kind") == "CompileError"
    world.tally.count(f"{how}: {'told' if told else said.get('value', number) - number}")
    right = number + (how != "there and back")
    if not told and said.get("value") not in (number, number + 1):
        expect(said, right)
    expect(run(lambda: obtain(plan, cache)), right)
    shutil.rmtree(cache.root / plan.name, ignore_errors=True)


def _swap(how: str, include: Path, after: Path, pause: float) -> None:
    """Put the header of ``after`` in the place of that in ``include``."""
    header = include / "tiny.h"
    if how == "mv of the folder":
        include.rename(include.with_name("before"))
        after.rename(include)
    elif how == "there and back":
        shutil.copy2(header, include / "kept")
        shutil.copy2(after / "tiny.h", header)
        time.sleep(pause)
        shutil.copy2(include / "kept", header)
    elif how == "mv":
        (after / "tiny.h").rename(header)
    else:
        shutil.copy2(after / "tiny.h", header)
        if how == "a date in the future":
            os.utime(header, (time.time() + 3600,) * 2)


PARTS: dict[str, tuple[Callable[[World], None], float]] = {
    "kills": (kills, 1),
    "crowd": (crowd, 0.02),
    "flips": (flips, 1),
    "fork": (forks, 0.2),
    "headers": (headers, 0.2),
}
"""Each part, and how many of its rounds there are to one kill."""
