"""Finding C++ compilers. Which one is taken is decided in ``select``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from .context import Search, SearchContext, Step, run
from .model import HostCompiler, Rejected

_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")


def _cxx(context: SearchContext) -> Iterator[str]:
    """``CXX`` may be a path, a name on PATH, or either behind a launcher (``ccache g++``); options
    in it are not ours to apply."""
    words = [
        word
        for word in (context.cxx or "").split()
        if os.path.basename(word) not in _LAUNCHERS and not word.startswith("-")
    ]
    if not words:
        return
    name = words[0]
    if os.sep in name:
        yield name
        return
    yield next(
        (
            path
            for path in (f"{directory}/{name}" for directory in context.search_path)
            if os.access(path, os.X_OK)
        ),
        name,
    )


def _conda(context: SearchContext) -> Iterator[str]:
    if context.conda_prefix:
        directory = f"{context.conda_prefix}/bin"
        for name in context.listing(directory):
            if name == f"{context.machine}-conda-linux-gnu-c++":
                yield f"{directory}/{name}"


def _gcc(context: SearchContext) -> Iterator[str]:
    return context.on_path("g++", numbered=True)


def _clang(context: SearchContext) -> Iterator[str]:
    return context.on_path("clang++", numbered=True)


STEPS: tuple[Step, ...] = (
    Step("CXX", "the environment variable CXX", _cxx),
    Step("conda", "the active conda environment's c++", _conda),
    Step("g++ on PATH", "g++ and g++-N on PATH", _gcc),
    Step("clang++ on PATH", "clang++ and clang++-N on PATH", _clang),
)


def find(context: SearchContext) -> Search[HostCompiler]:
    """All C++ compilers here."""
    return run(STEPS, context, read)


def refused_wish(context: SearchContext, search: Search[HostCompiler]) -> str:
    """Why what ``CXX`` names is no compiler; empty if it is one, or nothing is named."""
    wished = [Path(path) for path in _cxx(context)]
    return next(
        (f"CXX={context.cxx}: {one.reason}" for one in search.rejected if one.path in wished), ""
    )


def read(path: str, context: SearchContext) -> HostCompiler | Rejected | None:
    """The compiler at ``path``, or why it cannot be used."""
    try:
        version, identity = context.ask("c++", path)
    except FileNotFoundError:
        return Rejected("C++ compiler", Path(path), "CXX names it, but it is missing")
    except (OSError, ValueError) as error:
        return Rejected("C++ compiler", Path(path), str(error))
    kind: Literal["gcc", "clang"] = "gcc" if identity.startswith("gcc") else "clang"
    return HostCompiler(Path(path), version, identity, kind)
