"""Where a search looks: explicit values, so that a test can search a tree of its own."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from .memo import Memo
from .model import Found, Rejected, Version
from .probe import Probe, probe

T = TypeVar("T")

_INTERESTING = (
    r"(?:.*-)?(?:g\+\+|clang\+\+|c\+\+)(?:-\d+)?|nvcc|hipcc|ninja|ccache|sccache|cu\d+|cuda_nvcc"
    r"|cuda(?:-[\d.]+)?|rocm(?:-[\d.]+)?"
)
_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc", "icecream")


class SearchContext(NamedTuple):
    """Everything a find step may look at.

    Attributes:
        search_path: the directories of ``PATH``, absolute ones.
        site_dirs: directories that hold Python packages, first come, first taken.
        prefix: the Python environment, which has a ``bin/``.
        conda_prefix: the conda environment, if one is active.
        cuda_home, rocm_home, cxx: the user's explicit wishes.
        launcher: likewise; ``none`` for no launcher.
        image: the row whose image this runs in, if any.
        root: prefixed to the system's own directories (``/usr/local``, ``/opt``, ``/usr``); empty
            on a real machine.
        memo: what earlier searches learned.
        probe: asks an executable for its version and identity.
        listings: directories read so far in this search, if they are to be remembered.
    """

    search_path: tuple[str, ...] = ()
    site_dirs: tuple[str, ...] = ()
    prefix: str = ""
    conda_prefix: str | None = None
    cuda_home: str | None = None
    rocm_home: str | None = None
    cxx: str | None = None
    launcher: str | None = None
    image: str = ""
    root: str = ""
    machine: str = "x86_64"
    memo: Memo | None = None
    probe: Probe = probe
    listings: dict[str, list[str]] | None = None

    def listing(self, directory: str) -> list[str]:
        """Those names in a directory that a search could want, sorted; empty for one that is not
        there."""
        known = self.listings if self.listings is not None else {}
        if directory not in known:
            try:
                known[directory] = (
                    self.memo.recall("directories", directory, _list)
                    if self.memo
                    else _list(directory)
                )
            except OSError:
                known[directory] = []
        return known[directory]

    def on_path(self, wanted: str, *, numbered: bool = False) -> Iterator[str]:
        """Executables on ``PATH`` with that name (``numbered``: or ``name-12``), in its order."""
        for directory in self.search_path:
            for name in self.listing(directory):
                if name == wanted or (
                    numbered and name.startswith(f"{wanted}-") and name[len(wanted) + 1 :].isdigit()
                ):
                    yield f"{directory}/{name}"

    def ask(self, kind: str, path: str) -> tuple[Version, str]:
        """Version and identity of an executable; raises ``OSError`` or ``ValueError`` when it
        cannot be had, saying why."""
        seen = os.stat(path)
        if not stat.S_ISREG(seen.st_mode) or not os.access(path, os.X_OK):
            raise PermissionError(f"{path} is not executable")
        if self.memo is None:
            answer = self._ask(kind, path)
        else:
            answer = self.memo.recall(
                f"tool:{kind}", path, lambda asked: self._ask(kind, asked), seen
            )
        return Version(tuple(answer[0])), answer[1]

    def _ask(self, kind: str, path: str) -> list[Any]:
        # Debian's /usr/lib/ccache/g++ is ccache under another name: it would be taken for a
        # compiler and cache what is cached already.
        if kind not in _LAUNCHERS and os.path.basename(os.path.realpath(path)) in _LAUNCHERS:
            raise ValueError("a compiler launcher under a compiler's name")
        version, identity = self.probe(kind, path)
        return [list(version.parts), identity]


class Step(NamedTuple):
    """One place to look. Steps are tried in the order of the tuple that holds them.

    Attributes:
        name: recorded as ``found_via``.
        where: for the message when nothing was found.
        find: yields what may be there; whether it is any good is judged later.
    """

    name: str
    where: str
    find: Callable[[SearchContext], Iterator[str]]

    def __call__(self, context: SearchContext) -> Iterator[Found[str]]:
        return (Found(value, self.name) for value in self.find(context))


class Search(Generic[T]):
    """What a search came to: things that are usable, in the order found, things that are not, and
    where it looked."""

    def __init__(
        self,
        usable: tuple[Found[T], ...] = (),
        rejected: tuple[Rejected, ...] = (),
        tried: tuple[str, ...] = (),
    ) -> None:
        self.usable = usable
        self.rejected = rejected
        self.tried = tried


def run(
    steps: tuple[Step, ...],
    context: SearchContext,
    read: Callable[[str, SearchContext], T | Rejected | None],
) -> Search[T]:
    """Walk the steps and read what each yields: ``read`` returns the thing, why it is unusable, or
    None when nothing is there.

    One thing reached twice (``/usr/local/cuda`` is a link to ``/usr/local/cuda-13.0``, ``/bin`` to
    ``/usr/bin``) counts once.
    """
    usable: list[Found[T]] = []
    rejected: list[Rejected] = []
    known: set[tuple[int, int]] = set()
    for step in steps:
        for found in step(context):
            if not _is_new(found.value, known):
                continue
            outcome = read(found.value, context)
            if isinstance(outcome, Rejected):
                rejected.append(outcome)
            elif outcome is not None:
                usable.append(Found(outcome, found.found_via))
    return Search(
        tuple(usable), tuple(rejected), tuple(f"{step.name} ({step.where})" for step in steps)
    )


def _is_new(path: str, known: set[tuple[int, int]]) -> bool:
    try:
        seen = os.stat(path)
    except OSError:
        return True  # ``read`` says whether a missing thing is worth a word
    identity = (seen.st_dev, seen.st_ino)
    if identity in known:
        return False
    known.add(identity)
    return True


def _list(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if re.fullmatch(_INTERESTING, name))
