"""Children that were forked while a thread compiled: of what that thread held, nothing is held in them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from builds import child_environment, copy_csrc, start_child, watched_compiler

from flexops.toolchain.model import HostCompiler

SECONDS = 60.0


@pytest.mark.parametrize("how", ["os.fork", "starting", "process", "dataloader", "orphan"])
def test_a_child_forked_while_a_thread_compiles_gets_the_operator(tmp_path: Path, host_compiler: HostCompiler, how: str) -> None:
    watched = tmp_path / "watched"
    compiler = watched_compiler(watched, str(host_compiler.path))
    (watched / "hang-compile").touch()
    environment = child_environment(FLEXOPS_CACHE_DIR=str(tmp_path / "cache"), CXX=str(compiler), FLEXOPS_COMPILER_LAUNCHER="none", MAX_JOBS="1")
    request = {"csrc": str(copy_csrc(tmp_path)), "how": how, "watched": str(watched), "answer": str(tmp_path / "answer.json")}
    process = start_child("fork.py", request, environment, start_new_session=True)
    try:
        until = time.monotonic() + SECONDS
        while not (tmp_path / "answer.json").exists():
            assert time.monotonic() < until, "the child hangs"
            time.sleep(0.05)
        assert process.wait(SECONDS) == (-signal.SIGKILL if how == "orphan" else 0)
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert (answer["values"], answer["backend"]) == ([1.0, 4.0, 9.0], "jit")
        assert answer["pid"] != process.pid
    finally:
        (watched / "hang-compile").unlink(missing_ok=True)
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """The process and what it forked, which is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
