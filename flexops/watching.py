"""Runs a command again whenever a source changes: ``flexops watch``.

pytest, and Python programs, run in a process that has imported torch already, and what else the
last run imported (``watching_child.py``): after an edit of device code there is then a result in
about a second. Everything else is started as usual.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import FlexopsError
from .toolchain import proc

SUFFIXES = frozenset({".cuh", ".cu", ".h", ".hpp", ".c", ".cc", ".cpp", ".cxx", ".py", ".toml"})
POLL_SECONDS = 0.1
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules"})
_PACKAGE = Path(__file__).parent
_CHILD = _PACKAGE / "watching_child.py"

State = dict[str, tuple[int, int]]


class Run(NamedTuple):
    """One run of the command: its exit status, its seconds, and the metric's number if it printed
    one."""

    status: int
    seconds: float
    metric: float | None = None


def snapshot(paths: Sequence[Path]) -> State:
    """Date and size of each source in these files and directories."""
    return {path: (status.st_mtime_ns, status.st_size) for path, status in _sources(paths)}


def _sources(paths: Sequence[Path]) -> Iterator[tuple[str, os.stat_result]]:
    for path in paths:
        try:
            if path.is_dir():
                with os.scandir(path) as scan:
                    inner = [
                        Path(one.path)
                        for one in scan
                        if one.name not in _SKIPPED
                        and not one.name.startswith(".")
                        and not one.is_symlink()
                    ]
                yield from _sources(
                    [one for one in inner if one.suffix in SUFFIXES or one.is_dir()]
                )
            else:
                yield str(path), path.stat()
        except OSError:  # an editor replaces a file in two steps
            continue


def changed(before: State, after: State) -> list[str]:
    """The files that came, went or are others."""
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


def line(run: Run, last: Run | None, files: Sequence[str]) -> str:
    """What came of a run, on one line, with the change from the last one."""
    what = "passed" if run.status == 0 else f"failed ({run.status})"
    parts = [f"{what} in {run.seconds:.2f} s"]
    if last and last.status == 0 == run.status:
        parts.append(f"before {last.seconds:.2f} s")
    if run.metric is not None:
        compared = f" ({run.metric / last.metric - 1:+.1%})" if last and last.metric else ""
        parts.append(f"{run.metric:g}{compared}")
    shown = ", ".join(Path(file).name for file in files[:3]) + (
        f" and {len(files) - 3} more" if len(files) > 3 else ""
    )
    return "; ".join(parts) + (f"   [{shown}]" if shown else "")


class Runner:
    """Runs a command; what it prints goes to ``output`` as it comes.

    Args:
        metric: a regular expression whose group is a number; the last one in the output counts.
    """

    def __init__(self, command: Sequence[str], *, metric: str = "") -> None:
        if not command:
            raise FlexopsError(
                "there is nothing to run",
                required="a command behind --",
                fix="flexops watch csrc/scale -- pytest -k scale",
            )
        self.command = list(command)
        try:
            self._metric = re.compile(metric) if metric else None
        except re.error as error:
            raise FlexopsError(
                "--metric is no regular expression",
                found=f"{metric}: {error}",
                required=r"such as '([\d.]+) GB/s'",
            ) from None
        if self._metric and self._metric.groups != 1:
            raise FlexopsError(
                "--metric has no one group for the number",
                found=metric,
                required=r"such as '([\d.]+) GB/s'",
            )
        self._warm: proc.Process | None = None
        self._modules = tempfile.TemporaryFile()  # noqa: SIM115  what the last run imported
        self._flexops: State = {}

    @property
    def is_python(self) -> bool:
        return Path(self.command[0]).name in (
            "pytest",
            "py.test",
            "python",
            "python3",
        ) and self.command[1:2] != ["-c"]

    def run(self, paths: Sequence[Path], before: State) -> Run | None:
        """The result; None if a source changed meanwhile, and the run was stopped."""
        started = time.monotonic()
        process = self._start()
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        said = bytearray()
        try:
            while (status := self._status(process, said)) is None:
                if changed(before, snapshot(paths)):
                    self.stop()
                    return None
                time.sleep(POLL_SECONDS / 5)
        except BaseException:
            self.stop()
            raise
        return Run(status, time.monotonic() - started, self._number(said.decode(errors="replace")))

    def warm_up(self) -> None:
        """Have torch imported before the next run needs it."""
        if self.is_python and (self._warm is None or self._warm.poll() is not None):
            modules, self._flexops = self._modules.fileno(), snapshot([_PACKAGE])
            command = [sys.executable, str(_CHILD), str(modules)]
            self._warm = proc.start(command, stdin=proc.PIPE, inherited=(modules,))

    def stop(self) -> None:
        """End what runs, and whatever it started."""
        if self._warm:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._warm.pid, 9)
            self._warm.wait()
            self._warm = None

    def _start(self) -> proc.Process:
        if self.is_python:
            # it has the code of before
            if self._warm and changed(self._flexops, snapshot([_PACKAGE])):
                self.stop()
            self.warm_up()
            assert self._warm is not None
            assert self._warm.stdin is not None
            self._warm.stdin.write(json.dumps(self.command).encode() + b"\n")
            self._warm.stdin.close()
        else:
            try:
                self._warm = proc.start(self.command)
            except OSError as error:
                raise FlexopsError(
                    f"{self.command[0]} cannot be run",
                    found=error.strerror or str(error),
                    required="a program",
                ) from None
        return self._warm

    def _status(self, process: proc.Process, said: bytearray) -> int | None:
        """The exit status once it has ended; what it printed meanwhile is passed on."""
        assert process.stdout is not None
        status = process.poll()
        while piece := process.stdout.read(1 << 16):
            said += piece
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
        if status is not None:
            process.stdout.close()
            self._warm = None
        return status

    def _number(self, text: str) -> float | None:
        found = self._metric.findall(text) if self._metric else []
        try:
            return float(found[-1].replace(",", "")) if found else None
        except ValueError:
            return None
