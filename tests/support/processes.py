"""Processes that tests run to their end."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def completed(
    command: Sequence[object], *, code: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The process with its output as text. The test fails if it exits with another code than
    ``code`` (None: any), or takes an hour. ``options``: as of ``subprocess.run``."""
    options = {"timeout": 3600, "check": False, **options}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert code is None or done.returncode == code, (
        f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    )
    return done


def printed(code: str, environment: Mapping[str, str], cwd: Path | None = None) -> tuple[str, str]:
    """What ``python -c`` prints, to standard output and to standard error, where torch is imported
    already (see ``children/forks.py``). The test fails if the program does. Not for programs whose
    import of torch is tested, or that a variable of Python's is for."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("output", "errors")]
        place = {"environment": dict(environment), "cwd": str(cwd or os.getcwd()), "files": files}
        forks = _forks(*(environment.get(name, "") for name in _LOADER))
        assert forks.stdin
        assert forks.stdout
        print(json.dumps({"code": code, **place}), file=forks.stdin, flush=True)
        status = int(forks.stdout.readline())
        output, errors = (Path(file).read_text() for file in files)
    assert status == 0, f"exit code {status}: {output}{errors}"
    return output, errors


_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


@functools.cache
def _forks(*loader: str) -> subprocess.Popen[str]:
    """It ends with this process, whose end of the pipe it reads."""
    script = Path(__file__).with_name("children") / "forks.py"
    environment = {**os.environ, **dict(zip(_LOADER, loader, strict=True))}
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, script], env=environment, **streams)


def c_library(compiler: Path, library: Path, source: object, *flags: str) -> Path:
    """Compile C into a shared library."""
    completed([compiler, *["-x", "c", "-shared", "-fPIC"], *flags, "-o", library, source])
    return library
