"""Python in another process, where a torch that crashes or hangs does no harm.

The child says what it has to say as JSON lines that start with ``MARK``; anything else on its
output is noise, of which the end is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..toolchain import proc

MARK = "@flexops-doctor "


@dataclass(frozen=True)
class Child:
    """How a child ended. ``returncode`` is None when it was stopped because it took too long,
    negative for a signal."""

    returncode: int | None
    messages: tuple[dict[str, Any], ...]
    noise: str

    @property
    def failure(self) -> str:
        """How it died, in words; empty if it ended well."""
        if self.returncode is None:
            return "gave no answer in time"
        if self.returncode < 0:
            return f"was killed by {proc.signal_name(-self.returncode)}"
        return "" if self.returncode == 0 else f"exited {self.returncode}: {self.last_line}"

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.noise.splitlines() if line.strip()]
        return lines[-1][:400] if lines else ""


def say(message: dict[str, Any]) -> None:
    """In a child: report to the parent."""
    sys.stdout.write(MARK + json.dumps(message) + "\n")
    sys.stdout.flush()


def run(
    arguments: Sequence[str],
    *,
    timeout: float,
    environment: dict[str, str] | None = None,
    without: Collection[str] = (),
) -> Child:
    """Run this Python with ``arguments``, and without some variables of this process; its own
    children are stopped with it. Raises ``OSError`` if it cannot be started."""
    own = {name: value for name, value in os.environ.items() if name not in without}
    done = proc.run(
        [sys.executable, *arguments],
        seconds=timeout,
        environment={**own, **_import_path(), **(environment or {})},
    )
    return _read(done.status, done.output)


def _read(returncode: int | None, output: str) -> Child:
    messages, noise = [], []
    for line in output.splitlines():
        before, mark, message = line.partition(MARK)  # noise without a newline may precede it
        if mark:
            with contextlib.suppress(ValueError):  # a child that died while writing
                messages.append(json.loads(message))
        if not mark or before:
            noise.append(before)
    return Child(returncode, tuple(messages), "\n".join(noise))


def _import_path() -> dict[str, str]:
    """The child imports this very flexops, also from a checkout that is not installed, and nothing
    by accident from the working directory."""
    home = Path(__file__).resolve().parents[2]
    safe = {"PYTHONSAFEPATH": "1"}
    if home.name in ("site-packages", "dist-packages"):
        return safe
    return {
        **safe,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH")))),
    }
