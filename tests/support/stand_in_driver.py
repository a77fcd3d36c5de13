"""Processes that have ``tests/support/stand_in``'s libraries: a CUDA driver of our own, to which the
CPU's tensors are on a GPU."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from builds import REPOSITORY, child_environment
from processes import c_library, completed, printed

from flexops import settings
from flexops.toolchain.model import HostCompiler

_numbers = itertools.count()
SOURCES = REPOSITORY / "tests" / "support" / "stand_in"


class Launch(NamedTuple):
    symbol: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int
    gpu: int
    status: int


class Answer(NamedTuple):
    """What a program said, what the driver was asked for, and what went to standard error."""

    said: dict[str, Any]
    log: list[str]
    errors: str

    @property
    def launches(self) -> list[Launch]:
        pattern = (
            r"launch (\S+) grid (\d+) (\d+) (\d+) block (\d+) (\d+) shared (\d+) cluster (\d+) gpu"
            r" (\d+) status (\d+)"
        )
        found = (re.fullmatch(pattern, line) for line in self.log)
        numbers = ((one[1], [int(part) for part in one.groups()[1:]]) for one in found if one)
        return [Launch(symbol, (n[0], n[1], n[2]), n[3] * n[4], *n[5:]) for symbol, n in numbers]

    @property
    def loads(self) -> list[str]:
        return [line.removeprefix("load ") for line in self.log if line.startswith("load ")]


def build(folder: Path, compiler: HostCompiler) -> Path:
    """Compile the libraries into a folder."""
    for source, library in (
        ("libcuda.c", "libcuda.so.1"),
        ("libtorch_cuda.c", "libtorch_cuda.so"),
        ("libnvidia-ml.c", "libnvidia-ml.so.1"),
    ):
        flags = "-O1", f"-Wl,-soname,{library}"
        c_library(compiler.path, folder / library, SOURCES / source, *flags)
    return folder


def environment(folder: Path, **variables: str | None) -> dict[str, str]:
    """Of a process with the libraries; the driver's log is a new file, STAND_IN_LOG."""
    log = folder / f"log{next(_numbers)}"
    log.write_text("")
    known = {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / "libtorch_cuda.so"),
        "STAND_IN_LOG": str(log),
    }
    return child_environment(
        **{**known, "FLEXOPS_CACHE_DIR": str(settings.current().cache_dir), **variables}
    )


def run(folder: Path, program: str, *, prefix: tuple[str, ...] = (), **variables: str) -> Answer:
    """Run a program (see ``stand_in/launch.py``) with the libraries."""
    command = [str(SOURCES / "launch.py"), json.dumps({"program": program})]
    known = environment(folder, **variables)
    if prefix:
        done = completed([*prefix, sys.executable, *command], env=known)
        output, errors = done.stdout, done.stderr
    else:
        started = f"import runpy, sys; sys.argv = {command!r}"
        output, errors = printed(
            f"{started}; runpy.run_path(sys.argv[0], run_name='__main__')", known
        )
    return Answer(
        json.loads(output.splitlines()[-1]),
        Path(known["STAND_IN_LOG"]).read_text().splitlines(),
        errors,
    )
