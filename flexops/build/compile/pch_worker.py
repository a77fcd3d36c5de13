"""Precompiles one header, in a process of its own that may outlive the one that asked for it.

Standard library only: it is run by its path, so that it starts in no time.

    python -I pch_worker.py '{"command": [...], ...}'

It holds a lock that dies with it, builds in a private directory and renames it into place, so it
may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(order: dict[str, Any]) -> int:
    """Carry out one order, as ``pch.order`` writes it; the exit status is 0 if the header is there
    afterwards."""
    if order["own"]:
        os.umask(os.umask(0o077) | 0o022)  # what others could write to is not used
    final = Path(order["final"])
    with open(order["lock"], "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if order["wait"] else fcntl.LOCK_NB))
        except BlockingIOError:
            return 1  # another process is at it
        except OSError:
            pass  # no locks on this file system: the rename alone keeps entries whole
        return 0 if final.is_dir() else _build(order, final)


def _build(order: dict[str, Any], final: Path) -> int:
    workspace = Path(tempfile.mkdtemp(dir=order["workspaces"]))
    try:
        with open(workspace / order["owner_lock"], "w", encoding="utf-8") as owner:
            with contextlib.suppress(OSError):
                fcntl.flock(owner, fcntl.LOCK_EX)
            return _compile(order, workspace, final)
    except OSError:
        return 1  # no space, no rights: there simply is no precompiled header
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _compile(order: dict[str, Any], workspace: Path, final: Path) -> int:
    entry = workspace / "entry"
    entry.mkdir()
    (entry / order["header"]).write_text(order["text"], encoding="utf-8")
    try:
        result = subprocess.run(
            order["command"],
            cwd=entry,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _yield(order),
            timeout=order["timeout"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        result = subprocess.CompletedProcess(
            [], 1, f"took longer than {order['timeout']} s".encode()
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    product = entry / order["manifest"]["library"]
    if result.returncode != 0 or not product.exists():
        final.with_suffix(".failed").write_bytes(result.stdout)
        return 1
    manifest = {**order["manifest"], "size": product.stat().st_size}
    (entry / order["manifest_file"]).write_text(
        json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8"
    )
    for path in entry.iterdir():
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
    os.rename(entry, final)
    return 0


def _yield(order: dict[str, Any]) -> None:
    """Compiles that a process waits for go first."""
    if not order["wait"]:
        os.nice(19)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
