"""Programs whose output goes to a log as it comes, and the children of this package."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexops import _json
from flexops.errors import ChannelError

from .. import with_extra

OnLine = Callable[[str], None]
BINDINGS = {"rattler_build": "py-rattler-build", "rattler": "py-rattler", "zstandard": "zstandard"}


def logged(
    command: Sequence[str],
    log: Path | None,
    on_line: OnLine,
    *,
    request: str = "",
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``command``; every line of its output goes to ``log`` (kept whole) and to ``on_line``.
    Returns its exit code.

    Raises:
        OSError: it cannot be started, or the log cannot be written.
    """
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    with open(log or os.devnull, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request)
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_line(line.rstrip("\n"))
            return process.wait()
        except BaseException:  # Ctrl-C: what it started must not build on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


def child(
    action: str,
    request: Mapping[str, Any],
    *,
    log: Path | None = None,
    on_line: OnLine = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Do ``action`` of ``child`` in a process of its own; returns its answer.

    Raises:
        ChannelError: the bindings are missing, the process died, or the action failed: ``found`` is
            what it said, ``what`` is for the caller to better.
    """
    missing = [
        package for module, package in BINDINGS.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ChannelError(
            "the tools that make conda packages are not installed",
            found=f"no {', '.join(missing)}",
            fix=with_extra("conda"),
        )
    with tempfile.TemporaryDirectory(prefix="flexops-channel-") as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", f"{__package__}.child"]
        text = json.dumps({**request, "action": action, "answer": str(answer)})
        code = logged(
            command,
            log,
            on_line,
            request=text,
            environment={**_import_path(), **(environment or {})},
        )
        try:
            reply: dict[str, Any] = _json.load(answer)
        except (OSError, ValueError):
            died = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited {code} without an answer"
            )
            raise ChannelError(f"{action} {died}", fix="flexops doctor", log=log) from None
    if "error" in reply:
        raise ChannelError(f"{action} failed", found=reply["error"], log=log)
    return reply


def last_lines(output: str, count: int = 12) -> str:
    """The end of ``output``, blank lines left out."""
    return "\n    ".join([line.strip() for line in output.splitlines() if line.strip()][-count:])


def _import_path() -> dict[str, str]:
    """The child imports this very flexops, also from a checkout that is not installed."""
    home = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))}
