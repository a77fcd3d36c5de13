"""Children that were forked while a thread compiled: of what that thread held, nothing is held in
them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from builds import child_environment, copy_csrc, start_child, watched_compiler
from marks import first_of

SECONDS = 600.0


@pytest.mark.parametrize("how", first_of("os.fork", "starting", "process", "dataloader", "orphan"))
def test_a_child_forked_while_a_thread_compiles_gets_the_operator(tmp_path, host_compiler, how):
    watched = tmp_path / "watched"
    compiler = watched_compiler(watched, str(host_compiler.path))
    (watched / "hang-compile").touch()
    environment = child_environment(
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        CXX=str(compiler),
        FLEXOPS_COMPILER_LAUNCHER="none",
        MAX_JOBS="1",
    )
    request = {
        "csrc": str(copy_csrc(tmp_path)),
        "how": how,
        "watched": str(watched),
        "answer": str(tmp_path / "answer.json"),
    }
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


READS = """
import os, pathlib, sys, threading
from flexops.build.describe.spec import OpSpec
reading, go_on, listed = threading.Event(), threading.Event(), pathlib.Path.iterdir
def slowly(path):
    if threading.current_thread() is not threading.main_thread():
        reading.set()
        go_on.wait()
    return listed(path)
pathlib.Path.iterdir = slowly
threading.Thread(target=lambda: OpSpec("rope").cpu_sources).start()
reading.wait()
child = os.fork()
if not child:
    os._exit(0 if OpSpec("norm").devices == ("cpu", "cuda") else 1)
code = os.waitpid(child, 0)[1]
go_on.set()
sys.exit(code)
"""


def test_a_child_forked_while_a_thread_reads_a_familys_files():
    """Its own families' files it can read: functools.cached_property has one lock for all of them
    before Python 3.12."""
    process = subprocess.Popen(
        [sys.executable, "-c", READS], env=child_environment(), start_new_session=True, text=True
    )
    try:
        assert process.wait(SECONDS) == 0
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """The process and what it forked, which is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
