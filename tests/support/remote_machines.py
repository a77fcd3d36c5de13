"""Machines, and remote caches that end with a test: the fixtures of the tests of the remote
cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import remote_stores as stores
from builds import runs, tiny_plan, watched_compiler

from flexops import settings
from flexops.build.compile import building
from flexops.build.plan.plan import BuildPlan
from flexops.build.store import remote
from flexops.build.store.cache import BuildCache, Entry
from flexops.build.store.remote import Remote

Open = Callable[..., Remote]


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with stores.s3() as address:
        yield address


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no slow store: a healthy one is not given up, and one that was given up is
    not asked again during the test."""
    monkeypatch.setattr(remote, "_QUICK_SECONDS", 600.0)
    monkeypatch.setattr(remote, "_START_SECONDS", 600.0)
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 1e6)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, patient: None) -> Iterator[Open]:  # noqa: ARG001
    """``opened(url, write=True)``: a remote cache whose worker ends with the test. The limit of
    its requests is one that no machine exceeds."""
    made: list[Remote] = []

    def open_one(url: str, *, write: bool = True, limit: float = 300.0) -> Remote:
        made.append(Remote(url, write=write, limit=limit))
        return made[-1]

    for name, value in stores.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield open_one
    for one in made:
        if one._worker:
            one._worker.stop()


@pytest.fixture
def bad(opened: Open, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.BadStore]:
    assert opened, "which sets the credentials"
    server = stores.BadStore()
    with stores.served(server) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield server


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """``wait(seconds)``: how long other machines are waited for."""

    def change(seconds: int) -> None:
        monkeypatch.setenv("FLEXOPS_COMPILE_WAIT", str(seconds))
        settings.current.cache_clear()

    change(0)
    yield change
    monkeypatch.undo()
    settings.current.cache_clear()


class Machines:
    """Machines with a cache each, the same sources, and a compiler that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiler = str(watched_compiler(folder / "compiler", "g++"))

    def plan(self, name: str = "tiny-cpu") -> BuildPlan:
        return tiny_plan(self.folder / f"sources-{name}", name=name, compiler=self.compiler)

    def cache(self, name: str, there: Remote | None, **options: Any) -> BuildCache:
        return BuildCache(self.folder / "caches" / name, remote=there, **options)

    def obtain(
        self, name: str, there: Remote | None, plan: BuildPlan | None = None, **options: Any
    ) -> Entry:
        return building.obtain([plan or self.plan()], self.cache(name, there, **options))[
            0
        ].require()

    @property
    def compiled(self) -> int:
        return runs(self.folder / "compiler").count("link")


@pytest.fixture
def machines(tmp_path: Path, host_compiler: Any) -> Machines:
    assert host_compiler
    return Machines(tmp_path)


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``in_step(count)``: so many machines look for a claim before one of them puts its own, and
    all have put theirs before one reads its own again: the pause is long enough on any machine."""

    def change(count: int) -> None:
        looked, put = (threading.Barrier(count, timeout=600) for _ in range(2))
        came: set[tuple[threading.Barrier, Remote]] = set()
        hint, claim_ = Remote.hint, Remote.claim

        def meet(there: Remote, barrier: threading.Barrier) -> None:
            if (barrier, there) not in came:
                came.add((barrier, there))
                barrier.wait()

        def look(self: Remote, *arguments: Any) -> Any:
            found = hint(self, *arguments)
            if "claim" in arguments:
                meet(self, looked)
            return found

        def take(self: Remote, *arguments: Any, **options: Any) -> bool | None:
            made = claim_(self, *arguments, **options)
            meet(self, put)  # one that found another's claim just before its put does not pause
            return made

        monkeypatch.setattr(Remote, "hint", look)
        monkeypatch.setattr(Remote, "claim", take)
        monkeypatch.setattr(Remote, "_settle", lambda self, _spent: meet(self, put))

    return change


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    """What ``call(0)``, ``call(1)``, ... return, each in a thread of its own."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def claim(there: Remote, machines: Machines, **value: Any) -> None:
    plan = machines.plan()
    assert there.leave(
        machines.cache("other", there),
        plan.name,
        building._digest(plan),
        "claim",
        value,
        replace="",
    )
