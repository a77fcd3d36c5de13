"""Processes that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
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


def c_library(compiler: Path, library: Path, source: object, *flags: str) -> Path:
    """Compile C into a shared library."""
    completed([compiler, *["-x", "c", "-shared", "-fPIC"], *flags, "-o", library, source])
    return library
