"""Finding ninja and the compiler launcher (ccache, sccache)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .context import Search, SearchContext, Step, run
from .model import Rejected, Tool

LAUNCHERS = ("ccache", "sccache")


def _ninja_package(context: SearchContext) -> Iterator[str]:
    # Older ninja wheels put a Python script into bin/ and the program here (their BIN_DIR); the
    # script costs a Python start.
    for site in context.site_dirs:
        if os.path.exists(path := f"{site}/ninja/data/bin/ninja"):
            yield path


def _ninja_environment(context: SearchContext) -> Iterator[str]:
    return _in_environment(context, "ninja")


def _ninja_path(context: SearchContext) -> Iterator[str]:
    return context.on_path("ninja")


NINJA_STEPS: tuple[Step, ...] = (
    Step("ninja package", "the ninja package's BIN_DIR", _ninja_package),
    Step("environment", "bin/ of the Python or conda environment", _ninja_environment),
    Step("PATH", "ninja on PATH", _ninja_path),
)


def find_ninja(context: SearchContext) -> Search[Tool]:
    """The first ninja that runs. The environment's own comes first: it is there even when PATH
    lacks it."""
    return _first(NINJA_STEPS, context, "ninja")


def find_launcher(context: SearchContext) -> Search[Tool]:
    """The launcher that was asked for, else ccache, else sccache; nothing when asked for
    ``none``."""
    wish = context.launcher
    if wish and wish.lower() == "none":
        return Search()
    if wish:
        step = Step(
            "FLEXOPS_COMPILER_LAUNCHER",
            f"{wish}, as FLEXOPS_COMPILER_LAUNCHER says",
            lambda inner: _wished(inner, wish),
        )
        return _first((step,), context, wish)
    rejected: tuple[Rejected, ...] = ()
    for name in LAUNCHERS:
        search = _first(_launcher_steps(name), context, name)
        rejected += search.rejected
        if search.usable:
            return Search(search.usable, rejected)
    return Search((), rejected, ("ccache and sccache (on PATH and in the environment's bin/)",))


def _launcher_steps(name: str) -> tuple[Step, ...]:
    return (
        Step("PATH", f"{name} on PATH", lambda context: context.on_path(name)),
        Step(
            "environment",
            "bin/ of the Python or conda environment",
            lambda context: _in_environment(context, name),
        ),
    )


def _wished(context: SearchContext, wish: str) -> Iterator[str]:
    if os.sep in wish:
        yield wish
        return
    directories = (
        *context.search_path,
        *(f"{prefix}/bin" for prefix in (context.prefix, context.conda_prefix) if prefix),
    )
    yield next(
        (
            path
            for path in (f"{directory}/{wish}" for directory in directories)
            if os.access(path, os.X_OK)
        ),
        wish,
    )


def _in_environment(context: SearchContext, name: str) -> Iterator[str]:
    for prefix in (context.prefix, context.conda_prefix):
        if prefix and os.path.exists(path := f"{prefix}/bin/{name}"):
            yield path


def _first(steps: tuple[Step, ...], context: SearchContext, kind: str) -> Search[Tool]:
    """Ask one after the other, and stop at the first that answers: nothing depends on the
    others."""
    rejected: list[Rejected] = []
    for step in steps:
        search = run(
            (step,), context, lambda path, inner: _read(path, inner, os.path.basename(kind))
        )
        rejected += search.rejected
        if search.usable:
            return Search(search.usable[:1], tuple(rejected))
    return Search((), tuple(rejected), tuple(f"{step.name} ({step.where})" for step in steps))


def _read(path: str, context: SearchContext, kind: str) -> Tool | Rejected:
    try:
        version, identity = context.ask(kind, path)
    except FileNotFoundError:
        return Rejected(kind, Path(path), "it is missing")
    except (OSError, ValueError) as error:
        return Rejected(kind, Path(path), str(error))
    return Tool(Path(path), version, identity)
